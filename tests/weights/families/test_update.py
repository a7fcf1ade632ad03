"""One optimizer step of each family, on eight ranks, is AdamW's first step with transformers' gradients.

What a layout can still get wrong behind right gradients shows here: the norm that clips them (a parameter that several
ranks hold counts once), decay, and what the optimizer keeps of each shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.policy.model import ddp_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper, apply_gradients
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import buckets, gather, plan_export
from megatron_gspo.weights.load import load_hf
from tests.policy import tiny
from tests.ranks import run_ranks
from tests.weights.families import test_deepseek_v3, test_glm4_moe, test_gpt_oss
from tests.weights.models import EXPERTS, SHAPE, built, policy_config
from tests.weights.parity import DOCUMENTS, file_tensors, hf_gradients, micro_batches, weighted_loss, write

# A large rate and epsilon keep every number of the step visible and smooth: lr x g / (|g| + eps), g of norm CLIP.
LR, EPS, DECAY, CLIP = 0.1, 1e-3, 0.5, 0.1
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek_v3": test_deepseek_v3.model,
    "glm4_moe": test_glm4_moe.model,
    "gpt_oss": test_gpt_oss.model,
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4)),
    "olmoe": lambda: hf.OlmoeForCausalLM(
        hf.OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, pad_token_id=None)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40)
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **EXPERTS)),
}


def updated(directory: Path, config: LayoutConfig) -> tuple[float, dict]:
    """Gradient norm before clipping, and the tensors that this rank sends after one step."""
    with built(directory, config) as (model, layout):
        policy = policy_config(directory, config)
        section = replace(policy.optimizer, lr=LR, eps=EPS, weight_decay=DECAY, clip_grad=CLIP)
        policy = replace(policy, optimizer=section)
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        load_hf(directory, binding)
        chunks = wrap(model, ddp_config(policy), layout)
        optimizer, scheduler = build_optimizer(replace(tiny.recipe(distributed=True), policy=policy), chunks, layout)
        optimizer.reload_model_params()

        def loss(micro_batch, number, logp, entropy):
            mask = micro_batch.loss_mask
            return weighted_loss(logp[mask], micro_batch.position_ids[0][mask]), {}

        mine = micro_batches(model.vocab_size, layout)
        Stepper(model, chunks, layout, temperature=1.0).forward_backward(mine, loss, sum(map(sum, DOCUMENTS)))
        norm, _, applied = apply_gradients(optimizer, scheduler, skip_non_finite=False, what="policy")
        assert applied
        plan = plan_export(bind(model.chunks, model.hf_config, layout.pgs))
        return norm, {
            name: tensor.detach().numpy().copy()
            for bucket in buckets(plan, size_bytes=2**20)
            for name, tensor in gather(bucket)
        }


def first_step(weight: torch.Tensor, gradient: torch.Tensor, norm: float, *, is_vector: bool) -> torch.Tensor:
    clipped = gradient.double() * (CLIP / norm)
    decay = 0.0 if is_vector else DECAY
    return weight.double() * (1 - LR * decay) - LR * clipped / (clipped.abs() + EPS)


@pytest.mark.parametrize("family", MODELS)
def test_one_step(family: str, tmp_path: Path):
    torch.manual_seed(0)
    directory, model = write(tmp_path / "hf", MODELS[family]())
    moe = "num_experts_per_tok" in model.config.to_dict()
    found = hf_gradients(model, tmp_path / "gradients")
    # Expert biases are buffers: no gradient moves them, nor does it count.
    gradients = {k: torch.zeros_like(v) if k.endswith("e_score_correction_bias") else v for k, v in found.items()}
    etp = 1 if family == "gpt_oss" else 2  # Megatron has no biases of experts cut over ETP
    layout = LayoutConfig(tp=4, ep=2, etp=etp) if moe else LayoutConfig(tp=2, pp=2)  # two data-parallel ranks
    by_rank = run_ranks(8, updated, directory, layout)
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    assert [norm for norm, _ in by_rank] == pytest.approx([expected] * 8, rel=1e-5)
    sent = {name: torch.from_numpy(tensor) for _, tensors in by_rank for name, tensor in tensors.items()}
    weights = file_tensors(directory)
    assert sent.keys() == weights.keys()
    for name, tensor in sent.items():
        # Gradients agree to some 1e-6 of the largest, CLIP at most; the slope of the step is LR / EPS.
        is_vector = tensor.dim() == 1 or name.endswith("_bias")  # of gpt-oss' experts, stacked
        wanted = first_step(weights[name], gradients[name], expected, is_vector=is_vector)
        torch.testing.assert_close(tensor.double(), wanted, rtol=0, atol=2e-5)

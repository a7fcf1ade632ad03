"""The routers' expert bias, an fp32 buffer, in a bf16 model that trains and leaves; and layers that no model holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megatron_gspo.batch.shard import MicroBatch
from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.policy.flops import active_parameters
from megatron_gspo.policy.model import Model, ddp_config, freeze, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper, apply_gradients
from megatron_gspo.weights.bind import Binding, bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.load import load_hf
from megatron_gspo.weights.save import save_hf
from tests.policy import tiny
from tests.ranks import run_ranks
from tests.weights.families import test_deepseek_v3
from tests.weights.models import built, policy_config
from tests.weights.parity import file_tensors, micro_batches, weighted_loss

BIAS, FURTHER = "mlp.gate.e_score_correction_bias", "model.layers.4."  # behind the four of the model
LAYOUT = LayoutConfig(tp=2, pp=2, ep=2)


def write(directory: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A bf16 checkpoint as published ones are: fp32 biases, and a further layer of other shapes and dtypes."""
    test_deepseek_v3.model(num_mtp_layers=1).bfloat16().save_pretrained(directory)
    file = directory / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(BIAS)]:
        tensors[name] = torch.randn(8, generator=torch.Generator().manual_seed(len(name)))
    tensors[FURTHER + "eh_proj.weight"] = torch.randn(32, 64, generator=generator).bfloat16()
    tensors[FURTHER + "embed_tokens.weight"] = torch.randn(128, 32, generator=generator).bfloat16()
    tensors[FURTHER + BIAS] = torch.randn(8, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def trained(source: Path, target: Path, config: LayoutConfig, wraps_first: bool) -> float:
    """Loads, makes two steps in which Megatron would move a bias by 1, and saves; how far a weight went."""
    policy = replace(policy_config(source, config, Dtype.bf16), megatron={"moe_router_bias_update_rate": 1.0})
    recipe = replace(tiny.recipe(distributed=True), policy=policy)
    with built(source, config, Dtype.bf16) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        if not wraps_first:
            load_hf(source, binding)
        chunks = wrap(model, ddp_config(policy), layout)
        if wraps_first:
            load_hf(source, binding)
        optimizer, scheduler = build_optimizer(recipe, chunks, layout)
        stepper = Stepper(model, chunks, layout, temperature=1.0)
        before = [bound.parameter.detach().clone() for bound in binding.bound]

        def loss(micro_batch: MicroBatch, number: int, logp: torch.Tensor, entropy: torch.Tensor):
            mask = micro_batch.loss_mask
            return weighted_loss(logp[mask], micro_batch.position_ids[0][mask]), {}

        for _ in range(2):
            stepper.forward_backward(micro_batches(model.vocab_size, layout), loss, 128)
            apply_gradients(optimizer, scheduler, skip_non_finite=False, what="policy")
        save_hf(target, plan_export(binding, torch.bfloat16), source)
        original = file_tensors(source)
        for name, bias in routing(model, binding):
            assert bias.dtype == torch.float32 and torch.equal(bias, original[name]), name
        return max(float((b.parameter - old).abs().max()) for b, old in zip(binding.bound, before, strict=True))


def routing(model: Model, binding: Binding) -> Iterator[tuple[str, torch.Tensor]]:
    """HF name and value of the biases by which this rank's routers choose, which are the bound ones."""
    for name, bias in (pair for chunk in model.chunks for pair in chunk.named_buffers()):
        if name.endswith("expert_bias"):
            (bound,) = [entry for entry in binding.bound if entry.parameter is bias]
            yield bound.claim.hf[0].name, bias


@pytest.mark.parametrize("wraps_first", [False, True])
def test_two_steps_move_weights_but_neither_biases_nor_further_layers(wraps_first: bool, tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    original = write(source)
    assert min(run_ranks(4, trained, source, target, LAYOUT, wraps_first)) > 0
    after = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
    kept = [name for name in original if name.endswith(BIAS) or name.startswith(FURTHER)]
    assert len(kept) == 3 + 3
    for name in kept:
        assert after[name].dtype == original[name].dtype and torch.equal(after[name], original[name]), name
    assert {tensor.dtype for name, tensor in after.items() if not name.endswith(BIAS)} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, original["model.layers.1." + BIAS])


def test_further_layers_send_no_gradient(tmp_path: Path):
    """Two checkpoints that differ in their further layer alone become the same model."""
    after = []
    for seed in (0, 1):
        source, target = tmp_path / f"source{seed}", tmp_path / f"target{seed}"
        original = write(source, seed=seed)
        run_ranks(1, trained, source, target, LayoutConfig(), False)
        after.append(file_tensors(target))
        assert torch.equal(after[-1][FURTHER + "eh_proj.weight"], original[FURTHER + "eh_proj.weight"])
    differing = {name for name, tensor in after[0].items() if not torch.equal(tensor, after[1][name])}
    assert differing == {name for name in after[0] if name.startswith(FURTHER)} != set()


def frozen_biases(source: Path) -> list[np.ndarray]:
    with built(source, LayoutConfig(), Dtype.bf16) as (model, layout):
        binding = bind(model.chunks, model.hf_config, layout.pgs)
        load_hf(source, binding)
        freeze(model)
        return [bias.numpy() for _, bias in routing(model, binding)]


def test_a_frozen_model_in_bf16_routes_by_the_same_biases(tmp_path: Path):
    original = write(tmp_path)
    found = run_ranks(1, frozen_biases, tmp_path)[0]
    for layer, bias in enumerate(found, start=1):
        np.testing.assert_array_equal(bias, original[f"model.layers.{layer}.{BIAS}"].numpy(), strict=True)


def unclaimed(source: Path) -> str:
    with built(source, LayoutConfig()) as (model, layout):
        router = model.chunks[0].decoder.layers[1].mlp.router
        assert "local_tokens_per_expert" in dict(router.named_buffers())  # a counter, which nobody has to claim
        router.register_buffer("other", torch.zeros(8))
        with pytest.raises(ValueError) as raised:
            bind(model.chunks, model.hf_config, layout.pgs)
        return str(raised.value)


def test_a_buffer_that_no_rule_claims_is_named(tmp_path: Path):
    write(tmp_path)
    message = run_ranks(1, unclaimed, tmp_path)[0]
    assert "that no rule claims: decoder.layers.1.mlp.router.other." in message


@pytest.mark.parametrize(
    ("topk", "groups", "kept", "same"), [(8, 8, 4, True), (4, 4, 2, True), (6, 1, 1, True), (8, 8, 2, False)]
)
def test_megatron_routes_as_transformers_where_two_experts_rank_a_group(topk: int, groups: int, kept: int, same: bool):
    """Where num_experts_per_tok // topk_group is not 2, families refuse: here is what they spare."""
    config = test_deepseek_v3.model(num_hidden_layers=1).config
    config.num_experts_per_tok, config.n_group, config.topk_group, config.n_routed_experts = topk, groups, kept, 64
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
    router.e_score_correction_bias.normal_(std=0.3)
    logits, weights, chosen = router(torch.randn(500, config.hidden_size))
    expected = torch.zeros_like(logits).scatter(1, chosen, weights)
    limits = {"num_groups": groups, "group_topk": kept} if kept < groups else {}
    ours, _ = topk_routing_with_score_function(
        logits,
        topk,
        scaling_factor=config.routed_scaling_factor,
        score_function="sigmoid",
        expert_bias=router.e_score_correction_bias,
        **limits,
    )
    assert torch.allclose(ours, expected, rtol=1e-6, atol=0) == same


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_flops_count_the_matrices_that_a_token_meets(q_lora_rank: int | None):
    made = test_deepseek_v3.model(q_lora_rank=q_lora_rank)
    matrices = sum(p.numel() for p in made.parameters() if p.dim() > 1) - made.get_input_embeddings().weight.numel()
    idle = 3 * (8 - 4) * 3 * 32 * 16  # in three sparse layers, of three matrices
    assert active_parameters(made.config.to_dict()) == matrices - idle

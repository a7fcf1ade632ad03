"""Multi-token-prediction layers that train: transformers' numbers on every layout; the policy does not notice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_gspo.batch.shard import MicroBatch, shard
from megatron_gspo.config import LayoutConfig, Mtp
from megatron_gspo.policy.flops import active_parameters, attention_cost
from megatron_gspo.policy.model import build_model, ddp_config, freeze, wrap
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.claims import claims_of
from megatron_gspo.weights.export import buckets, gather, plan_export
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.load import checkpoint_shapes, load_hf
from tests.ranks import run_ranks
from tests.weights.families import test_deepseek_v3, test_glm4_moe
from tests.weights.families.mtp import TEMPERATURE, Further, expected, trajectories, write_further
from tests.weights.families.published import config
from tests.weights.models import policy_config, read_config
from tests.weights.parity import GRADIENTS, file_tensors

CUTS = {
    "one row each": ([0], [1], [2], [3], [4], [5], [6], [7]),
    "uneven": ([0, 1, 3], [2, 5], [4], [6, 7]),
    "two": ([4, 1, 7], [0, 2, 3, 5, 6]),
}
LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"ep": 2}, {"etp": 2}],
    4: [{"tp": 2, "ep": 2, "pp": 2}, {"tp": 2, "cp": 2, "ep": 4}, {"cp": 4}],
}


@dataclass(frozen=True)
class Case:
    family: str
    layout: LayoutConfig
    cut: str
    mtp: Mtp = Mtp.train

    def __str__(self) -> str:
        sizes = {k: v for k, v in vars(self.layout).items() if v not in (1, None)}
        return f"{self.family} {sizes} {self.cut} {self.mtp}"


@dataclass(frozen=True)
class Found:
    """On one rank: gradients and equality with the file of the tensors that it sends, (sum, count) of -logp."""

    gradients: dict[str, np.ndarray]
    equal: dict[str, bool]
    nll: tuple[float, float]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Further]:
    root = tmp_path_factory.mktemp("mtp")
    return {
        "deepseek": write_further(root / "deepseek", test_deepseek_v3.model(), 2),
        "glm": write_further(root / "glm", test_glm4_moe.model(), 1, repeated=False),
    }


def on_rank(cases: list[Case], directories: dict[str, Path]) -> list[Found]:
    return [step(case, directories[case.family]) for case in cases]


def step(case: Case, directory: Path) -> Found:
    from megatron.core import parallel_state

    from megatron_gspo.policy.layout import init_layout

    layout = init_layout(case.layout)
    policy = replace(policy_config(directory, case.layout), mtp=case.mtp)
    policy = replace(policy, optimizer=replace(policy.optimizer, distributed=False))
    model = build_model(read_config(directory), policy, layout)
    binding = bind(model.chunks, model.hf_config, layout.pgs)
    load_hf(directory, binding)
    original = file_tensors(directory)
    plan = plan_export(binding)
    equal = {name: torch.equal(tensor, original[name]) for name, tensor in sent(plan).items()}
    assert checkpoint_shapes(directory, binding) == {tensor.name: tensor.shape for tensor in plan.served().tensors}
    chunks = wrap(model, ddp_config(policy), layout)

    def loss(micro_batch: MicroBatch, number: int, logp: torch.Tensor, entropy: torch.Tensor):
        return -torch.where(micro_batch.loss_mask, logp, 0.0).sum() / 100.0, {}

    held = trajectories(model.vocab_size)
    mine = [
        shard(held, rows, padded_length=96, cp=layout.cp, cp_rank=layout.cp_rank)
        for rows in CUTS[case.cut][layout.dp_rank :: layout.dp]
    ]
    stepper = Stepper(model, chunks, layout, temperature=TEMPERATURE)
    metrics = stepper.forward_backward(mine, loss, 127)
    nll = (0.0, 0.0)
    if case.mtp is Mtp.train and layout.is_last_stage and layout.tp_rank == 0:
        parts = [part["mtp_nll"] for part in metrics]
        nll = float(sum(part.total for part in parts)), float(sum(part.count for part in parts))
    assert_copies_agree(model, layout)
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    found = Found(
        {name: tensor.numpy() for name, tensor in sent(plan_export(binding_again(model, layout))).items()}, equal, nll
    )
    parallel_state.destroy_model_parallel()
    return found


def binding_again(model: Any, layout: Any):
    return bind(model.chunks, model.hf_config, layout.pgs)


def sent(plan) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for bucket in buckets(plan, 2**14) for name, tensor in gather(bucket)}


def assert_copies_agree(model, layout) -> None:
    """The embedding that multi-token-prediction layers read on the last stage moves as the first stage's."""
    if layout.pp == 1:
        return
    gradients = [c.embedding.word_embeddings.weight.main_grad for c in model.chunks if hasattr(c, "embedding")]
    everyone: list[Any] = [None] * layout.pp
    dist.all_gather_object(everyone, [gradient.clone().numpy() for gradient in gradients], group=layout.pgs.pp)
    held = [gradient for rank in everyone for gradient in rank]
    assert all(np.array_equal(held[0], gradient) for gradient in held[1:])
    assert np.abs(held[0]).max() > 0


def is_further(name: str, first: int) -> bool:
    return name.startswith("model.layers.") and int(name.split(".")[2]) >= first


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_and_cut(size: int, made: dict[str, Further]):
    cuts = list(CUTS)
    cases = [
        Case(family, LayoutConfig(**layout), cuts[number % 3])
        for family in made
        for number, layout in enumerate(LAYOUTS[size] * (3 if size == 1 else 1))
        if size // (layout.get("pp", 1) * layout.get("tp", 1) * layout.get("cp", 1)) <= 2 or cuts[number % 3] != "two"
    ]
    cases += [replace(case, mtp=Mtp.carry) for case in cases]
    by_rank = run_ranks(
        size, on_rank, cases, {name: further.directory for name, further in made.items()}, timeout_s=500
    )
    found = {case: [rank[number] for rank in by_rank] for number, case in enumerate(cases)}
    wanted = {family: expected(further) for family, further in made.items()}
    for case, ranks in found.items():
        gradients = {name: tensor for rank in ranks for name, tensor in rank.gradients.items()}
        assert all(same for rank in ranks for same in rank.equal.values()), case
        if case.mtp is Mtp.carry:
            continue
        nll, theirs = wanted[case.family]
        first = made[case.family].model.config.num_hidden_layers
        further = {name for name in gradients if is_further(name, first) and not name.endswith("correction_bias")}
        assert further == theirs.keys(), case
        for name in further:
            error = np.abs(gradients[name] - theirs[name].numpy()).max() / np.abs(theirs[name].numpy()).max().clip(
                1e-12
            )
            assert error < GRADIENTS, f"{case}: gradient of {name} is off by {error:.2e} of its largest"
        total, count = (sum(rank.nll[i] for rank in ranks) for i in range(2))
        assert total / count == pytest.approx(nll, rel=1e-5), case
        # Neither the policy's gradients nor what else trains know of them.
        without = {n: t for rank in found[replace(case, mtp=Mtp.carry)] for n, t in rank.gradients.items()}
        assert without.keys() == {name for name in gradients if not is_further(name, first)}
        for name, gradient in without.items():
            # Sums over more than two ranks are taken in an order that depends on the size of DDP's buffer.
            bound = 0.0 if size <= 2 else 1e-6 * np.abs(gradient).max()
            assert np.abs(gradient - gradients[name]).max() <= bound, f"{case}: {name}"


def model_of(config: dict[str, Any], policy: dict[str, Any], layout: LayoutConfig) -> tuple[set[str], int]:
    """Parameters of multi-token-prediction layers, and rows of the output processor's input in scoring."""
    from megatron.core import parallel_state

    from megatron_gspo.policy.layout import init_layout

    ranks = init_layout(layout)
    try:
        model = build_model(config, replace(policy_config(Path(), layout), **policy), ranks)
        stepper = Stepper(model, freeze(model), ranks, temperature=1.0)
        seen = []
        chunk = model.chunks[-1]
        if chunk.mtp_process:
            for layer in chunk.mtp.layers:
                layer.register_forward_hook(lambda *_: seen.append(1))
        stepper.score([shard(trajectories(128), [0], padded_length=16, cp=1, cp_rank=0)])
        return {name for one in model.chunks for name, _ in one.named_parameters() if "mtp" in name}, len(seen)
    finally:
        parallel_state.destroy_model_parallel()


def test_none_is_built_by_default(made: dict[str, Further]):
    ((names, _),) = run_ranks(1, model_of, read_config(made["glm"].directory), {}, LayoutConfig())
    assert names == set()


def test_scoring_leaves_them_out(made: dict[str, Further]):
    ((names, passes),) = run_ranks(1, model_of, read_config(made["glm"].directory), {"mtp": Mtp.train}, LayoutConfig())
    assert "mtp.layers.0.eh_proj.weight" in names
    assert passes == 0


REFUSED = {
    "no such layers": (
        {"num_nextn_predict_layers": 0},
        {},
        "policy.mtp: train: this glm4_moe model has no multi-token",
    ),
    "tied": ({"tie_word_embeddings": True}, {}, "tie_word_embeddings: policy.mtp: train"),
    "repeated": ({}, {"megatron": {"mtp_use_repeated_layer": True}}, "mtp_use_repeated_layer: is not free"),
    "number": ({}, {"megatron": {"mtp_num_layers": 1}}, "mtp_num_layers: is not free, set it through policy.mtp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, made: dict[str, Further]):
    changed, policy, message = REFUSED[name]
    config = read_config(made["glm"].directory) | changed
    with pytest.raises(AssertionError, match=message):
        run_ranks(1, model_of, config, {"mtp": Mtp.train} | policy, LayoutConfig())


def test_families_without_such_layers_refuse_the_key():
    with pytest.raises(ValueError, match=r"policy\.mtp: train: this qwen3 model has no multi-token-prediction layers"):
        family_for({"model_type": "qwen3"}).trained_further({"model_type": "qwen3"})


@pytest.mark.parametrize("stages", ["Ett|ttL", "Ett|tt|mL", "Ett|ttm|L"])
def test_they_stand_behind_the_last_layer_on_its_stage(stages: str, made: dict[str, Further]):
    layout = LayoutConfig(pp=stages.count("|") + 1, pipeline_layout=stages)
    with pytest.raises(AssertionError, match=r"pipeline_layout: .* must put 1 multi-token-prediction layers"):
        run_ranks(layout.pp, model_of, read_config(made["glm"].directory), {"mtp": Mtp.train}, layout)


def load(directory: Path) -> None:
    from megatron_gspo.policy.layout import init_layout

    layout = init_layout(LayoutConfig())
    model = build_model(
        read_config(directory), replace(policy_config(directory, LayoutConfig()), mtp=Mtp.train), layout
    )
    load_hf(directory, bind(model.chunks, model.hf_config, layout.pgs))


def test_an_embedding_of_their_own_is_refused(made: dict[str, Further], tmp_path: Path):
    source = made["deepseek"].directory
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.5.embed_tokens.weight"][3, 4] += 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(AssertionError, match=r"layers.5.embed_tokens.weight is to repeat .*set policy.mtp: carry"):
        run_ranks(1, load, tmp_path)


def test_published_models():
    """DeepSeek-V3's model card: 11.5 B beside 671 B, the embedding and the output layer once more left out. A sparse
    layer (MLA, router, 256 + 1 experts, norms), eh_proj, enorm, hnorm and the final norm."""
    c = config("deepseek-v3")
    claims = claims_of(family_for(c).all_rules(c))
    further = [tensor for claim in claims if claim.is_further for tensor in claim.hf]
    hidden, heads = 7168, 128
    attention = hidden * 1536 + 1536 * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    experts = 257 * 3 * hidden * 2048 + 256 * hidden + 256
    norms = 1536 + 512 + 2 * hidden
    assert sum(prod(tensor.shape) for tensor in further) == attention + experts + norms + 2 * hidden**2 + 3 * hidden
    assert {tensor.name.split(".")[2] for tensor in further} == {"61"}
    first = claims[0].hf[0]
    assert first.repeats == ("model.layers.61.embed_tokens.weight",)


def test_flops_count_them(made: dict[str, Further]):
    c = read_config(made["deepseek"].directory)
    layers = made["deepseek"].layers
    matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    idle = 2 * (8 - 4) * 3 * 32 * 16
    output = 2 * 128 * 32
    assert active_parameters(c, 2) - active_parameters(c) == matrices - idle + output
    assert attention_cost(c, 2) * active_parameters(c, 2) == pytest.approx(
        1.5 * attention_cost(c) * active_parameters(c)
    )

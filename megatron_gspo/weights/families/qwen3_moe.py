"""Qwen3 with mixture-of-experts layers, all of them or some."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.weights.families.family import Family, HFConfig, need
from megatron_gspo.weights.families.qwen3 import HF_LAYER, LAYER, attention, dense_mlp, embeddings
from megatron_gspo.weights.rules import Copy, GateUp, HFTensor, Rule, Stacked


def num_experts(c: HFConfig) -> int:
    """Experts of a sparse layer; transformers 5 renamed the field."""
    return need(c, "num_experts", "num_local_experts")


def sparse_layers(c: HFConfig) -> tuple[int, ...]:
    """Layers with experts, as transformers chooses them: every `decoder_sparse_step`-th one, less `mlp_only_layers`."""
    step, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or ()
    layers = range(need(c, "num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def router(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    gate = HFTensor(HF_LAYER + "mlp.gate.weight", (num_experts(c), need(c, "hidden_size")))
    return [Copy(hf=(gate,), megatron=(LAYER + "mlp.router.weight",), layers=tuple(layers))]


def experts(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    """SwiGLU experts. HF writes them one by one or, in transformers 5, stacked [experts, gate then up, hidden]."""
    hidden, ffn, n = need(c, "hidden_size"), need(c, "moe_intermediate_size"), num_experts(c)
    hf, expert = HF_LAYER + "mlp.experts.", HF_LAYER + "mlp.experts.{expert}."
    gate_up, down = hf + "gate_up_proj", hf + "down_proj"
    return [
        GateUp(
            hf=(
                HFTensor(expert + "gate_proj.weight", (ffn, hidden), Stacked(gate_up, (n, 2 * ffn, hidden))),
                HFTensor(expert + "up_proj.weight", (ffn, hidden), Stacked(gate_up, (n, 2 * ffn, hidden), row=ffn)),
            ),
            megatron=_expert_spellings("linear_fc1"),
            layers=tuple(layers),
            experts=n,
        ),
        Copy(
            hf=(HFTensor(expert + "down_proj.weight", (hidden, ffn), Stacked(down, (n, hidden, ffn))),),
            megatron=_expert_spellings("linear_fc2"),
            dim=1,
            layers=tuple(layers),
            experts=n,
        ),
    ]


def _expert_spellings(linear: str) -> tuple[str, ...]:
    """Grouped linears (TEGroupedMLP) and one MLP per expert (SequentialMLP)."""
    block = LAYER + "mlp.experts."
    return block + linear + ".weight{expert}", block + "local_experts.{expert}." + linear + ".weight"


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    sparse = sparse_layers(c)
    dense = [layer for layer in layers if layer not in sparse]
    return [*embeddings(c), *attention(c, layers), *dense_mlp(c, dense), *router(c, sparse), *experts(c, sparse)]


FAMILY = Family(model_type="qwen3_moe", rules=rules)

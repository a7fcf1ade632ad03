"""Mixtral: experts in every layer, under names of its own."""

from __future__ import annotations

from megatron_gspo.weights.families.blocks import HF_LAYER, LAYER, attention, embeddings, expert_spellings, norms
from megatron_gspo.weights.families.decoder import decoder, rope, softmax_experts, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Copy, GateUp, HFTensor, Rule, Stacked

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def num_experts(c: HFConfig) -> int:
    return need(c, "num_local_experts", "num_experts")


def architecture(c: HFConfig) -> Architecture:
    refuse(
        c,
        sliding_window=(c.get("sliding_window") is not None, "SGLang would sample without windows in this family"),
        router_jitter_noise=(bool(c.get("router_jitter_noise")), "old and new log-probabilities would differ"),
    )
    mixture = softmax_experts(
        c,
        sparse=range(need(c, "num_hidden_layers")),
        experts=num_experts(c),
        ffn=need(c, "intermediate_size"),
        normalise=True,
    )
    turned = {"rope_theta": 1e6, **c}  # transformers' default for this family is not that of the others
    return Architecture(transformer=decoder(c, **mixture), rope=rope(turned), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    return [*embeddings(c), *norms(c, layers), *attention(c, layers), *mixture_rules(c, layers)]


def mixture_rules(c: HFConfig, layers: range) -> list[Rule]:
    """Router and SwiGLU experts. The stacked format of transformers 5 also has its usual names for them."""
    n, ffn, hidden = num_experts(c), need(c, "intermediate_size"), need(c, "hidden_size")
    gate_up = Stacked(HF_LAYER + "mlp.experts.gate_up_proj", (n, 2 * ffn, hidden))
    up = Stacked(gate_up.name, gate_up.shape, row=ffn)
    down = Stacked(HF_LAYER + "mlp.experts.down_proj", (n, hidden, ffn))

    def tensor(part: str, shape: tuple[int, int], stacked: Stacked) -> HFTensor:
        return HFTensor(f"{HF_LAYER}block_sparse_moe.experts.{{expert}}.{NAMES[part]}.weight", shape, stacked)

    router = HFTensor(
        HF_LAYER + "block_sparse_moe.gate.weight", (n, hidden), other_names=(HF_LAYER + "mlp.gate.weight",)
    )
    return [
        Copy(hf=(router,), megatron=(LAYER + "mlp.router.weight",), layers=tuple(layers)),
        GateUp(
            hf=(tensor("gate", (ffn, hidden), gate_up), tensor("up", (ffn, hidden), up)),
            megatron=expert_spellings("linear_fc1.weight"),
            layers=tuple(layers),
            experts=n,
        ),
        Copy(
            hf=(tensor("down", (hidden, ffn), down),),
            megatron=expert_spellings("linear_fc2.weight"),
            dim=1,
            layers=tuple(layers),
            experts=n,
        ),
    ]


FAMILY = Family(model_type="mixtral", architecture=architecture, rules=rules)

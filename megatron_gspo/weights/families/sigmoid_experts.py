"""The mixture of DeepSeek-V3 (arXiv 2412.19437), which GLM-4.5 shares: dense first layers, then shared experts beside
routed ones, chosen by a sigmoid and a bias that balances them without a loss, and layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_gspo.weights.families.blocks import HF_LAYER, LAYER, copy, dense_mlp, experts, router, swiglu
from megatron_gspo.weights.families.family import HFConfig, need, refuse
from megatron_gspo.weights.rules import FURTHER, Copy, HFTensor, Rule


def sparse_layers(c: HFConfig) -> range:
    return range(need(c, "first_k_dense_replace"), need(c, "num_hidden_layers"))


def mixture(c: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig. Raises ValueError for routers that Megatron has not."""
    topk = need(c, "num_experts_per_tok")
    refuse(
        c,
        scoring_func=(c.get("scoring_func", "sigmoid") != "sigmoid", "only sigmoid scores are built"),
        topk_method=(c.get("topk_method", "noaux_tc") != "noaux_tc", "only routing with an expert bias is built"),
        moe_layer_freq=(c.get("moe_layer_freq", 1) != 1, "every layer after the dense ones has experts"),
        norm_topk_prob=(
            c.get("norm_topk_prob", True) != (topk > 1),
            f"Megatron divides the scores of the chosen experts by their sum, unless it is one; here {topk} are chosen",
        ),
    )
    layers = range(need(c, "num_hidden_layers"))
    return {
        "num_moe_experts": num_experts(c),
        "moe_ffn_hidden_size": need(c, "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": shared_width(c),
        "moe_layer_freq": [int(layer in sparse_layers(c)) for layer in layers],
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": need(c, "routed_scaling_factor"),
        **_groups(c, topk),
    }


def _groups(c: HFConfig, topk: int) -> dict[str, Any]:
    """A token's experts come from the `topk_group` groups whose two best experts have the largest sum of scores."""
    groups, kept = c.get("n_group") or 1, c.get("topk_group") or 1
    if kept >= groups:
        return {}
    refuse(
        c,
        topk_group=(
            topk // kept != 2,
            f"groups are ranked by their two best experts, Megatron ranks them by num_experts_per_tok // topk_group = "
            f"{topk // kept}",
        ),
    )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": kept}


def num_experts(c: HFConfig) -> int:
    return need(c, "n_routed_experts", "num_local_experts")


def shared_width(c: HFConfig) -> int:
    """Width of the shared experts, which are one MLP."""
    return need(c, "n_shared_experts") * need(c, "moe_intermediate_size")


def mlps(c: HFConfig) -> list[Rule]:
    """Rules of all MLPs, dense and sparse."""
    sparse = sparse_layers(c)
    return [*dense_mlp(c, range(sparse.start)), *sparse_mlps(c, sparse)]


def sparse_mlps(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    n = num_experts(c)
    return [
        *router(c, layers, n),
        expert_bias(layers, n),
        *swiglu("mlp.shared_experts.", need(c, "hidden_size"), shared_width(c), layers),
        *experts(c, layers, n, need(c, "moe_intermediate_size")),
    ]


def expert_bias(layers: Sequence[int], n: int) -> Rule:
    """fp32 in every model: scores lie so close that a rounded bias routes to other experts."""
    bias = HFTensor(HF_LAYER + "mlp.gate.e_score_correction_bias", (n,))
    return Copy(hf=(bias,), megatron=(LAYER + "mlp.router.expert_bias",), layers=tuple(layers), keeps_dtype=True)


def further_layers(c: HFConfig) -> range:
    """Multi-token-prediction layers stand behind the model's own in the checkpoint."""
    first = need(c, "num_hidden_layers")
    return range(first, first + (c.get("num_nextn_predict_layers", c.get("num_mtp_layers", 1)) or 0))


def further_rules(c: HFConfig, attention: Sequence[Rule]) -> list[Rule]:
    """Rules of these layers: each a sparse layer of the model, `attention` being those of its attention and norms, that
    reads what the layer before it ends in beside the embedding of the next token."""
    layers, hidden = further_layers(c), need(c, "hidden_size")
    block = [
        replace(rule, megatron=tuple(name.replace(LAYER, FURTHER + "mtp_model_layer.") for name in rule.megatron))
        for rule in [*attention, *sparse_mlps(c, layers)]
    ]
    norms = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "final_layernorm"}
    return [
        copy(f"{HF_LAYER}eh_proj.weight", (hidden, 2 * hidden), f"{FURTHER}eh_proj.weight", dim=0, layers=layers),
        *(copy(f"{HF_LAYER}{x}.weight", (hidden,), f"{FURTHER}{y}.weight", layers=layers) for x, y in norms.items()),
        *block,
    ]

"""What decoder-only families share: fields of Megatron's TransformerConfig from those of config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_gspo.weights.families.family import HFConfig, need, refuse
from megatron_gspo.weights.families.rope import Rope, rope_parameters


def head_dim(c: HFConfig) -> int:
    """Width of a head of queries, keys and values; most configs leave it to follow from the others."""
    return c.get("head_dim") or need(c, "hidden_size") // need(c, "num_attention_heads")


def kv_heads(c: HFConfig) -> int:
    return c.get("num_key_value_heads") or need(c, "num_attention_heads")


def rope(c: HFConfig) -> Rope:
    parameters = rope_parameters(c)
    given = parameters.get("attention_factor") is not None
    refuse({"rope_parameters": parameters}, rope_parameters=(given, "SGLang would sample without attention_factor"))
    return Rope(parameters, head_dim(c), need(c, "max_position_embeddings"))


def tied(c: HFConfig) -> bool:
    return bool(c.get("tie_word_embeddings", False))


def decoder(c: HFConfig, **fields: Any) -> dict[str, Any]:
    """A pre-norm decoder with RMSNorm, grouped-query attention without biases and SwiGLU, but for `fields`.

    Raises ValueError for features that Megatron would silently lack.
    """
    import torch.nn.functional as F  # not above: `show` reads families and waits for no torch

    refuse(
        c,
        use_sliding_window=(bool(c.get("use_sliding_window")), "SGLang would sample without windows in this family"),
        layer_types=(
            "window_size" not in fields and bool(set(c.get("layer_types") or ()) - {"full_attention"}),
            "only full_attention layers are built",
        ),
        dual_chunk_attention_config=(
            c.get("dual_chunk_attention_config") is not None,
            "SGLang would attend in chunks, Megatron does not; up to chunk_size tokens the two agree: remove it there",
        ),
        hidden_act=(c.get("hidden_act", "silu") != "silu", "only silu (SwiGLU) is built"),
        attention_dropout=(bool(c.get("attention_dropout")), "old and new log-probabilities would differ"),
    )
    return {
        "num_layers": need(c, "num_hidden_layers"),
        "hidden_size": need(c, "hidden_size"),
        "ffn_hidden_size": need(c, "intermediate_size"),
        "num_attention_heads": need(c, "num_attention_heads"),
        "num_query_groups": kv_heads(c),
        "kv_channels": head_dim(c),
        "normalization": "RMSNorm",
        "layernorm_epsilon": need(c, "rms_norm_eps"),
        "qk_layernorm": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
    } | fields


def sliding_windows(c: HFConfig, layer_types: Sequence[str]) -> dict[str, Any]:
    """Fields of attention to `sliding_window` tokens, the query's own among them, in layers of type sliding_attention.

    Raises ValueError for types other than that and full_attention.
    """
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    refuse(c, layer_types=(bool(unknown), "only full_attention and sliding_attention layers are built"))
    return {
        "window_size": (need(c, "sliding_window") - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in layer_types],
    }


def softmax_experts(c: HFConfig, *, sparse: Sequence[int], experts: int, ffn: int, normalise: bool) -> dict[str, Any]:
    """Fields of a mixture of `experts` of width `ffn` in the layers `sparse`, chosen by a softmax over all of them.

    normalise: the weights of the chosen ones are divided by their sum, which is a softmax over the top-k logits.
    """
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": ffn,
        "moe_router_topk": need(c, "num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalise,
        "moe_layer_freq": [int(layer in sparse) for layer in range(need(c, "num_hidden_layers"))],
    }

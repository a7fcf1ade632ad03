"""DeepSeek-V3 and R1 (arXiv 2412.19437), and smaller models of their kind: queries, keys and values come from latents
(MLA), and a part of each head carries the position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_gspo.weights.families.blocks import HF_LAYER, LAYER, copy, embeddings, norms
from megatron_gspo.weights.families.decoder import decoder, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.families.rope import rope_parameters
from megatron_gspo.weights.families.sigmoid_experts import further_layers, further_rules, mixture, mlps
from megatron_gspo.weights.rules import Rule

# SGLang 0.5.23 fuses them, and forgets one that arrives without the other (`do_load_weights`, cached_a_proj).
TO_LATENTS = "projections to latents"
LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps


def architecture(c: HFConfig) -> Architecture:
    heads = need(c, "num_attention_heads")
    refuse(
        c,
        attention_bias=(bool(c.get("attention_bias")), "Megatron has no bias on the projections to latents"),
        rope_interleave=(not c.get("rope_interleave", True), "Megatron turns neighbouring dimensions in MLA"),
        num_key_value_heads=((c.get("num_key_value_heads") or heads) != heads, "MLA has one key head per query head"),
        v_head_dim=(
            need(c, "v_head_dim") > head_width(c),
            "Megatron pads values to the width of keys, which is smaller",
        ),
    )
    transformer = decoder(
        c,
        multi_latent_attention=True,
        qk_layernorm=True,
        q_lora_rank=c.get("q_lora_rank"),
        kv_lora_rank=need(c, "kv_lora_rank"),
        qk_head_dim=need(c, "qk_nope_head_dim"),
        qk_pos_emb_head_dim=need(c, "qk_rope_head_dim"),
        v_head_dim=need(c, "v_head_dim"),
        kv_channels=head_width(c),
        num_query_groups=heads,
        **latent_rope(c),
        **mixture({"n_group": 8, "topk_group": 4, **c}),  # transformers' defaults for this family
    )
    return Architecture(transformer=transformer, rope=None, tied=tied(c), latent_norm_eps=LATENT_EPS)


def head_width(c: HFConfig) -> int:
    """Of queries and keys."""
    return need(c, "qk_nope_head_dim") + need(c, "qk_rope_head_dim")


def latent_rope(c: HFConfig) -> dict[str, Any]:
    """Fields of Megatron's MLATransformerConfig for its own rotary embedding. Raises ValueError for other types."""
    p = rope_parameters(c)
    kind = p["rope_type"]
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": p["rope_theta"]}
    mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
    refuse(
        {"rope_parameters": p},
        rope_parameters=(
            kind != "yarn"
            or not p.get("truncate", True)
            or p.get("attention_factor") is not None
            or p.get("attn_factor") is not None
            or bool(all_dim and not mscale),
            "MLA has rope_type default or yarn, with truncate, without attention_factor or attn_factor, with "
            "mscale_all_dim only beside mscale",
        ),
    )
    return {
        "rope_type": "yarn",
        "rotary_base": p["rope_theta"],
        "rotary_scaling_factor": p["factor"],
        "original_max_position_embeddings": p.get("original_max_position_embeddings")
        or need(c, "max_position_embeddings"),
        "beta_fast": p.get("beta_fast") or 32,
        "beta_slow": p.get("beta_slow") or 1,
        "mscale": mscale if all_dim else 1.0,  # transformers reads it only beside the other
        "mscale_all_dim": all_dim or 0.0,
    }


def rules(c: HFConfig) -> list[Rule]:
    return [*embeddings(c), *_attention(c, range(need(c, "num_hidden_layers"))), *mlps(c)]


def _attention(c: HFConfig, layers: range) -> list[Rule]:
    return [*norms(c, layers), *latent_attention(c, layers)]


def latent_attention(c: HFConfig, layers: range) -> list[Rule]:
    """Every tensor as it is: what leads to latents is whole on every rank, what leads from them is cut by heads."""
    hidden, heads = need(c, "hidden_size"), need(c, "num_attention_heads")
    q_rank, kv_rank, v = c.get("q_lora_rank"), need(c, "kv_lora_rank"), need(c, "v_head_dim")

    def linear(hf: str, megatron: str, *shape: int, dim: int | None) -> Rule:
        name = f"{LAYER}self_attention.linear_{megatron}.weight"
        rule = copy(f"{HF_LAYER}self_attn.{hf}.weight", shape, name, dim=dim, layers=layers)
        return replace(rule, together=TO_LATENTS) if "_a_proj" in hf else rule

    def norm(kind: str, rank: int) -> Rule:
        """Transformer Engine fuses it into the linear that follows."""
        own, fused = f"{kind}_layernorm.weight", f"linear_{kind}_up_proj.layer_norm_weight"
        spellings = tuple(f"{LAYER}self_attention.{name}" for name in (own, fused))
        return copy(f"{HF_LAYER}self_attn.{kind}_a_layernorm.weight", (rank,), *spellings, layers=layers)

    if q_rank is None:
        queries = [linear("q_proj", "q_proj", heads * head_width(c), hidden, dim=0)]
    else:
        queries = [
            linear("q_a_proj", "q_down_proj", q_rank, hidden, dim=None),
            norm("q", q_rank),
            linear("q_b_proj", "q_up_proj", heads * head_width(c), q_rank, dim=0),
        ]
    return [
        *queries,
        linear("kv_a_proj_with_mqa", "kv_down_proj", kv_rank + need(c, "qk_rope_head_dim"), hidden, dim=None),
        norm("kv", kv_rank),
        linear("kv_b_proj", "kv_up_proj", heads * (need(c, "qk_nope_head_dim") + v), kv_rank, dim=0),
        linear("o_proj", "proj", hidden, heads * v, dim=1),
    ]


FAMILY = Family(
    model_type="deepseek_v3",
    architecture=architecture,
    rules=rules,
    further=further_layers,
    further_rules=lambda c: further_rules(c, _attention(c, further_layers(c))),
)

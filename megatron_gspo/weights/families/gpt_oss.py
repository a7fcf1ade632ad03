"""gpt-oss: attention sinks, every other layer with a sliding window, biases everywhere, and a clamped SwiGLU.

Its experts are stored stacked and transposed against Megatron's, gate and up column by column in turn; the published
files hold them in MXFP4. Parity with transformers covers what Megatron calls by other names: quick_gelu is x times the
sigmoid of 1.702 x, and the offset of 1 is added to up after the clamp.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.weights.families.blocks import (
    HF_LAYER,
    LAYER,
    attention,
    copy,
    embeddings,
    expert_spellings,
    norms,
    router,
)
from megatron_gspo.weights.families.decoder import decoder, rope, sliding_windows, softmax_experts, tied
from megatron_gspo.weights.families.family import Architecture, Family, HFConfig, need, refuse
from megatron_gspo.weights.rules import Copy, GateUp, HFTensor, Rule, Stacked

ALPHA = 1.702  # of Megatron's quick_gelu


def architecture(c: HFConfig) -> Architecture:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu  # the one of two that TransformerConfig knows

    layers = range(need(c, "num_hidden_layers"))
    need(c, "rope_parameters", "rope_scaling")  # transformers would fill in YaRN
    refuse(
        c,
        attention_bias=(
            not c.get("attention_bias", True),
            "Megatron has biases on experts only with those of attention",
        ),
        swiglu_alpha=(c.get("swiglu_alpha", ALPHA) != ALPHA, f"Megatron's quick_gelu has {ALPHA}"),
    )
    alternating = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
    mixture = softmax_experts(
        c, sparse=layers, experts=need(c, "num_local_experts"), ffn=need(c, "intermediate_size"), normalise=True
    )
    transformer = decoder(
        c,
        add_bias_linear=True,
        softmax_type="learnable",
        activation_func=quick_gelu,
        glu_linear_offset=1.0,
        activation_func_clamp_value=c.get("swiglu_limit", 7.0),
        **mixture,
        **sliding_windows(c, c.get("layer_types") or alternating),
    )
    turned = {"rope_theta": 150000.0, **c}  # transformers' default for this family
    return Architecture(transformer=transformer, rope=rope(turned), tied=tied(c))


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    heads, experts = need(c, "num_attention_heads"), need(c, "num_local_experts")
    sinks = LAYER + "self_attention.core_attention.softmax_offset"
    return [
        *embeddings(c),
        *norms(c, layers),
        *attention(c, layers, qkv_bias=True, output_bias=True),
        copy(HF_LAYER + "self_attn.sinks", (heads,), sinks, dim=0, layers=layers),
        *router(c, layers, experts, "mlp.router.weight"),
        copy(HF_LAYER + "mlp.router.bias", (experts,), LAYER + "mlp.router.bias", layers=layers),
        *_experts(layers, experts, need(c, "hidden_size"), need(c, "intermediate_size")),
    ]


def _experts(layers: Sequence[int], n: int, hidden: int, ffn: int) -> list[Rule]:
    stack, one = HF_LAYER + "mlp.experts.", HF_LAYER + "mlp.experts.{expert}."

    def gate_up(kind: str, name: str, shape: tuple[int, ...], *columns: int) -> Rule:
        tensors = tuple(
            HFTensor(
                f"{one}{x}_proj.{kind}",
                (ffn, *columns),
                Stacked(stack + name, shape, row=row, step=2, transposed=bool(columns), only=True),
            )
            for row, x in enumerate(("gate", "up"))
        )
        return GateUp(hf=tensors, megatron=expert_spellings(f"linear_fc1.{kind}"), layers=tuple(layers), experts=n)

    def down(kind: str, name: str, shape: tuple[int, ...], *columns: int) -> Rule:
        stacked = Stacked(stack + name, shape, transposed=bool(columns), only=True)
        return Copy(
            hf=(HFTensor(f"{one}down_proj.{kind}", (hidden, *columns), stacked),),
            megatron=expert_spellings(f"linear_fc2.{kind}"),
            dim=1 if columns else None,
            layers=tuple(layers),
            experts=n,
        )

    return [
        gate_up("weight", "gate_up_proj", (n, hidden, 2 * ffn), hidden),
        gate_up("bias", "gate_up_proj_bias", (n, 2 * ffn)),
        down("weight", "down_proj", (n, ffn, hidden), ffn),
        down("bias", "down_proj_bias", (n, hidden)),
    ]


FAMILY = Family(model_type="gpt_oss", architecture=architecture, rules=rules)

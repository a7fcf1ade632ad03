"""Rules that families share, in the names that most HF models use."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.weights.families.decoder import head_dim, kv_heads, tied
from megatron_gspo.weights.families.family import HFConfig, need
from megatron_gspo.weights.rules import QKV, Copy, GateUp, HFTensor, Rule, Stacked, Vocab

HF_LAYER = "model.layers.{layer}."
LAYER = "decoder.layers.{layer}."


def embeddings(c: HFConfig) -> list[Rule]:
    """Embedding, final norm and output layer. Tied, the last pipeline stage holds a copy of the embedding as its output
    layer, and a checkpoint may hold the embedding once more as lm_head."""
    vocab = (need(c, "vocab_size"), need(c, "hidden_size"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    word, output = ("embedding.word_embeddings.weight",), ("output_layer.weight",)
    norm = Copy(hf=(HFTensor("model.norm.weight", vocab[1:]),), megatron=("decoder.final_layernorm.weight",))
    if tied(c):
        return [Vocab(hf=(HFTensor(embedding, vocab, duplicates=(head,)),), megatron=word, copies=output), norm]
    return [
        Vocab(hf=(HFTensor(embedding, vocab),), megatron=word),
        norm,
        Vocab(hf=(HFTensor(head, vocab),), megatron=output),
    ]


def copy(name: str, shape: tuple[int, ...], *megatron: str, layers: Sequence[int], dim: int | None = None) -> Rule:
    return Copy(hf=(HFTensor(name, shape),), megatron=megatron, dim=dim, layers=tuple(layers))


def norms(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    """The norms before attention and before the MLP. Transformer Engine fuses one into a linear that follows it."""
    hidden = (need(c, "hidden_size"),)
    return [
        copy(
            HF_LAYER + "input_layernorm.weight",
            hidden,
            LAYER + "input_layernorm.weight",
            LAYER + "self_attention.linear_qkv.layer_norm_weight",
            layers=layers,
        ),
        copy(
            HF_LAYER + "post_attention_layernorm.weight",
            hidden,
            LAYER + "pre_mlp_layernorm.weight",
            LAYER + "mlp.linear_fc1.layer_norm_weight",
            layers=layers,
        ),
    ]


def attention(
    c: HFConfig, layers: Sequence[int], *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
) -> list[Rule]:
    """Grouped-query attention; `qk_norm`: one norm for the queries and one for the keys, over a head."""
    hidden, width, groups = need(c, "hidden_size"), head_dim(c), kv_heads(c)
    hf, block = HF_LAYER + "self_attn.", LAYER + "self_attention."
    rows = {"q": need(c, "num_attention_heads") * width, "k": groups * width, "v": groups * width}

    def qkv(kind: str, *columns: int) -> Rule:
        tensors = tuple(HFTensor(f"{hf}{x}_proj.{kind}", (n, *columns)) for x, n in rows.items())
        return QKV(hf=tensors, megatron=(f"{block}linear_qkv.{kind}",), kv_heads=groups, layers=tuple(layers))

    rules = [
        qkv("weight", hidden),
        copy(hf + "o_proj.weight", (hidden, rows["q"]), block + "linear_proj.weight", dim=1, layers=layers),
    ]
    if qkv_bias:
        rules.append(qkv("bias"))
    if output_bias:
        rules.append(copy(hf + "o_proj.bias", (hidden,), block + "linear_proj.bias", layers=layers))
    if qk_norm:
        rules += [
            copy(f"{hf}{x}_norm.weight", (width,), f"{block}{x}_layernorm.weight", layers=layers) for x in ("q", "k")
        ]
    return rules


def dense_mlp(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    return swiglu("mlp.", need(c, "hidden_size"), need(c, "intermediate_size"), layers)


def swiglu(name: str, hidden: int, ffn: int, layers: Sequence[int], *, hf_name: str | None = None) -> list[Rule]:
    """A gated MLP of width `ffn` called `name` in Megatron and, but for an `hf_name`, in HF."""
    hf, block = HF_LAYER + (hf_name or name), LAYER + name
    gate, up = (HFTensor(f"{hf}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    return [
        GateUp(hf=(gate, up), megatron=(block + "linear_fc1.weight",), layers=tuple(layers)),
        copy(hf + "down_proj.weight", (hidden, ffn), block + "linear_fc2.weight", dim=1, layers=layers),
    ]


def router(c: HFConfig, layers: Sequence[int], experts: int, gate: str = "mlp.gate.weight") -> list[Rule]:
    shape = (experts, need(c, "hidden_size"))
    return [copy(HF_LAYER + gate, shape, LAYER + "mlp.router.weight", layers=layers)]


def experts(c: HFConfig, layers: Sequence[int], n: int, ffn: int) -> list[Rule]:
    """SwiGLU experts. HF writes them one by one or, in transformers 5, stacked [experts, gate then up, hidden]."""
    hidden = need(c, "hidden_size")
    hf, expert = HF_LAYER + "mlp.experts.", HF_LAYER + "mlp.experts.{expert}."
    gate_up, down = hf + "gate_up_proj", hf + "down_proj"
    return [
        GateUp(
            hf=(
                HFTensor(expert + "gate_proj.weight", (ffn, hidden), Stacked(gate_up, (n, 2 * ffn, hidden))),
                HFTensor(expert + "up_proj.weight", (ffn, hidden), Stacked(gate_up, (n, 2 * ffn, hidden), row=ffn)),
            ),
            megatron=expert_spellings("linear_fc1.weight"),
            layers=tuple(layers),
            experts=n,
        ),
        Copy(
            hf=(HFTensor(expert + "down_proj.weight", (hidden, ffn), Stacked(down, (n, hidden, ffn))),),
            megatron=expert_spellings("linear_fc2.weight"),
            dim=1,
            layers=tuple(layers),
            experts=n,
        ),
    ]


def expert_spellings(parameter: str) -> tuple[str, ...]:
    """Of `linear.parameter`: in grouped linears (TEGroupedMLP) and in one MLP per expert (SequentialMLP)."""
    block = LAYER + "mlp.experts."
    return f"{block}{parameter}{{expert}}", f"{block}local_experts.{{expert}}.{parameter}"

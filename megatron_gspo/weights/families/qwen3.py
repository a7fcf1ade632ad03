"""Qwen3, dense."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gspo.weights.families.family import Family, HFConfig, need
from megatron_gspo.weights.rules import QKV, Copy, GateUp, HFTensor, Rule, Vocab

HF_LAYER = "model.layers.{layer}."
LAYER = "decoder.layers.{layer}."


def embeddings(c: HFConfig) -> list[Rule]:
    """Embedding, final norm and output layer. Tied, the last pipeline stage holds a copy of the embedding as its output
    layer, and a checkpoint may hold the embedding once more as lm_head."""
    vocab = (need(c, "vocab_size"), need(c, "hidden_size"))
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    word, output = ("embedding.word_embeddings.weight",), ("output_layer.weight",)
    norm = Copy(hf=(HFTensor("model.norm.weight", vocab[1:]),), megatron=("decoder.final_layernorm.weight",))
    if c.get("tie_word_embeddings", False):
        return [Vocab(hf=(HFTensor(embedding, vocab, duplicates=(head,)),), megatron=word, copies=output), norm]
    return [
        Vocab(hf=(HFTensor(embedding, vocab),), megatron=word),
        norm,
        Vocab(hf=(HFTensor(head, vocab),), megatron=output),
    ]


def attention(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    """Grouped-query attention with QK-norm, and the two norms of a layer."""
    layers = tuple(layers)
    hidden, head_dim = need(c, "hidden_size"), need(c, "head_dim")
    heads, kv_heads = need(c, "num_attention_heads"), need(c, "num_key_value_heads")
    hf, block = HF_LAYER + "self_attn.", LAYER + "self_attention."
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}

    def copy(name: str, shape: tuple[int, ...], *megatron: str, dim: int | None = None) -> Rule:
        return Copy(hf=(HFTensor(name, shape),), megatron=megatron, dim=dim, layers=layers)

    def qkv(kind: str, *columns: int) -> Rule:
        tensors = tuple(HFTensor(f"{hf}{x}_proj.{kind}", (n, *columns)) for x, n in rows.items())
        return QKV(hf=tensors, megatron=(f"{block}linear_qkv.{kind}",), kv_heads=kv_heads, layers=layers)

    biases = [qkv("bias"), copy(hf + "o_proj.bias", (hidden,), block + "linear_proj.bias")]
    return [
        copy(
            HF_LAYER + "input_layernorm.weight",
            (hidden,),
            LAYER + "input_layernorm.weight",
            block + "linear_qkv.layer_norm_weight",
        ),
        qkv("weight", hidden),
        *(biases if c.get("attention_bias", False) else []),
        copy(hf + "q_norm.weight", (head_dim,), block + "q_layernorm.weight"),
        copy(hf + "k_norm.weight", (head_dim,), block + "k_layernorm.weight"),
        copy(hf + "o_proj.weight", (hidden, rows["q"]), block + "linear_proj.weight", dim=1),
        copy(
            HF_LAYER + "post_attention_layernorm.weight",
            (hidden,),
            LAYER + "pre_mlp_layernorm.weight",
            LAYER + "mlp.linear_fc1.layer_norm_weight",
        ),
    ]


def dense_mlp(c: HFConfig, layers: Sequence[int]) -> list[Rule]:
    """SwiGLU."""
    hidden, ffn = need(c, "hidden_size"), need(c, "intermediate_size")
    hf, mlp = HF_LAYER + "mlp.", LAYER + "mlp."
    gate, up = (HFTensor(f"{hf}{x}_proj.weight", (ffn, hidden)) for x in ("gate", "up"))
    down = HFTensor(hf + "down_proj.weight", (hidden, ffn))
    return [
        GateUp(hf=(gate, up), megatron=(mlp + "linear_fc1.weight",), layers=tuple(layers)),
        Copy(hf=(down,), megatron=(mlp + "linear_fc2.weight",), dim=1, layers=tuple(layers)),
    ]


def rules(c: HFConfig) -> list[Rule]:
    layers = range(need(c, "num_hidden_layers"))
    return [*embeddings(c), *attention(c, layers), *dense_mlp(c, layers)]


FAMILY = Family(model_type="qwen3", rules=rules)

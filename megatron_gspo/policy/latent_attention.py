"""Multi-latent attention as DeepSeek-V3's checkpoints have it, where Megatron-Core 0.19.2 differs; on GPU and CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention

# What the layer spec has to say of queries and latents; Megatron's own names.
PARTS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentAttention(MLASelfAttention):
    """Megatron's, built of exactly the modules that the spec names, with norms of latents of an epsilon of their own.

    Without `q_lora_rank`, Megatron would norm the hidden states once more before the projection to queries
    (`QKNormConfigResolver`), or fail where its backend cannot.
    """

    def __init__(self, *args: Any, latent_norm_eps: float, **options: Any):
        super().__init__(*args, **options)
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: Any = getattr(self, name, None)
            if hasattr(module, "eps"):  # a norm, or Transformer Engine's linear with a norm inside
                module.eps = latent_norm_eps

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in PARTS}


def latent_attention(layer_specs: Sequence[Any], eps: float) -> None:
    """Put LatentAttention in place of the attention of `layer_specs`."""
    for layer in layer_specs:
        attention = layer.submodules.self_attention
        attention.module = LatentAttention
        attention.params = {**attention.params, "latent_norm_eps": eps}

"""Rotary position embedding of a config.json, as transformers defines it: Megatron is given its frequencies.

GPTModel has RoPE variants of its own, with constants that configs vary. One door for all types cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # families are read by `show` too, which waits for no torch
    import torch

TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """`parameters`: `rope_parameters` of transformers 5; `head_dim`: of queries and keys; `max_positions`: a length."""

    parameters: Mapping[str, Any]
    head_dim: int
    max_positions: int

    @property
    def rotated(self) -> float:
        """The share of each head that is turned, its leading dimensions."""
        return self.parameters.get("partial_rotary_factor", 1.0)

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """[head_dim x rotated / 2] fp32, in radians per position, and the factor on cosines and sines (YaRN's)."""
        import torch

        kind = self.parameters["rope_type"]
        if kind == "default":
            width = int(self.head_dim * self.rotated)
            steps = torch.arange(0, width, 2, dtype=torch.int64).float() / width
            return 1.0 / self.parameters["rope_theta"] ** steps, 1.0
        from transformers import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        fields: dict[str, Any] = {
            "head_dim": self.head_dim,
            "hidden_size": self.head_dim,
            "num_attention_heads": 1,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": dict(self.parameters),
        }
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](PreTrainedConfig(**fields), torch.device("cpu"))
        if kind == "yarn":
            # Published with DeepSeek-R1-0528-Qwen3-8B. SGLang multiplies by it, transformers does not know it.
            factor *= self.parameters.get("attn_factor", 1.0)
        return frequencies, float(factor)


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, or the same from `rope_theta`, `rope_scaling` and `partial_rotary_factor` of
    earlier configs. Raises ValueError for a type that is not built."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    parameters = {"rope_theta": hf.get("rope_theta", 10000.0)} | given | {"rope_type": kind}
    if hf.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    if parameters["rope_type"] not in TYPES:
        raise ValueError(
            f"HF config, rope_parameters.rope_type: {parameters['rope_type']!r} is not built; {', '.join(TYPES)} are"
        )
    return parameters

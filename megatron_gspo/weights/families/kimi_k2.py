"""Kimi-K2: the architecture of DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.weights.families.deepseek_v3 import FAMILY as DEEPSEEK_V3

FAMILY = replace(DEEPSEEK_V3, model_type="kimi_k2")

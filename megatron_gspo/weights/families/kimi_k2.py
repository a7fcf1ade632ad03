"""Kimi-K2: the architecture of DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from dataclasses import replace

from megatron_gspo.weights.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2")

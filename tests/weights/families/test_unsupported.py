"""Families that are asked for and cannot be trained: the reason is said, and still holds."""

from __future__ import annotations

import pytest
from megatron.core.ssm.gated_delta_net import HAVE_FLA
from transformers import CONFIG_MAPPING

from megatron_gspo.weights.families import FAMILIES, UNSUPPORTED, family_for


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_the_reason_is_given(model_type: str):
    assert model_type in CONFIG_MAPPING and model_type not in FAMILIES
    with pytest.raises(ValueError, match=rf"'{model_type}' is not supported: .*flash-linear-attention.*packed rows"):
        family_for({"model_type": model_type})


def test_gated_delta_net_does_not_run_here():
    assert not HAVE_FLA, "with flash-linear-attention in place, Qwen3-Next can be built and proved"

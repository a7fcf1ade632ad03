"""The punishment of long responses against the oracle's cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_gspo.reward import overlong_penalty

ORACLE = json.loads((Path(__file__).parents[1] / "objective" / "oracle" / "cases.json").read_text())["dapo_overlong"]


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: str(case["length"]))
def test_the_papers_setting(case):
    """16,384 tokens are expected and 4,096 more allowed (arXiv 2503.14476, section 4.1)."""
    assert overlong_penalty(case["length"], max_tokens=20480, buffer=4096) == case["penalty"]

from __future__ import annotations

import pytest

from tools.make_demo_policy import make_tokenizer


@pytest.fixture(scope="package")
def tokenizer():
    """One token per byte; chat messages become <role>content, and <assistant> before the answer."""
    return make_tokenizer()

"""Checks that need one CUDA device; docs/gpu.md says how to run them. Everywhere else they are skipped as one."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    """Skip every test of this folder where there is no CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here; docs/gpu.md says how to run the checks that need one")

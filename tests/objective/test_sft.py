from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.objective import sft_loss


def test_by_hand():
    """Trained log-probabilities -1 and -3 over 8 tokens of the mini-batch: loss 0.5, gradient -1/8 each."""
    logp = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss, metrics = sft_loss(logp, torch.tensor([True, False, True]), num_tokens=8)
    loss.backward()
    assert loss.item() == metrics["loss"].total.item() == 0.5
    assert logp.grad.tolist() == [-0.125, 0, -0.125]


def test_nothing_is_a_zero_that_can_be_differentiated():
    logp = torch.zeros(2, requires_grad=True)
    loss, _ = sft_loss(logp, torch.tensor([False, False]), num_tokens=8)
    loss.backward()
    assert loss.item() == 0 and logp.grad.tolist() == [0, 0]


def test_sums_are_float64():
    """In float32, 2^24 + 1 is 2^24."""
    loss, _ = sft_loss(torch.tensor([-(2.0**24), -1.0]), torch.tensor([True, True]), num_tokens=1)
    assert loss.item() == 2**24 + 1


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"expected one element per token, \[2\], got \{'logp': \[3\]\}"):
        sft_loss(torch.zeros(3), torch.ones(2, dtype=torch.bool), num_tokens=1)

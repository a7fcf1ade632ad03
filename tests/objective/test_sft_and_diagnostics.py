from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.objective import policy_diagnostics, reduce_metrics, sft_loss


def test_sft_by_hand():
    """Trained log-probabilities -1 and -3 over 8 tokens of the mini-batch: loss 0.5, gradient -1/8 each."""
    logp = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss, metrics = sft_loss(logp, torch.tensor([True, False, True]), num_tokens=8)
    loss.backward()
    assert loss.item() == metrics["loss"].total.item() == 0.5
    assert logp.grad.tolist() == [-0.125, 0, -0.125]


def test_sft_of_nothing_is_a_zero_that_can_be_differentiated():
    logp = torch.zeros(2, requires_grad=True)
    loss, _ = sft_loss(logp, torch.tensor([False, False]), num_tokens=8)
    loss.backward()
    assert loss.item() == 0 and logp.grad.tolist() == [0, 0]


def test_sft_sums_in_float64():
    """In float32, 2^24 + 1 is 2^24."""
    loss, _ = sft_loss(torch.tensor([-(2.0**24), -1.0]), torch.tensor([True, True]), num_tokens=1)
    assert loss.item() == 2**24 + 1


def test_diagnostics_by_hand():
    """Over the trained tokens 0, 1 and 3: gaps 0.5, 0.25 and none, for the engine gave -inf there."""
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    rollout = torch.tensor([-1.5, -1.75, math.nan, -math.inf])
    entropy = torch.tensor([1.0, 2.0, math.nan, 6.0])
    metrics = policy_diagnostics(logp, entropy, rollout, torch.tensor([True, True, False, True]))
    assert reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu") == {
        "entropy": 3,
        "rollout_gap": 0.375,
        "rollout_gap_max": 0.5,
        "rollout_gap_not_finite": 1,
    }


def test_shapes_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"'mask': \[2\]"):
        sft_loss(torch.zeros(3), torch.ones(2, dtype=torch.bool), num_tokens=1)

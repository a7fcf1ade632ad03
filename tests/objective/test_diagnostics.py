"""What is reported beside the loss, by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from megatron_gspo.objective import clipped_tokens, gspo_token, policy_diagnostics, reduce_metrics
from tests.objective.family import FAMILY, Member
from tests.objective.packed import evaluate, tokens_of

# Sequence 0: log-ratios 0.4 and 0, sequence 1: 0.5, sequence 2: no trained token. All advantages are positive.
NEW, MASK = [[-0.6, 9.0, -1.0], [-0.5], [-0.1]], [[1, 0, 1], [1], [0]]
OLD = [[-1.0, 9.0, -1.0], [-1.0], [-1.0]]


def reported(member: Member) -> dict[str, float]:
    return evaluate(tokens_of(NEW, OLD, advantages=[1, 1, 1], mask=MASK, rollout=OLD), member).reported


@pytest.mark.parametrize("name", FAMILY)
def test_ratios(name: str):
    got = reported(FAMILY[name])
    means = [math.exp(0.2), math.exp(0.5)]
    assert got["ratio/min"] == pytest.approx(means[0]) and got["ratio/max"] == pytest.approx(means[1])
    assert got["ratio/mean"] == pytest.approx(sum(means) / 2)
    assert got["token_log_ratio_min"] == 0 and got["token_log_ratio_max"] == pytest.approx(0.5)
    assert got["token_log_ratio_p01"] == 0 and got["token_log_ratio_p99"] == 0.5
    assert got["kl_k1"] == pytest.approx(-0.9 / 3)
    assert got["kl_k3"] == pytest.approx((math.exp(0.4) - 1.4 + math.exp(0.5) - 1.5) / 3)
    assert got["num_bad_sequences"] == 0


def test_clip_fractions_of_token_ratios():
    """Clipped above 1.45: e^0.4 = 1.49 and e^0.5. 2 of 3 tokens; 1/2 of sequence 0 and all of sequence 1."""
    got = reported(Member(partial(clipped_tokens, clip_low=0.2, clip_high=0.45), "sequence_mean"))
    assert got["clip_fraction"] == pytest.approx(2 / 3, rel=1e-15)
    assert got["clip_fraction_sequence"] == (1 / 2 + 1) / 2
    assert got["abs_log_ratio_max"] == pytest.approx(0.5)
    w = [math.exp(0.4), 1, math.exp(0.5)]
    assert got["ess"] == pytest.approx(sum(w) ** 2 / (3 * sum(x * x for x in w)))


def test_clip_fractions_of_sequence_ratios():
    """Clipped above 1.45: e^0.5 of sequence 1, 1 of 3 tokens and 1 of 2 sequences."""
    got = reported(Member(partial(gspo_token, clip_low=0.2, clip_high=0.45), "sequence_mean"))
    assert got["clip_fraction"] == pytest.approx(1 / 3, rel=1e-15)
    assert got["clip_fraction_sequence"] == 1 / 2
    w = [math.exp(0.2), math.exp(0.2), math.exp(0.5)]
    assert got["ess"] == pytest.approx(sum(w) ** 2 / (3 * sum(x * x for x in w)))


def test_the_ratio_that_vespo_uses_is_the_product():
    assert reported(FAMILY["vespo"])["abs_log_ratio_max"] == pytest.approx(0.5)
    twice = evaluate(tokens_of([[-0.6, -0.6]], [[-1.0, -1.0]], advantages=[1]), FAMILY["vespo"]).reported
    assert twice["abs_log_ratio_max"] == pytest.approx(0.8)


@pytest.mark.parametrize("name", FAMILY)
def test_a_policy_that_is_its_own_old_policy(name: str):
    tokens = tokens_of(OLD, OLD, advantages=[1, -1, 1], mask=MASK, rollout=OLD)
    got = evaluate(tokens, FAMILY[name]).reported
    zero = ("clip_fraction", "clip_fraction_sequence", "kl_k1", "kl_k3", "abs_log_ratio_max", "token_log_ratio_p01")
    assert [got[k] for k in zero] == [0] * len(zero)
    assert got["ess"] == got["ratio/mean"] == got["ratio/p01"] == got["ratio/p99"] == 1


def test_entropy_and_rollout_gap():
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
    with pytest.raises(ValueError, match=r"expected one element per token, \[2\], got \{'entropy': \[3\]\}"):
        policy_diagnostics(torch.zeros(2), torch.zeros(3), torch.zeros(2), torch.ones(2, dtype=torch.bool))

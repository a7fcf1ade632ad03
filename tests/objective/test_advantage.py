from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.objective import group_relative, leave_one_out, zero_variance_share
from tests.objective.packed import f64


def test_by_hand():
    """Rewards 1, 3 and 5 have mean 3 and, with ddof 1, variance (4 + 0 + 4) / 2 = 4. Groups are interleaved."""
    rewards, group = f64(1, 7, 3, 7, 5), torch.tensor([8, -2, 8, -2, 8])
    got = group_relative(rewards, group, normalize_std=True, eps=0.5)
    torch.testing.assert_close(got, f64(-2 / 2.5, 0, 0, 0, 2 / 2.5))
    assert group_relative(rewards, group, normalize_std=False, eps=0.5).tolist() == [-2, 0, 0, 0, 2]


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6])
@pytest.mark.parametrize("reward", [100.3, 1e15 / 3, -0.1])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward: float, eps: float):
    rewards, group = torch.full((8,), reward, dtype=torch.float64), torch.tensor([0] * 7 + [1])
    for normalize_std in (True, False):
        assert not group_relative(rewards, group, normalize_std=normalize_std, eps=eps).any()
    assert not leave_one_out(rewards, group).any()


def test_leave_one_out_by_hand():
    """Of rewards 1, 3 and 8 the others' means are 5.5, 4.5 and 2. Groups are interleaved; one has a single reward."""
    rewards, group = f64(1, 7, 3, 4, 9, 8), torch.tensor([8, -2, 8, 0, -2, 8])
    assert leave_one_out(rewards, group).tolist() == [-4.5, -2, -1.5, 0, 2, 6]


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_leave_one_out_is_n_over_n_minus_1_of_the_distance_from_the_mean(n: int):
    rewards = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    got = leave_one_out(rewards, torch.zeros(n, dtype=torch.int64))
    torch.testing.assert_close(got, n / (n - 1) * (rewards - rewards.mean()), rtol=1e-13, atol=1e-15)
    assert got.sum().item() == pytest.approx(0, abs=n * 2**-50)


def test_share_of_groups_without_a_signal():
    """Of the groups {1, 1}, {0, 1}, {0.1, 0.1, 0.1} and {5}, three have equal rewards."""
    rewards = f64(1, 1, 0, 1, 0.1, 0.1, 0.1, 5)
    assert zero_variance_share(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])) == 0.75
    assert zero_variance_share(f64(), torch.tensor([], dtype=torch.int64)) == 0


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match=r"rewards of rows \[1, 2\] are not finite: \[nan, inf\]"):
        group_relative(f64(0, math.nan, math.inf), torch.tensor([0, 0, 0]), normalize_std=True, eps=0)
    with pytest.raises(ValueError, match=r"rewards of rows \[0\] are not finite: \[-inf\]"):
        leave_one_out(f64(-math.inf, 0), torch.tensor([0, 0]))
    for rewards, group in ((torch.zeros(2), [0, 0]), (f64(0, 0), [0])):
        with pytest.raises(ValueError, match="rewards must be float64 and shaped as group"):
            leave_one_out(rewards, torch.tensor(group))

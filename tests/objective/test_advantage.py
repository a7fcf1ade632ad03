from __future__ import annotations

import math

import pytest
import torch

from megatron_gspo.objective import group_relative, zero_variance_share
from tests.objective.oracle import cases, numbers

RL_CASES = {name: case for name, case in cases().items() if "advantages_alt" in case.expected}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", RL_CASES)
def test_oracle(name: str):
    case = RL_CASES[name]
    for eps, normalize_std, expected in (
        (1e-6, True, case.expected["advantages"]),
        (1e-4, True, case.expected["advantages_alt"]["ddof1_eps1e-4"]),
        (0.0, True, case.expected["advantages_alt"]["ddof1_eps0"]),
        (0.0, False, case.expected["advantages_alt"]["dr_grpo"]),
    ):
        got = group_relative(case.rewards, case.group, normalize_std=normalize_std, eps=eps)
        torch.testing.assert_close(got, numbers(expected), rtol=1e-12, atol=1e-12)


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


def test_share_of_groups_without_a_signal():
    """Of the groups {1, 1}, {0, 1}, {0.1, 0.1, 0.1} and {5}, three have equal rewards."""
    rewards = f64(1, 1, 0, 1, 0.1, 0.1, 0.1, 5)
    assert zero_variance_share(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])) == 0.75
    assert zero_variance_share(f64(), torch.tensor([], dtype=torch.int64)) == 0


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match=r"rewards of rows \[1, 2\] are not finite: \[nan, inf\]"):
        group_relative(f64(0, math.nan, math.inf), torch.tensor([0, 0, 0]), normalize_std=True, eps=0)
    with pytest.raises(ValueError, match="rewards must be float64"):
        group_relative(torch.zeros(2), torch.tensor([0, 0]), normalize_std=True, eps=0)

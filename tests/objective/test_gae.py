from __future__ import annotations

import math
import time

import pytest
import torch

from megatron_gspo.objective import gae


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(lens: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, mask, offsets, rewards) with a third of the tokens masked, garbage at them, and an empty response."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(sum(lens), generator=generator) > 1 / 3
    values = torch.randn(sum(lens), generator=generator, dtype=torch.float64)
    values[~mask] = math.nan
    rewards = torch.randn(len(lens), generator=generator, dtype=torch.float64)
    return values, mask, torch.tensor([0, *lens]).cumsum(0), rewards


def recursion(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    """One response, backwards in time, as every textbook writes it."""
    advantages, following, ahead = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + gamma * following - values[t]
        ahead = advantages[t] = delta + gamma * lam * ahead
        following = values[t]
    return advantages


def test_by_hand():
    """V = 1, 2, 4 and reward 8 at gamma 1/2, lambda 1/2: delta = 0, 0, 4, and the weight of what follows is 1/4."""
    values, mask = f64(math.inf, 1, 2, math.nan, 4), torch.tensor([False, True, True, False, True])
    found = gae(values, mask, torch.tensor([0, 5]), f64(8), gamma=0.5, lam=0.5)
    assert found.advantages.tolist() == [0, 0.25, 1, 0, 4]
    assert found.returns.tolist() == [0, 1.25, 3, 0, 8]
    assert not found.bad.any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0), (0.5, 1.0)])
def test_equals_the_recursion_of_every_response(gamma: float, lam: float):
    lens = [5, 1, 0, 300, 17, 2, 64, 1000]
    values, mask, offsets, rewards = ragged(lens)
    found = gae(values, mask, offsets, rewards, gamma=gamma, lam=lam)
    for i, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        trains = mask[start:end]
        expected = recursion(values[start:end][trains].tolist(), rewards[i].item(), gamma, lam)
        torch.testing.assert_close(found.advantages[start:end][trains], f64(*expected), rtol=1e-12, atol=1e-12)
    assert not found.advantages[~mask].any() and not found.returns[~mask].any()
    torch.testing.assert_close(found.returns[mask], (found.advantages + values)[mask], rtol=0, atol=0)


def test_lambda_one_is_the_discounted_return_minus_the_value():
    """Equation 18: the values in between cancel. k tokens before the end, the discounted reward is gamma^k r."""
    values, mask, offsets, rewards = ragged([40])
    found = gae(values, mask, offsets, rewards, gamma=0.9, lam=1.0)
    k = torch.arange(int(mask.sum())).flip(0).double()
    torch.testing.assert_close(found.advantages[mask], 0.9**k * rewards - values[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.returns[mask], 0.9**k * rewards, rtol=0, atol=1e-12)


def test_lambda_zero_is_the_one_step_error():
    """Equation 17."""
    values, mask, offsets, rewards = ragged([40])
    found = gae(values, mask, offsets, rewards, gamma=0.9, lam=0.0)
    v = values[mask]
    expected = torch.cat([0.9 * v[1:] - v[:-1], rewards - v[-1]])
    torch.testing.assert_close(found.advantages[mask], expected, rtol=0, atol=1e-15)


def test_whitened_advantages_have_mean_zero_and_deviation_one():
    values, mask, offsets, rewards = ragged([9, 30, 4])
    plain = gae(values, mask, offsets, rewards, gamma=1.0, lam=0.95)
    white = gae(values, mask, offsets, rewards, gamma=1.0, lam=0.95, whiten=True)
    kept = white.advantages[mask]
    assert kept.mean().item() == pytest.approx(0, abs=1e-15)
    assert kept.std(correction=0).item() == pytest.approx(1, abs=1e-6)  # 1e-8 is added to the variance
    assert torch.corrcoef(torch.stack([kept, plain.advantages[mask]]))[0, 1].item() == pytest.approx(1, abs=1e-12)
    assert torch.equal(white.returns, plain.returns)
    assert not white.advantages[~mask].any()


def test_equal_advantages_whiten_to_exactly_zero():
    values, mask = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.bool)
    found = gae(values, mask, torch.tensor([0, 3, 6]), f64(0.1, 0.1), gamma=1.0, lam=1.0, whiten=True)
    assert not found.advantages.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_bad_value_spoils_its_response_alone(garbage: float):
    values, mask, offsets, rewards = ragged([9, 30, 4])
    expected = gae(values[:9], mask[:9], torch.tensor([0, 9]), rewards[:1], gamma=1.0, lam=0.95)
    rest = gae(
        torch.cat([values[:9], values[39:]]),
        torch.cat([mask[:9], mask[39:]]),
        torch.tensor([0, 9, 13]),
        rewards[[0, 2]],
        gamma=1.0,
        lam=0.95,
        whiten=True,
    )
    values[9 + int(mask[9:39].nonzero()[5])] = garbage
    found = gae(values, mask, offsets, rewards, gamma=1.0, lam=0.95)
    white = gae(values, mask, offsets, rewards, gamma=1.0, lam=0.95, whiten=True)
    assert found.bad.tolist() == [False, True, False]
    torch.testing.assert_close(found.advantages[:9], expected.advantages, rtol=0, atol=1e-14)
    assert not found.advantages[9:39].any() and found.returns[9:39][mask[9:39]].isnan().all()
    torch.testing.assert_close(white.advantages[:9], rest.advantages[:9], rtol=0, atol=1e-14)
    torch.testing.assert_close(white.advantages[39:], rest.advantages[9:], rtol=0, atol=1e-14)


def test_nothing_trains():
    """Neither a batch without tokens nor one of masked responses has anything to estimate."""
    none, mask = torch.tensor([], dtype=torch.float64), torch.tensor([], dtype=torch.bool)
    assert gae(none, mask, torch.tensor([0]), none, gamma=1.0, lam=0.9, whiten=True).advantages.numel() == 0
    found = gae(f64(math.nan, 1), torch.zeros(2).bool(), torch.tensor([0, 2]), f64(1), gamma=1, lam=0.9, whiten=True)
    assert not found.advantages.any() and not found.returns.any() and not found.bad.any()


def test_fifty_thousand_tokens_are_exact_and_quick():
    """lambda = gamma = 1 and V = t: delta is 1 until the last token, whose delta is r - V, so A_t = r - t."""
    n = 50_000
    values = torch.arange(n, dtype=torch.float32)
    started = time.process_time()
    found = gae(values, torch.ones(n).bool(), torch.tensor([0, n]), f64(7), gamma=1.0, lam=1.0)
    assert time.process_time() - started < 1
    assert torch.equal(found.advantages, 7 - values.double())
    assert torch.equal(found.returns, torch.full((n,), 7.0, dtype=torch.float64))


def test_what_does_not_belong_together_is_refused():
    values, mask, offsets, rewards = ragged([4])
    with pytest.raises(ValueError, match=r"rewards of rows \[0\] are not finite: \[nan\]"):
        gae(values, mask, offsets, f64(math.nan), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"one element per sequence, \[1\], got \{'rewards': \[2\]\}"):
        gae(values, mask, offsets, f64(1, 2), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"offsets must go from 0 to 4, got 0 to 3"):
        gae(values, mask, torch.tensor([0, 3]), rewards, gamma=1.0, lam=1.0)

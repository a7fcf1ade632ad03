"""The family against two other implementations: liger-kernel's GRPO losses and polgrad, by their own autograd.

Both take padded [B, T] log-probabilities, of the whole mini-batch, with every row trained somewhere; loss and gradient
must agree to the rounding of float64 sums. They differ in conventions that are arguments here:
  liger's CISPO takes the bound itself, not its distance from 1; its VESPO clamps token log-ratios to +-20 and their sum
  to [log 1e-8, 20], which no response here reaches; beta adds k3.
  polgrad's TIS at sequence level is the product of token ratios (`sequence_product` here).
  polgrad refuses groups of one; its std has ddof 1 and its eps is 1e-4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import polgrad
import pytest
import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from polgrad.diagnostics import importance_ess
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_gspo.objective import (
    Totals,
    cispo,
    clipped_tokens,
    group_relative,
    gspo_token,
    leave_one_out,
    sapo,
    truncated_importance_sampling,
    vespo,
)
from tests.objective.batch import Batch, random_batch
from tests.objective.family import Member
from tests.objective.packed import Result, evaluate

LENS, MAX_TOKENS = (9, 1, 17, 4, 6, 30, 2, 12), 32
_clipped = partial(clipped_tokens, clip_low=0.1, clip_high=0.15)
_gspo = partial(gspo_token, clip_low=0.02, clip_high=0.03)

# ours -> (member, liger's arguments)
LIGER: dict[str, tuple[Member, dict[str, Any]]] = {
    "grpo": (Member(_clipped, "sequence_mean"), {"loss_type": "grpo"}),
    "dapo": (Member(_clipped, "token_mean"), {"loss_type": "dapo"}),
    "dr_grpo": (Member(_clipped, "constant"), {"loss_type": "dr_grpo", "max_completion_length": MAX_TOKENS}),
    "gspo": (
        Member(_gspo, "sequence_mean"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "sapo": (Member(partial(sapo, tau_pos=1.0, tau_neg=1.05), "sequence_mean"), {"loss_type": "sapo"}),
    "cispo": (Member(partial(cispo, clip_high=0.1), "token_mean"), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "vespo": (
        Member(partial(vespo, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0), "token_mean"),
        {"loss_type": "vespo"},
    ),
}
# ours -> (member, polgrad's ratio, surrogate, clip and aggregation)
POLGRAD: dict[str, tuple[Member, dict[str, Any]]] = {
    "grpo": (Member(_clipped, "sequence_mean"), {"aggregation": "SEQ_MEAN_TOKEN_MEAN"}),
    "dapo": (Member(_clipped, "token_mean"), {"aggregation": "TOKEN_MEAN"}),
    "sums of tokens": (Member(_clipped, "sequence_sum"), {"aggregation": "SEQ_MEAN_TOKEN_SUM"}),
    "dr_grpo": (Member(_clipped, "constant"), {"aggregation": "TOKEN_SUM_NORM", "norm_len": MAX_TOKENS}),
    "gspo": (
        Member(_gspo, "sequence_mean", token_advantages=False),
        {"aggregation": "SEQ_MEAN_TOKEN_MEAN", "ratio": "SEQUENCE", "clip": (0.02, 0.03)},
    ),
    "gspo_token": (
        Member(_gspo, "sequence_mean"),
        {"aggregation": "SEQ_MEAN_TOKEN_MEAN", "ratio": "SEQUENCE_TOKEN", "clip": (0.02, 0.03)},
    ),
    "cispo": (
        Member(partial(cispo, clip_high=0.1), "token_mean"),
        {"aggregation": "TOKEN_MEAN", "surrogate": "CISPO", "clip": (None, 0.1)},
    ),
}


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


def ours(batch: Batch, member: Member, **options: Any) -> Result:
    tokens = batch.tokens(member, ref=True)
    totals = Totals(num_sequences=len(LENS), num_tokens=int(tokens.trained_lens.sum()), max_tokens=MAX_TOKENS)
    return evaluate(tokens, member, totals, **options)


def assert_same(result: Result, loss: Tensor, logp: Tensor) -> None:
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
    assert logp.grad is not None
    torch.testing.assert_close(padded(result.gradient), logp.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", LIGER)
def test_liger(name: str, beta: float):
    member, arguments = LIGER[name]
    member = Member(member.objective, member.aggregation, token_advantages=False)
    batch = random_batch(LENS, seed=8)
    logp, mask = padded(batch.new).requires_grad_(), padded(batch.mask).double()
    loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logp,
        mask,
        batch.advantages,
        mask,
        ref_per_token_logps=padded(batch.ref),
        old_per_token_logps=padded(batch.old),
        beta=beta,
        **{"epsilon_low": 0.1, "epsilon_high": 0.15, **arguments},
    )
    result = ours(batch, member, **({"kl": ("k3", beta)} if beta else {}))
    assert_same(result, loss, logp)
    # Liger counts CISPO's clipped weights where A > 0 alone.
    if name != "cispo":
        assert result.reported["clip_fraction"] == pytest.approx(metrics[-1].item(), abs=1e-15)
    if beta:
        assert result.reported["kl_reference"] == pytest.approx(metrics[0].item(), rel=1e-12)


def polgrad_loss(batch: Batch, member: Member, arguments: dict[str, Any], **config: Any) -> tuple[Any, Tensor]:
    low, high = arguments.get("clip", (0.1, 0.15))
    spec = polgrad.PolicyLossConfig(
        ratio=polgrad.RatioKind[arguments.get("ratio", "TOKEN")],
        surrogate=polgrad.SurrogateKind[arguments.get("surrogate", "PG_CLIP")],
        clip=polgrad.ClipConfig(low, high),
        aggregation=polgrad.Aggregation[arguments["aggregation"]],
        norm_len=arguments.get("norm_len"),
        **config,
    )
    logp = padded(batch.new).requires_grad_()
    result = polgrad.policy_loss(
        spec,
        logprobs=logp,
        old_logprobs=padded(batch.old),
        advantages=padded(batch.token_advantages) if member.token_advantages else batch.advantages,
        response_mask=padded(batch.mask),
        ref_logprobs=padded(batch.ref),
        rollout_logprobs=padded(batch.rollout),
    )
    return result, logp


@pytest.mark.parametrize("name", POLGRAD)
def test_polgrad(name: str):
    member, arguments = POLGRAD[name]
    batch = random_batch(LENS, seed=9)
    theirs, logp = polgrad_loss(batch, member, arguments)
    result = ours(batch, member)
    assert_same(result, theirs.loss, logp)
    clipped = (theirs.clipped_low | theirs.clipped_high).sum() / padded(batch.mask).sum().double()
    assert result.reported["clip_fraction"] == pytest.approx(clipped.item(), abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", POLGRAD)
def test_polgrad_penalty(name: str, estimator: str):
    member, arguments = POLGRAD[name]
    batch = random_batch(LENS, seed=10)
    kl = polgrad.KLLossConfig(polgrad.KLEstimator[estimator.upper()], coef=0.3)
    theirs, logp = polgrad_loss(batch, member, arguments, kl=kl)
    assert_same(ours(batch, member, kl=(estimator, 0.3)), theirs.loss, logp)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in POLGRAD
        for level in ("token", "sequence_product")
        if (name, level) != ("gspo", "token")
    ],
)
def test_polgrad_truncated_importance_sampling(name: str, level: str):
    """Not of GSPO with weights of tokens: here they weigh the s_it of GSPO-token, polgrad's weigh s_i, and their mean
    ends up in the gradient of every token."""
    member, arguments = POLGRAD[name]
    batch = random_batch(LENS, seed=11)
    correction = polgrad.ISCorrectionConfig(cap=1.1, level="token" if level == "token" else "sequence")
    expected, logp = polgrad_loss(batch, member, arguments, is_correction=correction)
    truncate = ("truncate", partial(truncated_importance_sampling, level=level, high=1.1))
    assert_same(ours(batch, member, corrections=[truncate]), expected.loss, logp)


def test_polgrad_effective_sample_size():
    batch = random_batch(LENS, seed=12)
    report = importance_ess(padded(batch.new), padded(batch.old), padded(batch.mask), level="token")
    assert ours(batch, POLGRAD["grpo"][0]).reported["ess"] == pytest.approx(report.ess_ratio, rel=1e-12)


def test_polgrad_advantages():
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.arange(24) % 5
    for scale, normalize_std in (("std", True), ("none", False)):
        theirs = polgrad.grpo_advantages(rewards, group, polgrad.GroupNormConfig(scale=scale, eps=1e-4))  # type: ignore[arg-type]
        got = group_relative(rewards, group, normalize_std=normalize_std, eps=1e-4)
        torch.testing.assert_close(got, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        leave_one_out(rewards, group), polgrad.rloo_advantages(rewards, group), rtol=1e-12, atol=1e-14
    )

"""Time and memory of the GSPO loss, forward and backward, on ragged sequences, against a bare reference and liger.

    python -m bench.objective [--threads 2] [--repeats 20]

256 sequences of up to 16,384 tokens, about 0.5 M tokens in all, lengths lognormal, log-probabilities in fp32. `bare` is
equations 5 and 7 of arXiv 2507.18071 on packed tokens in float64 by torch.segment_reduce, under autograd, and nothing
else: no checks, no masks, no metrics. `ours` is what a training step runs for a micro-batch, every diagnostic included;
reducing the metrics to numbers, once a step for all of its micro-batches, is told apart. liger's `ppo_loss_fn` gets its
[256, 16384] padded input for free: neither padding nor its memory is counted. Ratios are to `bare`; where others use
the machine, the fastest runs are the ones to compare. Memory is the peak of what operations allocate beyond the inputs.
TRL, verl and AReaL have their losses inside trainers and are not compared here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.objective import (
    Metric,
    Tokens,
    Totals,
    gspo_token,
    policy_diagnostics,
    policy_loss,
    reduce_metrics,
    token_weights,
)

SEQUENCES, LONGEST, MEDIAN, SIGMA = 256, 16_384, 1000, 1.1
CLIP = {"clip_low": 3e-4, "clip_high": 4e-4}


class Data:
    """One micro-batch, packed and padded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lens = (MEDIAN * (SIGMA * torch.randn(SEQUENCES, generator=generator)).exp()).long().clamp(16, LONGEST)
        lens[0] = LONGEST
        t = int(lens.sum())
        self.lens = lens
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
        self.old_logp = -2 * torch.rand(t, generator=generator)
        self.logp = self.old_logp + 0.02 * torch.randn(t, generator=generator)
        self.rollout_logp = self.old_logp + 0.01 * torch.randn(t, generator=generator)
        self.entropy = torch.rand(t, generator=generator)
        self.advantages = torch.randn(SEQUENCES, generator=generator, dtype=torch.float64)
        self.mask = torch.ones(t, dtype=torch.bool)
        self.rows = torch.arange(SEQUENCES)

    def padded(self, values: Tensor) -> Tensor:
        return pad_sequence(list(values.split(self.lens.tolist())), batch_first=True)


def bare(data: Data) -> Callable[[], Tensor]:
    def run() -> Tensor:
        logp = data.logp.clone().requires_grad_()
        log_ratio = logp.double() - data.old_logp.double()
        s = torch.segment_reduce(log_ratio, "mean", offsets=data.offsets, unsafe=True).exp()
        a = data.advantages
        loss = -torch.minimum(s * a, s.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"]) * a).mean()
        loss.backward()
        assert logp.grad is not None
        return logp.grad

    return run


def ours(data: Data, metrics: dict[str, Metric]) -> Callable[[], Tensor]:
    """Leaves the metrics of its newest run in `metrics`."""
    totals = Totals(num_sequences=SEQUENCES, num_tokens=int(data.lens.sum()), max_tokens=LONGEST)

    def run() -> Tensor:
        logp = data.logp.clone().requires_grad_()
        tokens = Tokens(
            logp=logp,
            old_logp=data.old_logp,
            mask=data.mask,
            offsets=data.offsets,
            trained_lens=data.lens,
            rows=data.rows,
            advantages=data.advantages,
            group=None,
        )
        weights = token_weights("sequence_mean", data.lens, totals)
        loss, found = policy_loss(tokens, partial(gspo_token, **CLIP), weights)
        metrics.update(found | policy_diagnostics(data.old_logp, data.entropy, data.rollout_logp, data.mask))
        loss.backward()
        assert logp.grad is not None
        return logp.grad

    return run


def liger(data: Data) -> Callable[[], Tensor]:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    logp, old_logp, mask = map(data.padded, (data.logp, data.old_logp, data.mask.float()))
    advantages = data.advantages.float()

    def run() -> Tensor:
        leaf = logp.clone().requires_grad_()
        loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            leaf,
            mask,
            advantages,
            mask,
            old_per_token_logps=old_logp,
            epsilon_low=CLIP["clip_low"],
            epsilon_high=CLIP["clip_high"],
            beta=0.0,
            loss_type="grpo",
            importance_sampling_level="sequence",
        )
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    return run


class Allocated(TorchDispatchMode):
    """Bytes of live storages that operations made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.peak = max(self.peak, sum(self._live.values()))
            weakref.finalize(storage, self._live.pop, key, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = Data()
    metrics: dict[str, Metric] = {}
    runs = {"bare": bare(data), "ours, all diagnostics": ours(data, metrics), "liger, padded for free": liger(data)}
    gradients, peaks = {}, {}
    for name, run in runs.items():
        with Allocated() as allocated:
            gradients[name] = run()
        peaks[name] = allocated.peak
    padded = data.padded(data.mask)
    torch.testing.assert_close(gradients["ours, all diagnostics"], gradients["bare"], rtol=1e-6, atol=1e-14)
    # liger's ratios are in fp32, of which GSPO's clip range is a thousand ulps
    torch.testing.assert_close(gradients["liger, padded for free"][padded], gradients["bare"], rtol=2e-3, atol=1e-12)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    started = time.perf_counter()
    reduce_metrics(metrics, dp_cp_group=None, dp_group=None, device="cpu")
    reduction = time.perf_counter() - started
    t = int(data.lens.sum())
    print(f"{SEQUENCES} sequences, {t:,} tokens, longest {LONGEST:,}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':<26}{'median':>12}{'fastest':>20}{'bytes/token at the peak':>27}")
    for name, times in seconds.items():
        cells = (
            f"{of(times) * 1e3:>9.1f} ms{of(times) / of(seconds['bare']):>7.2f}x" for of in (statistics.median, min)
        )
        print(f"{name:<26}{''.join(cells)}{peaks[name] / t:>20.0f}")
    print(f"reducing our metrics, once a step: {reduction * 1e3:.1f} ms on one rank")


if __name__ == "__main__":
    main()

"""Log-probabilities and entropies from hidden states: time and peak memory against the bare matmuls, in one run.

    python -m bench.logprob [--tokens 2048] [--rounds 2]        (liger-kernel comes with `make test`'s packages)

One CPU process per measurement, forward and backward, fp32, hidden 1,024, 151,936 words, all cores. `floor` is three
matmuls and nothing else: logits, the gradient of hidden, the gradient of the weight. Computing the logits once more in
the backward pass instead of keeping them costs four. Memory is what the process holds at its peak beyond hidden states
and weight, over the size of the weight's gradient, which nobody can do without. Times are the best of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.policy import cpu

VOCABULARY, HIDDEN = 151_936, 1024
# Imported before the clock starts.
HEAVY = (
    "megatron_gspo.policy.logprob",
    "megatron.core.tensor_parallel.cross_entropy",
    "liger_kernel.chunked_loss",
)
Contender = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [t, h], weight [v, h], labels [t] -> scalar loss


def floor(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """The three products; the logits stand in for their own gradient."""
    with torch.no_grad():
        logits = hidden @ weight.t()
        hidden.grad, weight.grad = logits @ weight, logits.t() @ hidden


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`policy.logprob.linear_logprob`, entropy included."""
    from megatron_gspo.policy.logprob import LogprobContext, linear_logprob

    logp, entropy = linear_logprob(hidden, weight, LogprobContext(labels, 1.0, VOCABULARY, dist.group.WORLD))
    assert entropy.isfinite().all()
    return -logp.sum()


def log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Plain torch, entropy included."""
    logp = torch.log_softmax(hidden @ weight.t(), -1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    assert entropy.isfinite().all()
    return -logp.gather(1, labels[:, None]).sum()


def megatron(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Megatron's vocab_parallel_cross_entropy; no entropy, no temperature."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    logits = (hidden @ weight.t())[:, None]
    return vocab_parallel_cross_entropy(logits, labels[:, None], tp_group=dist.group.WORLD).sum()


def torch_fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch.nn.functional.linear_cross_entropy; no entropy, no tensor parallelism."""
    return torch.nn.functional.linear_cross_entropy(hidden, weight, labels, reduction="sum")


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger's chunked linear GRPO loss on four sequences; no entropy, no tensor parallelism."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    rows = hidden.view(4, -1, HIDDEN)
    ones = torch.ones(rows.shape[:2])
    return loss(rows, weight, labels.view(4, -1), ones, torch.ones(4))[0]


CONTENDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor | None]] = {
    "floor: three matmuls": floor,
    "ours, with entropy": ours,
    "log_softmax, with entropy": log_softmax,
    "megatron vocab_parallel_cross_entropy": megatron,
    "torch linear_cross_entropy": torch_fused,
    "liger chunked linear GRPO": liger,
}


def measure(name: str, tokens: int) -> tuple[float, float]:
    """(seconds, peak bytes beyond the inputs) of one forward and backward pass in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul_(0.02).requires_grad_()
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    contender = CONTENDERS[name]
    cpu.install()
    for module in HEAVY:
        importlib.import_module(module)
    before = _reset_peak()
    started = time.perf_counter()
    loss = contender(hidden, weight, labels)
    if loss is not None:
        loss.backward()
    seconds = time.perf_counter() - started
    return seconds, _peak() - before


def _reset_peak() -> int:
    """Forget the high-water mark; returns resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name, measured in results.items():
            with context.Pool(1) as pool:
                measured.append(pool.apply(functools.partial(measure, name, arguments.tokens)))
    gradient = 4 * VOCABULARY * HIDDEN
    lowest = min(seconds for seconds, _ in results["floor: three matmuls"])
    print(f"{arguments.tokens} tokens x {VOCABULARY:,} words x hidden {HIDDEN:,}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':<40}{'seconds':>9}{'/ floor':>9}{'peak GB':>9}{'/ gradient':>12}")
    for name, measured in results.items():
        seconds, peak = min(s for s, _ in measured), min(p for _, p in measured)
        print(
            f"{name:<40}{seconds:>9.2f}{seconds / lowest:>8.2f}x{peak / 1e9:>9.2f}{peak / gradient:>11.2f}x", flush=True
        )


if __name__ == "__main__":
    main()

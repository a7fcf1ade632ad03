"""After a weight update: do trainer and servers give the same log-probabilities to the same tokens?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gspo.rollout.control import call, field


class ProbeMismatch(RuntimeError):
    """Trainer and server disagree about the probe sequence."""


def server_logprobs(url: str, tokens: Sequence[int], *, timeout_s: float) -> Tensor:
    """[t - 1] float32: the server's log-probability, at temperature 1, of each of the t tokens but the first. Raises
    ServerError."""
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = call(url, "/generate", body, timeout_s=timeout_s)
    scored = field(reply, "meta_info", "input_token_logprobs", where=f"{url}/generate")
    return torch.tensor([math.nan if entry[0] is None else entry[0] for entry in scored[1:]], dtype=torch.float32)


def check_probe(trainer: Tensor, server: Tensor, *, tolerance: float, version: int, url: str) -> float:
    """The largest |trainer - server| of two [t - 1] tensors of log-probabilities. Raises ProbeMismatch beyond
    `tolerance`."""
    if trainer.shape != server.shape:
        raise ValueError(f"the trainer scored {list(trainer.shape)} probe tokens, the server {list(server.shape)}")
    difference = (trainer.double() - server.double()).abs()
    worst = int(difference.nan_to_num(nan=float("inf")).argmax())
    if not difference[worst] <= tolerance:
        raise ProbeMismatch(
            f"after the update to weight version {version}, {url} and the trainer disagree about the probe: token "
            f"{worst + 1} has log-probability {trainer[worst]:.6f} in the trainer and {server[worst]:.6f} in the "
            f"server, |difference| {difference[worst]:.3g} above rollout.sync.probe_tolerance={tolerance:g} (mean "
            f"{difference.mean():.3g}). Either the update did not carry all weights, or the engines compute "
            "differently (precision, attention backend); raise the tolerance only in the second case"
        )
    return float(difference[worst])

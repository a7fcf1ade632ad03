"""What this project computes itself on the GPU: log-probabilities, segment sums, and the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.objective.segment import segment_sum
from megatron_gspo.policy.logprob import LogprobContext, linear_logprob
from tests.gpu.process import GPU, in_process, one_rank
from tests.policy.test_logprob import TEMPERATURE, _inputs, _reference

pytestmark = pytest.mark.gpu

VOCAB, PADDED = 50, 64
# Lengths of the segments in tokens: empty ones first, last and in a row; more than one piece; the last 7 tokens are in
# none of them.
SEGMENTS = (0, 3, 0, 0, 70_001, 256, 1, 0)


def logprob(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies, and the gradients of hidden states and weight, on the CPU."""
    with one_rank() as device:
        hidden, weight, labels, logp_scale, entropy_scale = (tensor.to(device) for tensor in _inputs(VOCAB, PADDED))
        hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
        context = LogprobContext(labels, TEMPERATURE, VOCAB, dist.group.WORLD, tile_tokens=10, tile_rows=7)
        logp, entropy = linear_logprob(hidden, weight, context)
        (logp * logp_scale.float() + entropy * entropy_scale.float()).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        return tuple(tensor.detach().cpu() for tensor in (logp, entropy, hidden.grad, weight.grad))


def test_log_probabilities_are_those_of_float64():
    found = in_process(logprob, torch.float32, environment=GPU)
    for ours, theirs in zip(found, _reference(VOCAB, PADDED), strict=True):
        assert theirs is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_bf16_rounds_inputs_and_gradients_only():
    logp, entropy, _, grad_weight = in_process(logprob, torch.bfloat16, environment=GPU)
    expected_logp, _, _, expected_grad = _reference(VOCAB, PADDED)
    assert logp.dtype == entropy.dtype == torch.float32 and grad_weight.dtype == torch.bfloat16
    # A logit of size 10 rounded to bf16 is off by up to 0.04, over the temperature 0.06.
    torch.testing.assert_close(logp.double(), expected_logp, rtol=0, atol=0.2)
    assert expected_grad is not None
    assert torch.nn.functional.cosine_similarity(grad_weight.double().flatten(), expected_grad.flatten(), 0) > 0.999


def segments(device: str) -> tuple[Tensor, Tensor]:
    """Sums over SEGMENTS, and the gradient of the sums weighted by 1, 2, 3, ..."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(sum(SEGMENTS) + 7, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    offsets = torch.tensor([0, *SEGMENTS], device=device).cumsum(0)
    sums = segment_sum(values, offsets)
    (sums * torch.arange(1, len(SEGMENTS) + 1, device=device)).sum().backward()
    assert values.grad is not None
    return sums.detach().cpu(), values.grad.cpu()


def test_segment_sums_are_those_of_the_cpu():
    (sums, grad), (expected_sums, expected_grad) = in_process(segments, "cuda", environment=GPU), segments("cpu")
    # 70,000 float64 numbers of size 1 in another order: 1e-16 x 70,000 at the very worst.
    torch.testing.assert_close(sums, expected_sums, rtol=0, atol=1e-11)
    assert torch.equal(grad, expected_grad)
    assert (sums[[0, 2, 3, 7]] == 0).all() and (grad[-7:] == 0).all()


def peak_bytes(tokens: int, vocab: int, hidden_size: int, tile: tuple[int, int], device: torch.device) -> int:
    """Largest memory beyond the inputs while `linear_logprob` runs forward and backward in bf16."""
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device=device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logp, _ = linear_logprob(hidden, weight, LogprobContext(labels, 1.0, vocab, dist.group.WORLD, *tile))
    logp.sum().backward()
    return torch.cuda.max_memory_allocated() - before


def peaks(all_tokens: tuple[int, ...], *shape: Any) -> list[int]:
    with one_rank() as device:
        peak_bytes(16, *shape, device)  # cuBLAS and NCCL take their workspaces at first use
        return [peak_bytes(tokens, *shape, device) for tokens in all_tokens]


def test_memory_is_that_of_the_gradients_and_a_few_tiles():
    """On paper, in bytes: 2 per weight, its gradient in bf16; per logit of a tile 4 while it is made, twice, and 2 for
    its gradient in bf16; per row of a tile and hidden unit 4, its gradient in fp32, twice. All logits of 8192 tokens in
    fp32 are 5 GB."""
    vocab, hidden_size, tile = 151_936, 1024, (2048, 4096)
    bound = 2 * vocab * hidden_size + 10 * tile[0] * tile[1] + 8 * tile[1] * hidden_size
    all_tokens = (2048, 8192)
    found = in_process(peaks, all_tokens, vocab, hidden_size, tile, environment=GPU)
    for tokens, peak in zip(all_tokens, found, strict=True):
        print(f"{tokens} tokens: {peak / 1e9:.2f} GB, {bound / 1e9:.2f} GB on paper")
        # Per token: the gradient of its hidden state in fp32, a product to add to it, bf16; and some numbers in fp32.
        assert peak < 1.05 * bound + tokens * (10 * hidden_size + 100)

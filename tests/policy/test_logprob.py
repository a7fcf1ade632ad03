"""Log-probabilities and entropies against torch's log_softmax in float64."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gspo.policy.logprob import LogprobContext, linear_logprob
from tests.ranks import run_ranks

TOKENS, HIDDEN, TEMPERATURE = 37, 16, 0.7


def _inputs(vocab: int, padded: int):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (TOKENS,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    logp_scale, entropy_scale = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return hidden, weight, labels, logp_scale, entropy_scale


def _reference(vocab: int, padded: int):
    hidden, weight, labels, logp_scale, entropy_scale = _inputs(vocab, padded)
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = torch.log_softmax(hidden @ weight[:vocab].t() / TEMPERATURE, -1)
    chosen, entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    (chosen * logp_scale + entropy * entropy_scale).sum().backward()
    return chosen.detach(), entropy.detach(), hidden.grad, weight.grad


def _on_rank(vocab: int, padded: int, tile: tuple[int, int], dtype: torch.dtype):
    hidden, weight, labels, logp_scale, entropy_scale = _inputs(vocab, padded)
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.chunk(dist.get_world_size())[dist.get_rank()].to(dtype).clone().requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone()
    context = LogprobContext(labels, TEMPERATURE, vocab, dist.group.WORLD, *tile)
    logp, entropy = linear_logprob(hidden, weight, context)
    assert logp.dtype == entropy.dtype == torch.float32
    (logp * logp_scale.float() + entropy * entropy_scale.float()).sum().backward()
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


# 33 rows over 4 ranks of 16: two ranks hold rows of padding alone.
@pytest.mark.parametrize(("tp", "vocab", "padded"), [(1, 50, 50), (1, 50, 64), (2, 50, 52), (4, 50, 52), (4, 33, 64)])
@pytest.mark.parametrize("tile", [(10, 7), (2048, 4096)])
def test_equals_log_softmax_in_float64(tp, vocab, padded, tile):
    logp, entropy, grad_hidden, grad_weight = _reference(vocab, padded)
    ranks = run_ranks(tp, _on_rank, vocab, padded, tile, torch.float32)
    for rank in ranks:
        torch.testing.assert_close(rank[0].double(), logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank[1].double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(rank[2] for rank in ranks).double(), grad_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]).double(), grad_weight, rtol=1e-4, atol=1e-5)


def test_bf16_rounds_inputs_and_gradients_only():
    logp, _, _, grad_weight = _reference(50, 52)
    ranks = run_ranks(2, _on_rank, 50, 52, (10, 7), torch.bfloat16)
    # 16 products of numbers of size 1, each off by 2^-8 at most: 0.06, over the temperature 0.09.
    torch.testing.assert_close(ranks[0][0].double(), logp, rtol=0, atol=0.15)
    assert ranks[0][3].dtype == torch.bfloat16
    found = torch.cat([rank[3] for rank in ranks]).double()
    assert torch.nn.functional.cosine_similarity(found.flatten(), grad_weight.flatten(), 0) > 0.999


@pytest.mark.parametrize("used", [(True, False), (False, True)])
def test_an_output_without_a_gradient_adds_nothing(used):
    def gradients(with_zeros: bool):
        hidden, weight, labels, *_ = _inputs(50, 50)
        hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
        outputs = linear_logprob(hidden, weight, LogprobContext(labels, TEMPERATURE, 50, dist.group.WORLD, 10, 7))
        sum(x.sum() * (1 if on else 0) for x, on in zip(outputs, used, strict=True) if on or with_zeros).backward()
        return hidden.grad, weight.grad

    def both():
        return gradients(True), gradients(False)

    ((with_zeros, without),) = run_ranks(1, both)
    for ours, theirs in zip(without, with_zeros, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def _largest(tokens: int, vocab: int) -> int:
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    context = LogprobContext(torch.zeros(tokens, dtype=torch.int64), 1.0, vocab, dist.group.WORLD, 64, 128)
    with Largest() as largest:
        linear_logprob(hidden, weight, context)[0].sum().backward()
    return largest.elements


@pytest.mark.parametrize(("tokens", "vocab"), [(1000, 1500), (1000, 3000), (2000, 1500)])
def test_no_tensor_is_larger_than_a_tile_or_a_gradient(tokens, vocab):
    assert run_ranks(1, _largest, tokens, vocab) == [max(64 * 128, 4 * tokens, 4 * vocab)]


def test_a_wrong_number_of_labels_is_refused():
    context = LogprobContext(torch.zeros(4, dtype=torch.int64), 1.0, 8, None)
    with pytest.raises(ValueError, match="5 hidden states but 4 labels"):
        linear_logprob(torch.zeros(5, 8), torch.zeros(8, 8), context)

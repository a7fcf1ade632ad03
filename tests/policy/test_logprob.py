"""Log-probabilities and entropies against torch's log_softmax in float64."""

import pytest
import torch
import torch.distributed as dist

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


def _on_rank(vocab: int, padded: int, chunk_tokens: int, dtype: torch.dtype):
    hidden, weight, labels, logp_scale, entropy_scale = _inputs(vocab, padded)
    hidden = hidden.to(dtype).requires_grad_()
    weight = weight.chunk(dist.get_world_size())[dist.get_rank()].to(dtype).clone().requires_grad_()
    before = hidden.detach().clone(), weight.detach().clone()
    context = LogprobContext(labels, TEMPERATURE, vocab, dist.group.WORLD, chunk_tokens)
    logp, entropy = linear_logprob(hidden, weight, context)
    assert logp.dtype == entropy.dtype == torch.float32
    (logp * logp_scale.float() + entropy * entropy_scale.float()).sum().backward()
    assert torch.equal(hidden, before[0]) and torch.equal(weight, before[1])
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


# 33 rows over 4 ranks of 16: two ranks hold rows of padding alone.
@pytest.mark.parametrize(("tp", "vocab", "padded"), [(1, 50, 50), (1, 50, 64), (2, 50, 52), (4, 50, 52), (4, 33, 64)])
@pytest.mark.parametrize("chunk_tokens", [10, 1024])
def test_equals_log_softmax_in_float64(tp, vocab, padded, chunk_tokens):
    logp, entropy, grad_hidden, grad_weight = _reference(vocab, padded)
    ranks = run_ranks(tp, _on_rank, vocab, padded, chunk_tokens, torch.float32)
    for rank in ranks:
        torch.testing.assert_close(rank[0].double(), logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank[1].double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(rank[2] for rank in ranks).double(), grad_hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([rank[3] for rank in ranks]).double(), grad_weight, rtol=1e-4, atol=1e-5)


def test_bf16_rounds_inputs_and_gradients_only():
    logp, _, _, grad_weight = _reference(50, 52)
    ranks = run_ranks(2, _on_rank, 50, 52, 10, torch.bfloat16)
    # A logit of size 10 rounded to bf16 is off by up to 0.04, over the temperature 0.06.
    torch.testing.assert_close(ranks[0][0].double(), logp, rtol=0, atol=0.2)
    assert ranks[0][3].dtype == torch.bfloat16
    found = torch.cat([rank[3] for rank in ranks]).double()
    assert torch.nn.functional.cosine_similarity(found.flatten(), grad_weight.flatten(), 0) > 0.999


def test_a_wrong_number_of_labels_is_refused():
    context = LogprobContext(torch.zeros(4, dtype=torch.int64), 1.0, 8, None)
    with pytest.raises(ValueError, match="5 hidden states but 4 labels"):
        linear_logprob(torch.zeros(5, 8), torch.zeros(8, 8), context)

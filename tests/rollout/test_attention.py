import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_gspo.rollout.cpu import attention


def reference(query, k_cache, v_cache, req_to_token, indices, seq_lens, new_lens):
    """One sequence at a time, with a mask written out."""
    outputs, start = [], 0
    for index, length, new in zip(indices.tolist(), seq_lens.tolist(), new_lens.tolist(), strict=True):
        slots = req_to_token[index, :length].long()
        mask = torch.arange(length)[None] <= torch.arange(length - new, length)[:, None]
        out = scaled_dot_product_attention(
            query[start : start + new].transpose(0, 1)[None],
            k_cache[slots].transpose(0, 1)[None],
            v_cache[slots].transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=True,
        )
        outputs.append(out[0].transpose(0, 1))
        start += new
    return torch.cat(outputs)


@pytest.mark.parametrize("chunk_elements", [1 << 14, 16], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("new_lens", [[1, 1, 1, 1, 1], [1, 7, 3, 2, 5]], ids=["decode", "extend"])
def test_batched_paged_attention_equals_one_sequence_at_a_time(new_lens, chunk_elements, monkeypatch):
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    new_lens, seq_lens = torch.tensor(new_lens), torch.tensor([1, 9, 4, 30, 6])
    indices = torch.tensor([4, 0, 2, 5, 1])
    k_cache, v_cache = torch.randn(2, 64, 2, 8, generator=generator)
    # slot 63 belongs to nobody: what it holds must not get in
    k_cache[63] = v_cache[63] = float("nan")
    req_to_token = torch.full((6, 40), 63, dtype=torch.int32)
    free = torch.randperm(63, generator=generator).int()
    for index, length in zip(indices, seq_lens, strict=True):
        req_to_token[index, :length], free = free[:length], free[length:]
    query = torch.randn(int(new_lens.sum()), 4, 8, generator=generator)
    caches = (k_cache, v_cache, req_to_token, indices, seq_lens)
    out = attention.paged_attention(query, torch.empty_like(query), *caches, new_lens, None)
    torch.testing.assert_close(out, reference(query, *caches, new_lens), rtol=1e-5, atol=1e-6)


def test_attention_that_is_not_plain_goes_to_sglangs_own_loop():
    calls = []

    def original(*args, **options):
        calls.append(options)
        return "theirs"

    rest = [torch.zeros(1)] * 7
    assert attention.decode(original, "backend", *rest, None, scaling=1.0, sliding_window_size=4) == "theirs"
    assert attention.extend(original, "backend", *rest, *rest[:2], None, scaling=1.0, causal=False) == "theirs"
    assert len(calls) == 2

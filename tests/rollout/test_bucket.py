from dataclasses import dataclass

import pytest
import torch

from megatron_gspo.rollout.bucket import check_coverage, describe, flatten


@dataclass
class Spec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass
class Bucket:
    tensors: list[Spec]
    sender: int = 0


def test_sglang_reads_back_what_flatten_wrote():
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    tensors = [
        ("a", torch.randn(3, 4)),
        ("column", torch.randn(6, 2).T),  # not contiguous
        ("scalar", torch.tensor(2.5)),
        ("half", torch.randn(5).bfloat16()),
    ]
    bucket = Bucket([Spec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors])
    theirs = FlattenedTensorBucket.empty(**describe(bucket), device="cpu")
    theirs.flattened_tensor.copy_(flatten(bucket, tensors))
    for (name, tensor), (their_name, their_tensor) in zip(tensors, theirs.reconstruct_tensors(), strict=True):
        assert name == their_name
        assert torch.equal(tensor, their_tensor)
    assert torch.equal(flatten(bucket, tensors), FlattenedTensorBucket(named_tensors=tensors).get_flattened_tensor())


def test_a_tensor_that_starts_between_two_items_is_refused():
    bucket = Bucket([Spec("odd", (3,), torch.bfloat16), Spec("w", (2,), torch.float32)])
    with pytest.raises(ValueError, match=r"w \(torch.float32\) would start at byte 6"):
        describe(bucket)


def test_gathering_something_else_than_announced_is_refused():
    bucket = Bucket([Spec("a", (2,)), Spec("b", (2,))], sender=3)
    with pytest.raises(ValueError, match=r"bucket of rank 3 announces 2 tensors and 2 were gathered.*'c'"):
        flatten(bucket, [("a", torch.zeros(2)), ("c", torch.zeros(2))])
    with pytest.raises(ValueError, match="2 tensors and 1 were gathered"):
        flatten(bucket, [("a", torch.zeros(2))])


def test_every_tensor_of_the_model_is_sent_once():
    expected = {"a": (2, 3), "b": (4,)}
    check_coverage([Bucket([Spec("b", (4,))], 1), Bucket([Spec("a", (2, 3))])], expected)
    wrong = [Bucket([Spec("a", (3, 2)), Spec("a", (2, 3)), Spec("x", (1,))])]
    with pytest.raises(ValueError) as error:
        check_coverage(wrong, expected)
    text = str(error.value)
    assert "1 sent twice: a" in text
    assert "1 not in the model: x" in text
    assert "1 missing: b" in text
    assert "1 of another shape: a [3, 2] instead of [2, 3]" in text

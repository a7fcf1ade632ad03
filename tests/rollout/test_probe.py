import pytest
import torch

from megatron_gspo.rollout.probe import ProbeMismatch, check_probe

WHERE = {"version": 7, "url": "http://server"}


def test_the_largest_difference_is_returned():
    worst = check_probe(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.25]), tolerance=0.25, **WHERE)
    assert worst == 0.25


def test_disagreement_names_both_numbers_the_token_and_the_version():
    with pytest.raises(ProbeMismatch) as error:
        check_probe(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]), tolerance=1e-3, **WHERE)
    for part in ("version 7", "http://server", "token 2", "-2.000000", "-2.500000", "0.5 above", "0.001"):
        assert part in str(error.value)


def test_a_nan_is_a_disagreement():
    # a comparison with NaN is false both ways
    with pytest.raises(ProbeMismatch, match="token 1"):
        check_probe(torch.tensor([float("nan"), -2.0]), torch.tensor([-1.0, -2.0]), tolerance=1e-3, **WHERE)


def test_an_empty_or_shorter_answer_is_refused():
    with pytest.raises(ValueError, match=r"scored \[2\] probe tokens, the server \[1\]"):
        check_probe(torch.zeros(2), torch.zeros(1), tolerance=1e-3, **WHERE)

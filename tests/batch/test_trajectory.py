from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_gspo.batch.trajectory import TrajectoryIndex
from tests.batch.test_shard import two_trajectories


def test_select_takes_rows_in_the_given_order():
    got = two_trajectories().select([7])
    assert (got.rows.tolist(), got.offsets.tolist(), got.tokens.tolist()) == ([7], [0, 3], [16, 17, 18])
    swapped = two_trajectories().select([7, 4])
    assert swapped.tokens.tolist() == [16, 17, 18, 11, 12, 13, 14, 15]
    assert swapped.versions.tolist() == [-1, 2, 3, -1, -1, 2, 2, 2]
    assert two_trajectories().select([]).tokens.dtype == torch.int64


def test_disagreeing_arrays_are_refused():
    good = two_trajectories()
    with pytest.raises(ValueError, match=r"Trajectories.logprobs must be \[8\] torch.float32, got \[8\] torch.float64"):
        replace(good, logprobs=good.logprobs.double())
    with pytest.raises(ValueError, match=r"Trajectories.loss_mask must be \[8\] torch.bool, got \[7\]"):
        replace(good, loss_mask=good.loss_mask[1:])
    with pytest.raises(ValueError, match="offsets must rise strictly from 0 to 8"):
        replace(good, offsets=torch.tensor([0, 8, 8]))


def test_a_first_token_cannot_train():
    good = two_trajectories()
    trains = good.loss_mask.clone()
    trains[5] = True
    with pytest.raises(ValueError, match=r"rows \[7\] train on their first token"):
        replace(good, loss_mask=trains)


def test_index_checks_its_arrays():
    lens = torch.tensor([2, 1])
    arrays = dict(prompt_lens=lens, response_lens=lens, trained_lens=lens, group=lens)
    scores = dict(rewards=torch.zeros(2).double(), finish=torch.zeros(2, dtype=torch.uint8))
    assert TrajectoryIndex(**arrays, **scores).lens.tolist() == [4, 2]
    with pytest.raises(ValueError, match=r"TrajectoryIndex.metrics\['exact'\] must be \[2\] torch.float64"):
        TrajectoryIndex(**arrays, **scores, metrics={"exact": torch.zeros(3).double()})

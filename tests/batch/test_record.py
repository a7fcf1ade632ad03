from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_gspo.batch import record
from megatron_gspo.batch.record import read_index, read_rows, write_record
from megatron_gspo.batch.trajectory import Trajectories, TrajectoryIndex


def random_batch(n: int) -> tuple[TrajectoryIndex, Trajectories]:
    """n trajectories of 2 prompt tokens and 1 to 9 response tokens; the trajectories stand in reverse order."""
    random = torch.Generator().manual_seed(0)
    response = torch.randint(1, 10, (n,), generator=random)
    lens = 2 + response
    order = torch.arange(n).flip(0)
    total = int(lens.sum())
    trains = torch.cat([torch.arange(int(length)) >= 2 for length in lens[order]])
    index = TrajectoryIndex(
        prompt_lens=torch.full((n,), 2),
        response_lens=response,
        trained_lens=response,
        group=torch.arange(n) // 2,
        rewards=torch.rand(n, generator=random, dtype=torch.float64),
        finish=torch.randint(0, 3, (n,), generator=random).to(torch.uint8),
        metrics={"exact": torch.rand(n, generator=random, dtype=torch.float64)},
    )
    trajectories = Trajectories(
        rows=order,
        offsets=torch.cat([torch.tensor([0]), lens[order].cumsum(0)]),
        tokens=torch.randint(0, 1000, (total,), generator=random),
        loss_mask=trains,
        logprobs=-torch.rand(total, generator=random),
        versions=torch.where(trains, 5, -1),
    )
    return index, trajectories


def same(a: object, b: object) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def tensors(value: object) -> list[torch.Tensor]:
    flat = {**vars(value), **vars(value).get("metrics", {})}
    return [flat[name] for name in sorted(flat) if name != "metrics"]


def test_round_trip(tmp_path: Path):
    index, trajectories = random_batch(6)
    samples = [{"prompt": "3 1 2", "response": "1 2 3 ✓", "reward": 0.5}] * 6
    write_record(tmp_path / "step_1", index, trajectories, samples)
    assert same(read_index(tmp_path / "step_1"), index)
    for rows in ([0, 1, 2, 3, 4, 5], [4, 1], [3], []):
        assert same(read_rows(tmp_path / "step_1", rows), trajectories.select(rows))
    lines = (tmp_path / "step_1" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == samples
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_rows_are_read_by_their_ranges_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    index, trajectories = random_batch(6)
    write_record(tmp_path / "step_1", index, trajectories, [])
    read = []

    class Slices:
        def __init__(self, arrays, name):
            self.name, self.array = name, arrays.get_slice(name)

        def __getitem__(self, span: slice):
            read.append((self.name, span.stop - (span.start or 0)))
            return self.array[span]

    class Arrays:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.arrays = self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def get_tensor(self, name):
            assert name == "offsets", f"{name} was read whole"
            return self.arrays.get_tensor(name)

        def get_slice(self, name):
            return Slices(self.arrays, name)

    monkeypatch.setattr(record, "safe_open", Arrays)
    read_rows(tmp_path / "step_1", [4, 1])
    assert sum(count for name, count in read if name == "tokens") == int(index.lens[[4, 1]].sum())


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, fault: type[BaseException]):
    def samples():
        yield {"response": "1 2 3"}
        raise fault

    with pytest.raises(fault):
        write_record(tmp_path / "step_1", *random_batch(4), samples())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_not_a_record_and_is_replaced(tmp_path: Path):
    left = tmp_path / ".step_1.partial"
    left.mkdir()
    (left / "batch.safetensors").write_bytes(b"half")
    with pytest.raises(FileNotFoundError, match=r"step_1/batch.safetensors is missing"):
        read_index(tmp_path / "step_1")
    index, trajectories = random_batch(4)
    write_record(tmp_path / "step_1", index, trajectories, [])
    assert same(read_index(tmp_path / "step_1"), index)
    assert not left.exists()


def test_a_record_is_never_overwritten(tmp_path: Path):
    write_record(tmp_path / "step_1", *random_batch(4), [])
    with pytest.raises(FileExistsError, match="step_1 holds a record already"):
        write_record(tmp_path / "step_1", *random_batch(4), [])


def test_damage_names_the_file(tmp_path: Path):
    write_record(tmp_path / "step_1", *random_batch(4), [])
    path = tmp_path / "step_1" / "batch.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    for read in (read_index, lambda directory: read_rows(directory, [0])):
        with pytest.raises(ValueError, match=r"step_1/batch.safetensors is damaged"):
            read(tmp_path / "step_1")


def test_a_row_that_is_not_there_is_named(tmp_path: Path):
    write_record(tmp_path / "step_1", *random_batch(4), [])
    with pytest.raises(ValueError, match=r"has rows 0 to 3, not \[4\]"):
        read_rows(tmp_path / "step_1", [1, 4])


def test_index_and_trajectories_must_agree(tmp_path: Path):
    index, trajectories = random_batch(4)
    index = replace(index, response_lens=index.response_lens + 1)
    with pytest.raises(ValueError, match="lengths of the index and of the trajectories differ"):
        write_record(tmp_path / "step_1", index, trajectories, [])
    assert list(tmp_path.iterdir()) == []

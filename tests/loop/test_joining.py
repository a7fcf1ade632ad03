"""Ranks that agree whether the run begins: threads over one store in the place of processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from megatron_gspo.loop.environment import Environment
from megatron_gspo.loop.joining import GO_ON, Verdict, agree, verdict_of


def joint(*checks) -> list[Verdict]:
    """What each rank hears when rank i makes the i-th check."""
    store = HashStore()

    def rank(number: int) -> Verdict:
        place = Environment(
            rank=number, world_size=len(checks), local_rank=number, master_addr="localhost", master_port=1
        )
        return agree(store, place, "question", verdict_of(checks[number]))

    with ThreadPoolExecutor(len(checks)) as ranks:
        return list(ranks.map(rank, range(len(checks))))


def test_ranks_that_have_nothing_to_say_go_on():
    assert joint(lambda: GO_ON, lambda: GO_ON, lambda: GO_ON) == [GO_ON] * 3


def test_whatever_one_rank_meets_ends_all_of_them():
    """An exception other than a refusal once ended its rank alone; the others waited for run.timeout_s."""

    def fail() -> Verdict:
        raise PermissionError("[Errno 13] Permission denied: '/data/prompts.jsonl'")

    for checks in ((lambda: GO_ON, lambda: GO_ON, fail), (fail, lambda: GO_ON, lambda: GO_ON)):
        heard = joint(*checks)
        assert {verdict.code for verdict in heard} == {1} and len({verdict.text for verdict in heard}) == 1
        assert "PermissionError: [Errno 13] Permission denied: '/data/prompts.jsonl'" in heard[0].text
        assert heard[0].text.endswith("(on rank 2)") == (checks[2] is fail)

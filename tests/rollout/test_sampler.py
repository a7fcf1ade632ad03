import asyncio

import pytest
import torch

from megatron_gspo.batch.trajectory import Finish
from megatron_gspo.config.schema import OnRewardError
from megatron_gspo.rollout.client import Sample, Sampling
from megatron_gspo.rollout.control import ServerError
from megatron_gspo.rollout.sampler import sample_batch

PROMPTS = [[1, 2, 3], [4]]


def response(*tokens: int, finish: Finish = Finish.stop) -> Sample:
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Sample(output_ids=ids, logprobs=-ids.float(), versions=torch.full_like(ids, 5), finish=finish)


class Scripted:
    """Answers each prompt from a script: one list of samples per request."""

    def __init__(self, script: dict[int, list[list[Sample]]]):
        self.script = script
        self.asked: list[tuple[int, int, str]] = []

    async def generate(self, prompt, sampling, *, n, rid):
        self.asked.append((prompt[0], n, rid))
        return self.script[prompt[0]].pop(0)


async def by_length(prompt: int, sample: Sample):
    return {"reward": float(len(sample.output_ids)), "first": float(sample.output_ids[0])}


def sample(client, reward=by_length, on_reward_error=OnRewardError.zero, **options):
    return asyncio.run(
        sample_batch(
            client,
            PROMPTS,
            reward,
            Sampling(max_new_tokens=4),
            n=2,
            name="step-3",
            reward_concurrency=2,
            on_reward_error=on_reward_error,
            **options,
        )
    )


def whole():
    return Scripted({1: [[response(7, 8), response(9, finish=Finish.length)]], 4: [[response(6), response(5, 4, 3)]]})


def test_rows_are_prompt_after_prompt_with_versions_and_masks():
    progress = []
    rollout = sample(whole(), on_progress=lambda done, total: progress.append((done, total)))
    index, tokens = rollout.index, rollout.trajectories
    assert index.prompt_lens.tolist() == [3, 3, 1, 1]
    assert index.response_lens.tolist() == index.trained_lens.tolist() == [2, 1, 1, 3]
    assert index.group.tolist() == [0, 0, 1, 1]
    assert index.rewards.tolist() == [2, 1, 1, 3]
    assert index.metrics["first"].tolist() == [7, 9, 6, 5]
    assert [Finish(value).name for value in index.finish.tolist()] == ["stop", "length", "stop", "stop"]
    assert tokens.tokens.tolist() == [1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 6, 4, 5, 4, 3]
    assert tokens.offsets.tolist() == [0, 5, 9, 11, 15]
    assert tokens.loss_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1]
    assert tokens.logprobs.tolist() == [0, 0, 0, -7, -8, 0, 0, 0, -9, 0, -6, 0, -5, -4, -3]
    assert tokens.versions.tolist() == [-1, -1, -1, 5, 5, -1, -1, -1, 5, -1, 5, -1, 5, 5, 5]
    assert rollout.failures == ()
    assert sorted(progress) == [(2, 4), (4, 4)]


def test_only_aborted_responses_are_sampled_anew():
    client = whole()
    client.script[1] = [[response(7, finish=Finish.abort), response(8)], [response(9, 9)]]
    assert sample(client).trajectories.tokens.tolist()[:9] == [1, 2, 3, 8, 1, 2, 3, 9, 9]
    assert [asked for asked in client.asked if asked[0] == 1] == [(1, 2, "step-3-0-0-0"), (1, 1, "step-3-0-0-1")]


def test_a_response_that_is_aborted_again_and_again_ends_the_batch():
    client = whole()
    client.script[4] = [[response(6, finish=Finish.abort), response(5)]] + [[response(6, finish=Finish.abort)]] * 3
    with pytest.raises(ExceptionGroup) as error:
        sample(client)
    assert error.group_contains(ServerError, match="request step-3-1-0: the server aborted 1 of 2 responses 4 times")


def test_a_reward_that_raises_is_worth_nothing_and_is_reported():
    async def reward(prompt, sample):
        if prompt == 1 and len(sample.output_ids) == 3:
            raise ZeroDivisionError("no answer")
        return {"reward": 1.0, "exact": 1.0}

    rollout = sample(whole(), reward)
    assert rollout.index.rewards.tolist() == [1, 1, 1, 0]
    assert torch.equal(rollout.index.metrics["exact"].isnan(), torch.tensor([False, False, False, True]))
    (failure,) = rollout.failures
    assert (failure.prompt, failure.response) == (1, 1)
    assert "ZeroDivisionError: no answer" in failure.trace
    with pytest.raises(ExceptionGroup) as error:
        sample(whole(), reward, OnRewardError.stop)
    assert error.group_contains(ZeroDivisionError, match="no answer")


def test_rewards_are_bounded():
    running, most = 0, 0

    async def reward(prompt, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return {"reward": 0.0}

    sample(whole(), reward)
    assert most == 2


def test_groups_with_equal_rewards_are_sampled_anew_and_the_last_one_stays():
    """Prompt 0 finds a useful group at its second try; prompt 1 finds none in three."""
    equal, useful = [response(7), response(8)], [response(7), response(8, 9)]
    client = Scripted({1: [equal], 10: [useful], 4: [equal], 11: [equal], 21: [equal]})
    asked = {(0, 1): [10, 10], (1, 1): [11], (1, 2): [21]}
    rollout = sample(client, replace=lambda number, attempt: asked[number, attempt], max_attempts=3)
    assert rollout.discarded == 3
    assert [ask[0] for ask in client.asked if ask[0] != 1] and len(client.asked) == 5
    assert rollout.index.prompt_lens.tolist() == [2, 2, 1, 1]
    assert rollout.trajectories.tokens.tolist() == [10, 10, 7, 10, 10, 8, 9, 21, 7, 21, 8]
    assert rollout.index.group.tolist() == [0, 0, 1, 1]
    assert rollout.index.rewards.tolist() == [1, 2, 1, 1]


def test_responses_cut_short_can_be_kept_from_training():
    rollout = sample(whole(), train_cut_short=False)
    assert rollout.index.trained_lens.tolist() == [2, 0, 1, 3]
    assert rollout.index.response_lens.tolist() == [2, 1, 1, 3]
    assert rollout.trajectories.loss_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1]


def test_dynamic_sampling_judges_the_reward_before_its_shape():
    """A group that is all wrong teaches nothing, though its lengths make a difference to what it is worth."""
    wrong = [response(7), response(8, 9)]
    client = Scripted({1: [wrong], 10: [wrong], 4: [wrong], 11: [wrong]})

    async def nothing(prompt, sample):
        return {"reward": 0.0}

    def shape(scores, sample):
        return {**scores, "reward": scores["reward"] - len(sample.output_ids)}

    rollout = sample(client, nothing, replace=lambda number, _: [[10], [11]][number], max_attempts=2, shape=shape)
    assert rollout.discarded == 2
    assert rollout.index.rewards.tolist() == [-1, -2, -1, -2]

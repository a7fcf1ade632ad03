from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import traceback

import pytest

from megatron_gspo.config.schema import RewardConfig
from megatron_gspo.data import Prompt
from megatron_gspo.reward import Reward, watched
from megatron_gspo.reward import watch as watch_module

PROMPT = Prompt(id="a.jsonl:7", prompt="2+2=", meta={"answer": "4"})


def score(config: RewardConfig, response: str, prompt: Prompt = PROMPT) -> dict[str, float]:
    return asyncio.run(Reward(config)(prompt, response))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Puts a user's module `own_reward` with the given source on the Python path."""

    def write(source: str) -> None:
        (tmp_path / "own_reward.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "own_reward", raising=False)

    return write


@pytest.mark.parametrize(
    ("response", "reward", "exact"),
    [
        ("0112", 1.0, 1.0),
        ("0113", 0.375, 0.0),  # three of four in place
        ("01", 0.25, 0.0),
        ("01123", 0.5, 0.0),  # all in place, yet not the answer
        ("", 0.0, 0.0),
    ],
)
def test_sort_digits_is_half_share_half_exact(response, reward, exact):
    prompt = Prompt(id="x", prompt="1021>", meta={"answer": "0112"})
    assert score(RewardConfig(name="sort_digits"), response, prompt) == {"reward": reward, "exact": exact}


def test_exact_match_ignores_white_space_around():
    assert score(RewardConfig(name="exact_match"), " 4\n") == {"reward": 1.0, "exact": 1.0}
    assert score(RewardConfig(name="exact_match"), "44") == {"reward": 0.0, "exact": 0.0}
    prompt = Prompt(id="x", prompt="", meta={"solution": 4})
    assert score(RewardConfig(name="exact_match", args={"key": "solution"}), "4", prompt)["reward"] == 1.0


def test_reasoning_gym_scores_by_the_data_sets_own_scorer():
    pytest.importorskip("reasoning_gym")
    from megatron_gspo.config.schema import DataConfig
    from megatron_gspo.data import make_source
    from tools.make_demo_policy import make_tokenizer

    source = make_source(DataConfig(source="reasoning_gym:chain_sum"), seed=0, tokenizer=make_tokenizer())
    (prompt,) = source.batch(0, 1)
    assert score(RewardConfig(name="reasoning_gym"), f" {prompt.response}\n", prompt)["reward"] == 1.0
    assert score(RewardConfig(name="reasoning_gym"), "no", prompt) == {"reward": 0.0, "exact": 0.0}
    tagged = RewardConfig(name="reasoning_gym", args={"tag": "answer"})
    assert score(tagged, f"so <answer>{prompt.response}</answer>", prompt)["reward"] == 1.0
    assert score(tagged, f"{prompt.response}", prompt)["reward"] == 0.0


def test_own_rewards_sync_and_async_get_text_meta_and_args(own):
    own("""
async def later(*, prompt, response, meta, bonus):
    return {"reward": bonus + (response == meta["answer"]), "length": len(response)}

def now(prompt, response, meta):
    return prompt == "2+2="
""")
    assert score(RewardConfig(name="own_reward:later", args={"bonus": 0.5}), "4") == {"reward": 1.5, "length": 1.0}
    assert score(RewardConfig(name="own_reward:now"), "4") == {"reward": 1.0}


def test_a_slow_plain_function_does_not_hold_up_the_event_loop(own):
    own("import time, threading\ndef slow(**_): time.sleep(0.2); return threading.get_ident()")
    reward = Reward(RewardConfig(name="own_reward:slow", concurrency=8))

    async def together():
        return await asyncio.gather(*(reward(PROMPT, "4") for _ in range(8)))

    start = time.monotonic()
    threads = {result["reward"] for result in asyncio.run(together())}
    assert time.monotonic() - start < 0.8  # 1.6 s one after the other
    assert float(threading.get_ident()) not in threads


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('answer')", "answer"),
        ("return {'exact': 1.0}", "has no 'reward'"),
        ("return float('nan')", "not finite: {'reward': nan}"),
        ("return {'reward': 1.0, 'extra': float('inf')}", "not finite: {'extra': inf}"),
        ("return None", "returned 'reward': None (NoneType), expected a number"),
        ("return '0.5'", "returned 'reward': '0.5' (str), expected a number"),
        ("return {'reward': 1.0, 'hits': [1, 2]}", "returned 'hits': [1, 2] (list), expected a number"),
        ("return {'reward': 1.0, 3: 0.5}", "an entry named 3: names are printable text"),
        ("return {'reward': 1.0, '': 0.5}", "an entry named '': names are printable text"),
        ("return {'reward': 1.0, 'a\\nb': 0.5}", r"an entry named 'a\nb': names are printable text"),
        ("return {'reward': 1.0, 'mean': 0.5}", "['mean']: names of metrics that every run has"),
        ("return next(iter([]))", "StopIteration"),
    ],
)
def test_a_failure_names_the_prompt(own, body, message):
    own(f"def bad(prompt, response, meta):\n    {body}")
    with pytest.raises((KeyError, ValueError, RuntimeError)) as caught:
        score(RewardConfig(name="own_reward:bad"), "4")
    report = "".join(traceback.format_exception(caught.value))
    assert message in report
    assert "in the reward 'own_reward:bad', on prompt a.jsonl:7" in report


def test_numbers_of_numpy_and_torch_are_rewards(own):
    own("""
import numpy, torch
def mixed(prompt, response, meta):
    return {"reward": numpy.float32(0.5), "exact": torch.tensor(1.0), "right": True, "count": numpy.int64(3)}
""")
    expected = {"reward": 0.5, "exact": 1.0, "right": 1.0, "count": 3.0}
    assert score(RewardConfig(name="own_reward:mixed"), "4") == expected


@pytest.mark.parametrize(
    "source",
    ["import time\ndef ever(**_): time.sleep(600)", "import asyncio\nasync def ever(**_): await asyncio.sleep(600)"],
)
def test_a_reward_that_never_returns_is_an_error_and_holds_nothing_up(own, source):
    """More of them than threads of a pool, then one that returns: none waits behind another."""
    own(source + "\ndef quick(**_): return 1")
    hanging = Reward(RewardConfig(name="own_reward:ever", timeout_s=0.2, concurrency=1))

    async def all_of_them():
        return await asyncio.gather(*(hanging(PROMPT, "4") for _ in range(4)), return_exceptions=True)

    start = time.monotonic()
    errors = asyncio.run(all_of_them())
    assert time.monotonic() - start < 2
    assert {str(error) for error in errors} == {
        "the reward took longer than reward.timeout_s = 0.2; raise it if it is only slow"
    }
    assert errors[0].__notes__ == ["in the reward 'own_reward:ever', on prompt a.jsonl:7"]
    assert hanging.running() == []
    assert score(RewardConfig(name="own_reward:quick"), "4") == {"reward": 1.0}


def test_a_time_limit_of_the_functions_own_is_told_apart(own):
    own("def mine(**_): raise TimeoutError('the judge is busy')")
    with pytest.raises(TimeoutError, match="the judge is busy"):
        score(RewardConfig(name="own_reward:mine"), "4")


def test_a_process_ends_although_a_reward_never_returned(tmp_path):
    (tmp_path / "own_reward.py").write_text("import time\ndef ever(**_): time.sleep(600)")
    program = """
import asyncio
from megatron_gspo.config.schema import RewardConfig
from megatron_gspo.data import Prompt
from megatron_gspo.reward import Reward
try:
    asyncio.run(Reward(RewardConfig(name="own_reward:ever", timeout_s=0.1))(Prompt(id="a", prompt=""), ""))
except TimeoutError:
    print("timed out")
"""
    python_path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": python_path},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("timed out\n", 0), done.stderr


def test_slow_rewards_are_named_while_the_batch_waits(own, monkeypatch):
    own("import asyncio\nasync def slow(*, prompt, **_): await asyncio.sleep(float(prompt)); return 0")
    monkeypatch.setattr(watch_module, "EVERY_S", 0.2)
    reward = Reward(RewardConfig(name="own_reward:slow"))
    said = []

    async def batch():
        async with watched(reward, said.append):
            prompts = [Prompt(id=f"p{seconds}", prompt=seconds) for seconds in ("0.7", "0.0", "0.3")]
            await asyncio.gather(*(reward(prompt, "") for prompt in prompts))

    asyncio.run(batch())
    assert "2 running for 0.2 s and more; the longest: on prompt p0.7 for 0 s, p0.3 for 0 s" in said[0]
    assert "1 running" in said[1] and "p0.3" not in said[1]


def test_a_reward_that_stops_the_event_loop_shows_where_each_thread_stands(tmp_path):
    (tmp_path / "own_reward.py").write_text("import time\nasync def blocking(**_): time.sleep(1.5); return 0")
    program = """
import asyncio
from megatron_gspo.config.schema import RewardConfig
from megatron_gspo.data import Prompt
from megatron_gspo.reward import Reward, watch, watched
watch.EVERY_S, watch.STUCK_S = 0.1, 0.5
async def batch():
    reward = Reward(RewardConfig(name="own_reward:blocking"))
    async with watched(reward, print):
        await asyncio.sleep(0)  # the watch begins
        await reward(Prompt(id="a", prompt=""), "")
asyncio.run(batch())
"""
    python_path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": python_path},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'own_reward.py", line 2 in blocking' in done.stderr


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sort_digit", {}, "no such reward; try sort_digits"),
        ("sort_digits", {"key": "a"}, "got an unexpected keyword argument 'key'"),
        ("own_rewards:now", {}, "no module 'own_rewards' on the Python path"),
        ("own_reward:nwo", {}, "'own_reward' has no 'nwo'; it has now"),
        ("own_reward:constant", {}, "expected a function, got int"),
        ("own_reward:no_meta", {}, "its signature is (prompt, response)"),
        ("own_reward:now", {"bonus": 1}, "got an unexpected keyword argument 'bonus'"),
    ],
)
def test_what_is_no_reward_function_is_refused(own, name, args, message):
    own("constant = 1\ndef now(prompt, response, meta): return 0\ndef no_meta(prompt, response): return 0")
    with pytest.raises(ValueError, match=re.escape(message)):
        Reward(RewardConfig(name=name, args=args))


def test_a_module_that_fails_inside_keeps_its_own_error(own):
    own("import no_such_dependency\ndef now(prompt, response, meta): return 0")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        Reward(RewardConfig(name="own_reward:now"))

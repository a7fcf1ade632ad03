"""Contradictions: each is refused with its key, its line and what would be valid."""

from __future__ import annotations

import json

import pytest

from megatron_gspo.config import (
    CriticConfig,
    GaeConfig,
    GroupConfig,
    LeaveOneOutConfig,
    Problem,
    RecipeError,
    effective_yaml,
    load_recipe,
    validate,
)
from megatron_gspo.config.replay import idle_in_replay
from megatron_gspo.config.source import Source
from tests.config.recipes import GSPO, SFT, edit, refusal, write

GSPO_CONTRADICTIONS = [
    # Bounds of single numbers
    ("prompts: 32", "prompts: 0", "r.yaml:12: batch.prompts = 0: must be >= 1"),
    ("lr: 3e-4", "lr: 0", "r.yaml:7: policy.optimizer.lr = 0.0: must be > 0"),
    ("lr: 3e-4", "lr: .nan", "r.yaml:7: policy.optimizer.lr = nan: must be finite"),
    ("lr: 3e-4", "lr: .inf", "r.yaml:7: policy.optimizer.lr = inf: must be finite"),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  temperature: 0",
        "r.yaml:20: rollout.temperature = 0.0: must be > 0",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  top_p: 1.1",
        "r.yaml:20: rollout.top_p = 1.1: must be > 0 and <= 1",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  top_k: 0",
        "r.yaml:20: rollout.top_k = 0: must be -1 (off) or at least 1",
    ),
    ("name: gspo", "name: gspo\n  clip_low: 1", "r.yaml:10: objective.clip_low = 1.0: must be >= 1e-06 and < 1"),
    (
        "name: gspo",
        "name: gspo\n  clip_high: 1e-300",
        "r.yaml:10: objective.clip_high = 1e-300: must be >= 1e-06 and <= 1e+06",
    ),
    (
        "name: gspo",
        "name: sapo\n  tau_neg: 1e308",
        "r.yaml:10: objective.tau_neg = 1e+308: must be >= 0.001 and <= 1000",
    ),
    (
        "name: gspo",
        "name: dppo\n  delta: 2",
        "r.yaml:10: objective.delta = 2.0: a total variation (objective.divergence: tv) is at most 1, so that nothing "
        "would be masked; set it below 1 (paper: 0.2)",
    ),
    # Sizes beyond any machine
    (
        "steps: 10",
        "steps: 100000000000000000000",
        "r.yaml:3: run.steps = 100000000000000000000: must be at most 9223372036854775807 (2^63 - 1)",
    ),
    (
        "prompts: 32",
        "prompts: 1000000000",
        "r.yaml:12: batch.prompts = 1000000000: with batch.samples = 16, "
        "16000000000 responses a step: more than 2147483648",
    ),
    (
        "dir: runs/x",
        "dir: runs/x\n  seed: 99999999999999999999",
        "r.yaml:3: run.seed = 99999999999999999999: must be at most 9223372036854775807 (2^63 - 1)",
    ),
    (
        "dir: runs/x",
        "dir: runs/x\n  timeout_s: 1e30",
        "r.yaml:3: run.timeout_s = 1e+30: must be at most 315360000 seconds, which are ten years",
    ),
    (
        "name: sort_digits",
        "name: sort_digits\n  timeout_s: 1e9",
        "r.yaml:22: reward.timeout_s = 1000000000.0: must be at most 315360000 seconds, which are ten years",
    ),
    ("dir: runs/x", "dir: runs/x\n  workers: 100000", "r.yaml:3: run.workers = 100000: must be >= 1 and <= 4096"),
    ("dir: runs/x", "dir: runs/x\n  timeout_s: 10", "r.yaml:3: run.timeout_s = 10.0: must be >= 30"),
    # Sections that the objective needs
    (
        "advantage: {}\n",
        "advantage: null\n",
        "r.yaml:10: advantage: required by the objective 'gspo', but not set; add `advantage: {}`",
    ),
    # Advantages, critic, corrections
    (
        "advantage: {}",
        "advantage: {estimator: gae}",
        "r.yaml:10: advantage.estimator = 'gae': gives every token its own advantage, and the objective 'gspo' takes "
        "one per response; valid: group, leave_one_out; or another objective",
    ),
    (
        "advantage: {}",
        "advantage: {estimator: leave_one_out, eps: 1}",
        "r.yaml:10: advantage.eps = 1: the advantage estimator 'leave_one_out' does not use this key; "
        "its keys: estimator",
    ),
    (
        "advantage: {}",
        "advantage: {normalize_std: false, eps: 1}",
        "r.yaml:10: advantage.eps = 1.0: has no effect: advantages are not divided by a standard deviation; "
        "remove it (default 1e-06)",
    ),
    (
        "  name: gspo\nadvantage: {}",
        "  name: ppo\nadvantage: {estimator: group}",
        "r.yaml:10: advantage.estimator = 'group': the objective 'ppo' takes its advantages from a critic; "
        "set advantage.estimator: gae, or take objective.name: grpo",
    ),
    (
        "advantage: {}",
        "critic: {}",
        "r.yaml:10: critic: advantage.estimator 'group' uses no critic; remove it, or set advantage.estimator: gae",
    ),
    (
        "advantage: {}",
        "correction: {}",
        "r.yaml:10: correction: corrects nothing; add truncate, icepop, sequence_mask or opsm",
    ),
    (
        "advantage: {}",
        "correction: {truncate: {}, icepop: {}}",
        "r.yaml:10: correction.truncate: together with correction.icepop, both weigh terms by pi_old / pi_rollout; "
        "choose one",
    ),
    (
        "  name: gspo\nadvantage: {}",
        "  name: gmpo\ncorrection: {icepop: {}}",
        "r.yaml:10: correction.icepop.level = token (default): the objective 'gmpo' has one term per response, whose "
        "tokens cannot be weighed one by one; valid: sequence, sequence_product",
    ),
    (
        "  name: gspo",
        "  name: dppo\n  on_policy_check: warn",
        "r.yaml:10: objective.on_policy_check = warn: has no effect: the objective 'dppo' compares with the rollout "
        "engine's policy; remove it (default stop)",
    ),
    (
        "  name: gspo\nadvantage: {}",
        "  name: dppo\ncorrection: {truncate: {}}",
        "r.yaml:10: correction: the objective 'dppo' does not use this section; remove it, or set correction: null",
    ),
    (
        "rollout:\n  max_new_tokens: 16\n",
        "",
        "r.yaml: rollout: required by the objective 'gspo', but not set; set rollout.max_new_tokens",
    ),
    (
        "reward:\n  name: sort_digits\n",
        "",
        "r.yaml: reward: required by the objective 'gspo', but not set; set reward.name",
    ),
    # The batch and its cuts
    (
        "samples: 16",
        "samples: 1",
        "r.yaml:13: batch.samples = 1: the advantage estimator 'group' compares responses to one prompt: at least 2",
    ),
    (
        "  samples: 16\n",
        "",
        "r.yaml:11: batch.samples = 1 (default): the advantage estimator 'group' compares responses to one prompt: "
        "at least 2",
    ),
    (
        "mini_batches: 2",
        "mini_batches: 3",
        "r.yaml:14: batch.mini_batches = 3: does not divide batch.prompts = 32; valid: 1, 2, 4, 8, 16, 32",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 9001",
        "r.yaml:11: batch.max_tokens = 8192 (default): too small for the longest sequence: data.max_prompt_tokens + "
        "rollout.max_new_tokens = 64 + 9001, padded to 9066; raise it to 9066, or lower one of the two",
    ),
    # Changes of routing between an old and a new policy
    (
        "  mini_batches: 2",
        "  mini_batches: 1\nobserve: {routing_changes: true}",
        "r.yaml:15: observe.routing_changes = true: has no effect: batch.mini_batches is 1, so that the policy is its "
        "own old policy; remove it (default false), or raise batch.mini_batches",
    ),
    (
        "  name: gspo\nadvantage: {}",
        "  name: dppo\nobserve: {routing_changes: true}",
        "r.yaml:10: observe.routing_changes = true: has no effect: the old policy of 'dppo' is the rollout engine's; "
        "remove it (default false)",
    ),
    # Pipelines
    (
        "  hf: no/such/model",
        "  hf: x\n  mtp: on",
        "r.yaml:6: policy.mtp = true: expected carry | train; valid: carry, train",
    ),
    (
        "  hf: no/such/model",
        "  hf: x\n  megatron: {mtp_loss_scaling_factor: 0.3}",
        "r.yaml:6: policy.megatron.mtp_loss_scaling_factor = 0.3: has no effect: policy.mtp is carry, so that no "
        "multi-token-prediction layer trains; remove it, or set policy.mtp: train",
    ),
    (
        "  hf: no/such/model",
        "  hf: x\n  layout: {pp: 2, pipeline_layout: Et|tmL}",
        "r.yaml:6: policy.layout.pipeline_layout = 'Et|tmL': has stages for multi-token-prediction layers (m), and "
        "policy.mtp is carry",
    ),
    (
        "  hf: no/such/model",
        "  hf: x\n  layout: {vpp: 2}",
        "r.yaml:6: policy.layout.vpp = 2: virtual stages need a pipeline; set policy.layout.pp > 1, or vpp: 1",
    ),
    (
        "  hf: no/such/model",
        "  hf: x\n  layout: {pipeline_layout: Et|tL}",
        "r.yaml:6: policy.layout.pipeline_layout = 'Et|tL': has no effect: policy.layout.pp is 1, so that there is one "
        "stage; remove it (default null)",
    ),
    # The learning-rate schedule
    (
        "lr: 3e-4",
        "lr: 3e-4\n    decay_steps: 5",
        "r.yaml:8: policy.optimizer.decay_steps = 5: has no effect: policy.optimizer.schedule is constant and never "
        "decays; remove it (default null)",
    ),
    (
        "lr: 3e-4",
        "lr: 3e-4\n    min_lr: 1e-5",
        "r.yaml:8: policy.optimizer.min_lr = 1e-05: has no effect: policy.optimizer.schedule is constant and never "
        "decays; remove it (default 0.0)",
    ),
    (
        "lr: 3e-4",
        "lr: 3e-4\n    schedule: linear\n    min_lr: 1",
        "r.yaml:9: policy.optimizer.min_lr = 1.0: above the peak policy.optimizer.lr = 0.0003",
    ),
    (
        "lr: 3e-4",
        "lr: 3e-4\n    warmup_steps: 20",
        "r.yaml:8: policy.optimizer.warmup_steps = 20: must be below run.steps x batch.mini_batches = 20 "
        "optimizer steps; set it to at most 19, or raise run.steps",
    ),
    (
        "lr: 3e-4",
        "lr: 3e-4\n    schedule: cosine\n    warmup_steps: 6\n    decay_steps: 5",
        "r.yaml:9: policy.optimizer.warmup_steps = 6: must be below policy.optimizer.decay_steps = 5 optimizer steps; "
        "set it to at most 4, or raise policy.optimizer.decay_steps",
    ),
    # Engine and weight updates
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  engine: external",
        "r.yaml:18: rollout.urls = [] (default): rollout.engine is external and no server is named; list the servers, "
        "e.g. ['http://node7:30000'], or set rollout.engine: managed",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  urls: ['http://a:1']",
        "r.yaml:20: rollout.urls = ['http://a:1']: has no effect: rollout.engine is managed; remove it (default []), "
        "or set rollout.engine: external",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  engine: external\n  urls: ['http://a:1']\n  server:\n    tp: 2",
        "r.yaml:23: rollout.server.tp = 2: has no effect: rollout.engine is external; remove it (default 1)",
    ),
    (
        "max_new_tokens: 16",
        "max_new_tokens: 16\n  sync: {transport: disk, bucket_mb: 64}",
        "r.yaml:20: rollout.sync.bucket_mb = 64: has no effect: rollout.sync.transport is disk; "
        "remove it (default 512)",
    ),
    (
        "max_new_tokens: 16\nreward:",
        "max_new_tokens: 16\nreward:\n  overlong: {buffer: 17}",
        "r.yaml:21: reward.overlong.buffer = 17: above rollout.max_new_tokens = 16",
    ),
    # Rewards and data
    (
        "reward:\n  name: sort_digits",
        "reward:\n  name: 'mine:'",
        "r.yaml:21: reward.name = 'mine:': a function of your own is 'module:function'",
    ),
    (
        "source: sort_digits",
        "source: jsonl",
        "r.yaml:15: data.path = null (default): data.source 'jsonl' needs a file",
    ),
    (
        "source: sort_digits",
        "source: parquet\n  path: x\n  args: {n: 1}",
        "r.yaml:18: data.args = {'n': 1}: has no effect: data.source is 'parquet', not a task generator; "
        "remove it (default {})",
    ),
    (
        "source: sort_digits",
        "source: sort_digits\n  path: x",
        "r.yaml:17: data.path = 'x': has no effect: data.source is the task generator 'sort_digits', not a file; "
        "remove it (default null), or set data.source: jsonl | parquet",
    ),
    (
        "source: sort_digits",
        "source: sort_digits\n  shuffle: false",
        "r.yaml:17: data.shuffle = false: has no effect: data.source is the task generator 'sort_digits', not a file; "
        "remove it (default true), or set data.source: jsonl | parquet",
    ),
    (
        "source: sort_digits",
        "source: jsonl\n  path: x\n  response_key: y",
        "r.yaml:18: data.response_key = 'y': has no effect: the objective 'gspo' samples its responses; "
        "remove it (default 'response')",
    ),
]

SFT_CONTRADICTIONS = [
    (
        "batch:\n",
        "rollout: {max_new_tokens: 3}\nbatch:\n",
        "r.yaml:10: rollout: the objective 'sft' does not use this section; remove it, or set rollout: null",
    ),
    (
        "batch:\n",
        "reward: {name: x}\nbatch:\n",
        "r.yaml:10: reward: the objective 'sft' does not use this section; remove it, or set reward: null",
    ),
    (
        "batch:\n",
        "advantage: {}\nbatch:\n",
        "r.yaml:10: advantage: the objective 'sft' does not use this section; remove it, or set advantage: null",
    ),
    (
        "prompts: 32",
        "prompts: 32\n  samples: 2",
        "r.yaml:12: batch.samples = 2: has no effect: the objective 'sft' reads its responses; remove it (default 1)",
    ),
    (
        "source: jsonl\n  path: answers.jsonl",
        "source: sort_digits\n  response_key: y",
        "r.yaml:14: data.response_key = 'y': has no effect: data.source is the task generator 'sort_digits', not a "
        "file; remove it (default 'response')",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), GSPO_CONTRADICTIONS)
def test_gspo_contradiction(tmp_path, old, new, message):
    assert refusal(write(tmp_path, edit(GSPO, (old, new)))) == message


@pytest.mark.parametrize(("old", "new", "message"), SFT_CONTRADICTIONS)
def test_sft_contradiction(tmp_path, old, new, message):
    assert refusal(write(tmp_path, edit(SFT, (old, new)))) == message


@pytest.mark.parametrize(
    ("urls", "problem"),
    [
        ("[node7:30000]", "'node7:30000' is not http://HOST:PORT; e.g. 'http://node7:30000'"),
        ("['http://node7']", "'http://node7' is not http://HOST:PORT; e.g. 'http://node7:30000'"),
        ("['http://node7:30000/']", "'http://node7:30000/' is not http://HOST:PORT; write 'http://node7:30000'"),
        ("['http://node7:30000/v1']", "'http://node7:30000/v1' is not http://HOST:PORT; e.g. 'http://node7:30000'"),
        ("['http://node7:70000']", "'http://node7:70000' is not http://HOST:PORT; e.g. 'http://node7:30000'"),
        ("['ftp://node7:30000']", "'ftp://node7:30000' is not http://HOST:PORT; e.g. 'http://node7:30000'"),
        ("['http://a:1', 'http://b:1', 'http://a:1']", "'http://a:1' stands there twice; name every server once"),
    ],
)
def test_urls_are_checked_one_by_one(tmp_path, urls, problem):
    message = refusal(write(tmp_path, GSPO), "rollout.engine=external", f"rollout.urls={urls}")
    assert message.startswith("command line: rollout.urls = [") and message.endswith(f"]: {problem}")


def test_urls_of_names_and_addresses_of_both_kinds_are_taken(tmp_path):
    urls = ["http://node-7.cluster:30000", "https://10.0.0.1:443", "http://[::1]:30000"]
    recipe = load_recipe(write(tmp_path, GSPO), ["rollout.engine=external", f"rollout.urls={urls}"])
    assert recipe.rollout.urls == urls


def test_a_replay_tells_what_it_leaves_without_effect_and_refuses_none_of_it(tmp_path):
    set_before = [
        "rollout.max_concurrency=7",
        "rollout.server.port=31000",
        "rollout.top_p=0.9",
        "rollout.temperature=0.7",
        "rollout.dynamic_sampling={}",
        "reward.timeout_s=5",
        "data.args={length: 4}",
    ]
    path = write(tmp_path, GSPO)
    assert idle_in_replay(load_recipe(path, set_before)) == []
    replay = load_recipe(path, [*set_before, "rollout.replay=runs/x/rollouts"])
    assert idle_in_replay(replay) == [
        "data.args",
        "rollout.server.port",
        "rollout.top_p",
        "rollout.dynamic_sampling",
        "rollout.max_concurrency",
        "reward.timeout_s",
    ]
    assert load_recipe(write(tmp_path, effective_yaml(replay), "effective.yaml")) == replay


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "batch.prompts=33",
            "r.yaml:14: batch.mini_batches = 2: does not divide batch.prompts = 33 (batch.prompts: from the command "
            "line); valid: 1, 3, 11, 33",
        ),
        (
            "rollout.max_new_tokens=9000",
            "r.yaml:11: batch.max_tokens = 8192 (default): too small for the longest sequence: data.max_prompt_tokens "
            "+ rollout.max_new_tokens = 64 + 9000, padded to 9064 (rollout.max_new_tokens: from the command line); "
            "raise it to 9064, or lower one of the two",
        ),
        (
            "batch.mini_batches=5",
            "command line: batch.mini_batches = 5: does not divide batch.prompts = 32; valid: 1, 2, 4, 8, 16, 32",
        ),
    ],
)
def test_a_key_that_the_command_line_set_is_named_where_it_takes_part(tmp_path, override, message):
    assert refusal(write(tmp_path, GSPO), override) == message


def test_a_layout_that_the_command_line_changed_is_not_blamed_on_the_file(tmp_path):
    path = write(tmp_path, edit(GSPO, ("  optimizer:", "  layout:\n    ep: 2\n  optimizer:")))
    (problem,) = world_refusal(path, 2, "policy.layout.cp=4")
    assert problem.startswith("command line: policy.layout: tp x pp x cp = 1 x 1 x 4 = 4 does not divide")
    problems = world_refusal(path, 3, "run.workers=3")
    assert problems == [
        "r.yaml:6: policy.layout: ep x etp x pp = 2 x 1 x 1 = 2 does not divide the world of 3 ranks (run.workers: "
        "from the command line); valid: multiples of 2 (run.workers, where `train` itself starts the ranks)"
    ]


def test_a_reason_that_names_the_key_is_not_named_twice():
    sources = {"": Source("r.yaml"), "reward.name": Source("r.yaml", 7)}
    twice = Problem(key="reward.name", reason="reward.name = 'x': no such reward")
    assert twice.describe(sources) == "r.yaml:7: reward.name = 'x': no such reward"
    other = Problem(key="base", value="r.yaml", reason="bases form a cycle")
    assert other.describe({"base": Source("r.yaml", 1)}) == "r.yaml:1: base = 'r.yaml': bases form a cycle"


def test_recorded_rollouts_need_no_server(tmp_path):
    recipe = load_recipe(write(tmp_path, GSPO), ["rollout.engine=external", "rollout.replay=runs/y/rollouts"])
    assert recipe.rollout.urls == []


def test_longest_sequence_is_padded_to_the_layout(tmp_path):
    # 64 + 16 = 80 tokens; 2 x cp x tp = 24 makes 96 of them.
    path = write(tmp_path, GSPO)
    layout = ["policy.layout.tp=3", "policy.layout.cp=4"]
    load_recipe(path, [*layout, "batch.max_tokens=96"])
    assert "padded to 96" in refusal(path, *layout, "batch.max_tokens=95")


def world_refusal(path, world_size: int, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as info:
        validate(load_recipe(path, overrides), world_size)
    return str(info.value).replace(f"{path.parent}/", "").splitlines()


def test_layout_must_tile_the_world(tmp_path):
    path = write(tmp_path, edit(GSPO, ("  optimizer:", "  layout:\n    tp: 2\n    pp: 3\n  optimizer:")))
    assert world_refusal(path, 8) == [
        "r.yaml:6: policy.layout: tp x pp x cp = 2 x 3 x 1 = 6 does not divide the world of 8 ranks; "
        "valid: multiples of 6 (run.workers, where `train` itself starts the ranks)",
        "r.yaml:6: policy.layout: ep x etp x pp = 1 x 1 x 3 = 3 does not divide the world of 8 ranks; "
        "valid: multiples of 6 (run.workers, where `train` itself starts the ranks)",
    ]
    validate(load_recipe(path), 12)


def test_expert_layout_must_tile_the_world(tmp_path):
    # The dense layout fits 4 ranks, the expert layout needs a multiple of 3.
    overrides = ["policy.layout.tp=2", "policy.layout.ep=3"]
    assert world_refusal(write(tmp_path, GSPO), 4, *overrides) == [
        "command line: policy.layout: ep x etp x pp = 3 x 1 x 1 = 3 does not divide the world of 4 ranks; "
        "valid: multiples of 6 (run.workers, where `train` itself starts the ranks)",
    ]


DENSE = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
MOE = {**DENSE, "num_experts": 8, "moe_intermediate_size": 48}


def model_recipe(tmp_path, model: dict) -> list[str]:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(model))
    return [f"policy.hf={tmp_path}/hf"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp: 3", "policy.layout.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8"),
        ("ep: 3", "policy.layout.ep = 3: does not divide the model's number of experts = 8; valid: 1, 2, 4, 8"),
        (
            "etp: 5",
            "policy.layout.etp = 5: does not divide the model's moe_intermediate_size = 48; "
            "valid: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
        ),
        (
            "{pp: 2, vpp: 2}",
            "policy.layout.pp = 2: pp x vpp = 2 x 2 does not divide the model's num_hidden_layers = 6; "
            "valid: 1, 2, 3, 6; or cut unevenly with policy.layout.pipeline_layout",
        ),
    ],
)
def test_layout_must_fit_the_moe_model(tmp_path, layout, message):
    path = write(tmp_path, edit(GSPO, ("  optimizer:", f"  layout:\n    {layout}\n  optimizer:")))
    assert refusal(path, *model_recipe(tmp_path, MOE)) == f"r.yaml:7: {message}"


def test_layout_must_fit_the_dense_model(tmp_path):
    path, model = write(tmp_path, GSPO), model_recipe(tmp_path, {**DENSE, "intermediate_size": 94})
    assert refusal(path, *model, "policy.layout.ep=2", "policy.layout.etp=2", "policy.layout.tp=4").splitlines() == [
        "command line: policy.layout.ep = 2: the model is dense: it has no experts; valid: 1",
        "command line: policy.layout.etp = 2: the model is dense: it has no experts; valid: 1",
        "command line: policy.layout.tp = 4: does not divide the model's intermediate_size = 94; valid: 1, 2, 47, 94",
    ]


def test_a_dense_model_has_no_routing_to_watch(tmp_path):
    path, model = write(tmp_path, GSPO), model_recipe(tmp_path, DENSE)
    assert refusal(path, *model, "observe.routing_changes=true") == (
        "command line: observe.routing_changes = true: the model is dense: it has no experts that could change; "
        "remove it"
    )
    assert load_recipe(path, model).observe.routing_changes is False


def test_key_value_heads_are_cut_or_replicated_evenly(tmp_path):
    path, model = write(tmp_path, GSPO), model_recipe(tmp_path, {**MOE, "num_attention_heads": 12})
    load_recipe(path, [*model, "policy.layout.tp=4"])  # 2 groups on 4 ranks: each is held twice
    assert refusal(path, *model, "policy.layout.tp=3") == (
        "command line: policy.layout.tp = 3: neither divides nor is a multiple of the model's "
        "num_key_value_heads = 2; valid: 1, 2"
    )


def test_uneven_pipeline_is_left_to_its_layout(tmp_path):
    overrides = ["policy.layout.pp=4", "policy.layout.pipeline_layout='Et|tt|tt|tL'"]
    load_recipe(write(tmp_path, GSPO), [*model_recipe(tmp_path, MOE), *overrides])


def test_broken_model_config_is_named(tmp_path):
    path, model = write(tmp_path, GSPO), model_recipe(tmp_path, MOE)
    (tmp_path / "hf" / "config.json").write_text("{")
    assert refusal(path, *model).startswith("command line: policy.hf = 'hf': hf/config.json is not JSON: ")


def test_an_objective_brings_what_its_paper_has_in_other_sections(tmp_path):
    def loaded(name: str, *overrides: str):
        return load_recipe(
            write(tmp_path, edit(GSPO, ("advantage: {}\n", ""))), [f"objective={{name: {name}}}", *overrides]
        )

    assert loaded("grpo").advantage == GroupConfig(normalize_std=True)
    assert loaded("dr_grpo").advantage == GroupConfig(normalize_std=False)
    assert loaded("dr_grpo", "advantage.normalize_std=true").advantage == GroupConfig(normalize_std=True)
    assert loaded("dr_grpo", "advantage.estimator=leave_one_out").advantage == LeaveOneOutConfig()
    assert loaded("ppo").advantage == GaeConfig() and loaded("ppo").critic == CriticConfig()
    assert loaded("ppo", "advantage.lam=1", "critic.clip=null").critic == CriticConfig(clip=None)


@pytest.mark.parametrize(
    "override", ["objective.kl.reference", "objective={name: ppo}\ncritic.hf"], ids=["reference", "critic"]
)
def test_models_beside_the_policy_must_have_its_vocabulary(tmp_path, override):
    for name, size in (("policy", 260), ("other", 268)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"vocab_size": {size}}}')
    *words, key = override.splitlines() if "\n" in override else ["objective.kl.coef=0.1", override]
    words += [f"policy.hf={tmp_path}/policy", f"{key}={tmp_path}/other"]
    assert "its vocab_size is 268, that of policy.hf 260" in refusal(write(tmp_path, GSPO), *words)


def test_a_critics_clip_does_nothing_where_values_are_the_old_ones(tmp_path):
    words = ["objective={name: ppo}", "batch.mini_batches=1", "critic.clip=0.3"]
    assert "critic.clip = 0.3: has no effect: batch.mini_batches is 1" in refusal(write(tmp_path, GSPO), *words)

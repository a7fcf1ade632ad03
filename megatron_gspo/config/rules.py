"""Contradictions inside a recipe. Each rule is a pure function from a recipe to the problems that it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from omegaconf import MISSING

from megatron_gspo.config.advantage import AdvantageConfig, GaeConfig, GroupConfig
from megatron_gspo.config.correction import CorrectionConfig, Level
from megatron_gspo.config.objectives import Divergence, DppoConfig, PolicyObjective, PpoConfig
from megatron_gspo.config.problem import Problem, divisors, show
from megatron_gspo.config.reflect import keys, leaves, value_at
from megatron_gspo.config.schema import (
    CriticConfig,
    Engine,
    Mtp,
    Recipe,
    RewardConfig,
    RolloutConfig,
    Schedule,
    Transport,
)

# Sections that only some objectives use; `ObjectiveConfig.sections` says which.
OPTIONAL_SECTIONS = {
    "advantage": AdvantageConfig,
    "rollout": RolloutConfig,
    "reward": RewardConfig,
    "correction": CorrectionConfig,
    "critic": CriticConfig,
}
FILE_SOURCES = ("jsonl", "parquet")
MAX_RESPONSES = 2**31


def objective_sections(recipe: Recipe) -> Iterator[Problem]:
    """An objective has the sections that it needs, and none that it cannot use."""
    name, used, usable = recipe.objective.name, recipe.objective.sections, recipe.objective.may_have
    for section in OPTIONAL_SECTIONS:
        present = getattr(recipe, section) is not None
        if section in used and not present:
            reason = f"required by the objective '{name}', but not set"
            yield Problem(key=section, reason=reason, hint=_how_to_add(section))
        if section not in used | usable and present:
            reason = f"the objective '{name}' does not use this section"
            yield Problem(key=section, reason=reason, hint=f"remove it, or set {section}: null")


def samples(recipe: Recipe) -> Iterator[Problem]:
    if "rollout" not in recipe.objective.sections:
        yield from _unused(recipe, "batch.samples", f"the objective '{recipe.objective.name}' reads its responses")


def batch_size(recipe: Recipe) -> Iterator[Problem]:
    responses = recipe.batch.prompts * recipe.batch.samples
    if responses > MAX_RESPONSES:
        reason = f"with batch.samples = {recipe.batch.samples}, {responses} responses a step: more than {MAX_RESPONSES}"
        yield _refuse(recipe, "batch.prompts", reason, also=("batch.samples",))


def group_size(recipe: Recipe) -> Iterator[Problem]:
    if recipe.advantage is None or "advantage" not in recipe.objective.sections:
        return
    if not isinstance(recipe.advantage, GaeConfig) and recipe.batch.samples < 2:
        reason = f"the advantage estimator '{recipe.advantage.estimator}' compares responses to one prompt: at least 2"
        yield _refuse(recipe, "batch.samples", reason)


def advantage(recipe: Recipe) -> Iterator[Problem]:
    """An estimator whose advantages the objective can use, a critic exactly for GAE, and no eps without a division."""
    objective, section = recipe.objective, recipe.advantage
    if not isinstance(objective, PolicyObjective) or section is None:
        return
    gae = isinstance(section, GaeConfig)
    if gae and not objective.token_advantages:
        reason = f"gives every token its own advantage, and the objective '{objective.name}' takes one per response"
        yield _refuse(recipe, "advantage.estimator", reason, "valid: group, leave_one_out; or another objective")
    elif gae and recipe.critic is None:
        yield Problem(key="critic", reason="required by advantage.estimator 'gae'", hint=_how_to_add("critic"))
    if isinstance(objective, PpoConfig) and not gae:
        hint = "set advantage.estimator: gae, or take objective.name: grpo"
        yield _refuse(recipe, "advantage.estimator", "the objective 'ppo' takes its advantages from a critic", hint)
    elif recipe.critic is not None and gae and recipe.batch.mini_batches == 1:
        yield from _unused(recipe, "critic.clip", "batch.mini_batches is 1, so that values are the old values")
    elif recipe.critic is not None and not gae:
        reason = f"advantage.estimator '{section.estimator}' uses no critic"
        yield Problem(key="critic", reason=reason, hint="remove it, or set advantage.estimator: gae")
    if isinstance(section, GroupConfig) and not section.normalize_std:
        yield from _unused(recipe, "advantage.eps", "advantages are not divided by a standard deviation")


def on_policy_check(recipe: Recipe) -> Iterator[Problem]:
    objective = recipe.objective
    if not isinstance(objective, PolicyObjective):
        return
    path = "objective.on_policy_check"
    if objective.anchored_to_rollout:
        yield from _unused(recipe, path, f"the objective '{objective.name}' compares with the rollout engine's policy")
    elif recipe.batch.mini_batches == 1:
        yield from _unused(recipe, path, "batch.mini_batches is 1, so that every ratio is 1")


def divergence(recipe: Recipe) -> Iterator[Problem]:
    objective = recipe.objective
    if isinstance(objective, DppoConfig) and objective.divergence is Divergence.tv and (objective.delta or 0) >= 1:
        reason = "a total variation (objective.divergence: tv) is at most 1, so that nothing would be masked"
        yield _refuse(recipe, "objective.delta", reason, "set it below 1 (paper: 0.2)", also=("objective.divergence",))


def correction(recipe: Recipe) -> Iterator[Problem]:
    section = recipe.correction
    if section is None:
        return
    if not any((section.truncate, section.icepop, section.sequence_mask, section.opsm)):
        yield Problem(key="correction", reason="corrects nothing", hint="add truncate, icepop, sequence_mask or opsm")
    if recipe.objective.name == "gmpo":
        for name in ("truncate", "icepop"):
            weight = getattr(section, name)
            if weight and weight.level is Level.token:
                reason = "the objective 'gmpo' has one term per response, whose tokens cannot be weighed one by one"
                yield _refuse(recipe, f"correction.{name}.level", reason, "valid: sequence, sequence_product")
    if section.truncate and section.icepop:
        reason = "both weigh terms by pi_old / pi_rollout"
        yield Problem(key="correction.truncate", reason=f"together with correction.icepop, {reason}", hint="choose one")


def mini_batches(recipe: Recipe) -> Iterator[Problem]:
    prompts = recipe.batch.prompts
    if prompts % recipe.batch.mini_batches:
        reason = f"does not divide batch.prompts = {prompts}"
        yield _refuse(recipe, "batch.mini_batches", reason, divisors(prompts), also=("batch.prompts",))


def routing_changes(recipe: Recipe) -> Iterator[Problem]:
    """Old and new policy are compared where the old one has been scored and the new one has moved."""
    path, objective = "observe.routing_changes", recipe.objective
    if not isinstance(objective, PolicyObjective):
        yield from _unused(recipe, path, f"the objective '{objective.name}' has no old policy")
    elif objective.anchored_to_rollout:
        yield from _unused(recipe, path, f"the old policy of '{objective.name}' is the rollout engine's")
    elif recipe.batch.mini_batches == 1:
        because = "batch.mini_batches is 1, so that the policy is its own old policy"
        yield from _unused(recipe, path, because, "or raise batch.mini_batches")


def micro_batch_room(recipe: Recipe) -> Iterator[Problem]:
    """The longest sequence that sampling can produce fits into one micro-batch, padding included."""
    if recipe.rollout is None:
        return
    layout, longest = recipe.policy.layout, recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
    multiple = 2 * layout.cp * layout.tp
    padded = -(-longest // multiple) * multiple
    if padded > recipe.batch.max_tokens:
        reason = (
            f"too small for the longest sequence: data.max_prompt_tokens + rollout.max_new_tokens = "
            f"{recipe.data.max_prompt_tokens} + {recipe.rollout.max_new_tokens}, padded to {padded}"
        )
        also = ("data.max_prompt_tokens", "rollout.max_new_tokens", "policy.layout.cp", "policy.layout.tp")
        yield _refuse(recipe, "batch.max_tokens", reason, f"raise it to {padded}, or lower one of the two", also=also)


def pipeline(recipe: Recipe) -> Iterator[Problem]:
    layout = recipe.policy.layout
    if layout.pp > 1:
        return
    if layout.vpp > 1:
        yield _refuse(
            recipe, "policy.layout.vpp", "virtual stages need a pipeline", "set policy.layout.pp > 1, or vpp: 1"
        )
    yield from _unused(recipe, "policy.layout.pipeline_layout", "policy.layout.pp is 1, so that there is one stage")


def mtp(recipe: Recipe) -> Iterator[Problem]:
    if recipe.policy.mtp is not Mtp.carry:
        return
    path, name = "policy.layout.pipeline_layout", "mtp_loss_scaling_factor"
    if "m" in (recipe.policy.layout.pipeline_layout or ""):
        yield _refuse(recipe, path, "has stages for multi-token-prediction layers (m), and policy.mtp is carry")
    if name in recipe.policy.megatron:
        reason = "has no effect: policy.mtp is carry, so that no multi-token-prediction layer trains"
        value, hint = recipe.policy.megatron[name], "remove it, or set policy.mtp: train"
        yield Problem(key=f"policy.megatron.{name}", value=value, reason=reason, hint=hint)


def schedule(recipe: Recipe) -> Iterator[Problem]:
    section, path = recipe.policy.optimizer, "policy.optimizer"
    total = recipe.run.steps * recipe.batch.mini_batches
    if section.schedule is Schedule.constant:
        for name in ("decay_steps", "min_lr"):
            yield from _unused(recipe, f"{path}.{name}", f"{path}.schedule is constant and never decays")
    elif section.min_lr > section.lr:
        yield _refuse(recipe, f"{path}.min_lr", f"above the peak {path}.lr = {section.lr}")
    end = total if section.decay_steps is None else section.decay_steps
    if section.warmup_steps >= end:
        what = (
            f"run.steps x batch.mini_batches = {total}"
            if section.decay_steps is None
            else f"{path}.decay_steps = {end}"
        )
        more = "run.steps" if section.decay_steps is None else f"{path}.decay_steps"
        hint = f"set it to at most {end - 1}, or raise {more}"
        also = ("run.steps", "batch.mini_batches", f"{path}.decay_steps")
        yield _refuse(recipe, f"{path}.warmup_steps", f"must be below {what} optimizer steps", hint, also=also)


def critic(recipe: Recipe) -> Iterator[Problem]:
    if recipe.critic is None or recipe.critic.lr is None:
        return
    floor = recipe.policy.optimizer.min_lr
    if recipe.policy.optimizer.schedule is not Schedule.constant and recipe.critic.lr < floor:
        reason = f"below policy.optimizer.min_lr = {floor}, where the critic's rate ends too"
        yield _refuse(recipe, "critic.lr", reason, "raise it, or lower policy.optimizer.min_lr")


def engine(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout is None:
        return
    because = f"rollout.engine is {recipe.rollout.engine}"
    if recipe.rollout.engine is Engine.managed:
        yield from _unused(recipe, "rollout.urls", because, "or set rollout.engine: external")
        return
    for path, _, _ in leaves(recipe.rollout.server, "rollout.server"):
        yield from _unused(recipe, path, because)
    if not recipe.rollout.urls and recipe.rollout.replay is None:
        hint = "list the servers, e.g. ['http://node7:30000'], or set rollout.engine: managed"
        yield _refuse(recipe, "rollout.urls", f"{because} and no server is named", hint)
    yield from _urls(recipe, recipe.rollout.urls)


def _urls(recipe: Recipe, urls: Sequence[str]) -> Iterator[Problem]:
    """Each is http(s)://HOST:PORT and nothing more, and they differ."""
    for url in urls:
        if not _is_server(url):
            reason = f"{show(url)} is not http://HOST:PORT"
            hint = f"write '{url.rstrip('/')}'" if _is_server(url.rstrip("/")) else "e.g. 'http://node7:30000'"
            yield _refuse(recipe, "rollout.urls", reason, hint)
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield _refuse(recipe, "rollout.urls", f"{show(url)} stands there twice", "name every server once")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # a port that is no number, or a broken IPv6 address
        return False
    return bool(whole) and url == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc


def transport(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout and recipe.rollout.sync.transport is Transport.disk:
        yield from _unused(recipe, "rollout.sync.bucket_mb", "rollout.sync.transport is disk")


def sampling(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout and recipe.rollout.top_k == 0:
        yield _refuse(recipe, "rollout.top_k", "must be -1 (off) or at least 1")


def dynamic_sampling(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rollout and recipe.rollout.dynamic_sampling and isinstance(recipe.advantage, GaeConfig):
        reason = "advantage.estimator 'gae' learns from equal rewards too"
        yield Problem(key="rollout.dynamic_sampling", reason=reason, hint="remove it")


def overlong(recipe: Recipe) -> Iterator[Problem]:
    if recipe.reward and recipe.reward.overlong and recipe.rollout:
        longest = recipe.rollout.max_new_tokens
        if recipe.reward.overlong.buffer > longest:
            yield _refuse(recipe, "reward.overlong.buffer", f"above rollout.max_new_tokens = {longest}")


def reward_name(recipe: Recipe) -> Iterator[Problem]:
    if recipe.reward and ":" in recipe.reward.name and not all(recipe.reward.name.split(":", 1)):
        yield _refuse(recipe, "reward.name", "a function of your own is 'module:function'")


def data_source(recipe: Recipe) -> Iterator[Problem]:
    source = recipe.data.source
    if source in FILE_SOURCES:
        yield from _unused(recipe, "data.args", f"data.source is '{source}', not a task generator")
        if recipe.data.path is None:
            yield _refuse(recipe, "data.path", f"data.source '{source}' needs a file")
        return
    for name in ("path", "prompt_key", "shuffle"):
        because = f"data.source is the task generator '{source}', not a file"
        yield from _unused(recipe, f"data.{name}", because, f"or set data.source: {' | '.join(FILE_SOURCES)}")


def response_key(recipe: Recipe) -> Iterator[Problem]:
    if "rollout" in recipe.objective.sections:
        yield from _unused(
            recipe, "data.response_key", f"the objective '{recipe.objective.name}' samples its responses"
        )
    elif recipe.data.source not in FILE_SOURCES:
        because = f"data.source is the task generator '{recipe.data.source}', not a file"
        yield from _unused(recipe, "data.response_key", because)


RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    objective_sections,
    samples,
    batch_size,
    group_size,
    advantage,
    on_policy_check,
    divergence,
    correction,
    mini_batches,
    routing_changes,
    micro_batch_room,
    pipeline,
    mtp,
    schedule,
    critic,
    engine,
    transport,
    sampling,
    dynamic_sampling,
    overlong,
    reward_name,
    data_source,
    response_key,
)


def _how_to_add(section: str) -> str:
    required = [key.name for key in keys(OPTIONAL_SECTIONS[section]).values() if key.default == MISSING]
    return f"set {', '.join(f'{section}.{name}' for name in required)}" if required else f"add `{section}: {{}}`"


def _refuse(recipe: Recipe, path: str, reason: str, hint: str = "", also: tuple[str, ...] = ()) -> Problem:
    return Problem(key=path, value=value_at(recipe, path), reason=reason, hint=hint, also=also)


def _unused(recipe: Recipe, path: str, because: str, remedy: str = "") -> Iterator[Problem]:
    # Only a value that differs from the default was meant to do something; the effective configuration spells all of
    # them out and must stay loadable.
    section, _, name = path.rpartition(".")
    default = keys(type(value_at(recipe, section)))[name].default
    if value_at(recipe, path) != default:
        hint = f"remove it (default {show(default)})" + (f", {remedy}" if remedy else "")
        yield _refuse(recipe, path, f"has no effect: {because}", hint)

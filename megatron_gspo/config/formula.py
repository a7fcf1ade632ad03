"""The objective as a formula with the recipe's numbers in it, for people to read before they spend GPU hours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron_gspo.config.advantage import AdvantageConfig, GaeConfig, GroupConfig
from megatron_gspo.config.correction import CorrectionConfig, Level
from megatron_gspo.config.objectives import Aggregation, PolicyObjective
from megatron_gspo.config.schema import BatchConfig, CriticConfig, Recipe, RolloutConfig

# Of a token's term: (title, J_it, lines that define what J_it is made of).
Term = tuple[str, str, list[str]]


def objective_formula(recipe: Recipe) -> str:
    """The objective of `recipe` in Unicode text, several lines without a trailing newline."""
    if not isinstance(recipe.objective, PolicyObjective):
        return _sft(recipe)
    # Weights that differ along a response weigh its tokens one by one, which is GSPO-token's gradient.
    name = "gspo_token" if recipe.objective.name == "gspo" and recipe.correction else recipe.objective.name
    title, term, definitions = FORMULAS[name](recipe.objective)
    lines = [f"J(θ) = {_sum(recipe)} {_weighted(recipe, term)}"]
    lines += [*definitions, *_correction(recipe.correction), *_reference(recipe), *_advantage(recipe, term)]
    rollout, batch = cast(RolloutConfig, recipe.rollout), recipe.batch
    where = [
        f"N = {batch.prompts * batch.samples // batch.mini_batches} sequences per optimizer step: "
        f"{batch.prompts} prompts x {batch.samples} samples, {_cut(batch)}",
        f"|yᵢ| = response tokens that train{_aggregation_note(recipe)}",
        f"π = softmax(logits / {rollout.temperature:g}){_truncation(rollout)}",
        f"π_old = {_old_policy(recipe)}",
    ]
    return f"{title}, maximised:\n\n{_block(lines)}\n\n{_block(where)}{_critic(recipe)}"


def _gspo(o: Any) -> Term:
    definitions = ["sᵢ = exp( 1/|yᵢ| Σₜ log( π_θ(yᵢₜ) / π_old(yᵢₜ) ) )"]
    return "GSPO", _clipped("sᵢ", "Âᵢ", o), definitions


def _gspo_token(o: Any) -> Term:
    definitions = [
        "sᵢₜ = sg[sᵢ] π_θ(yᵢₜ) / sg[π_θ(yᵢₜ)]",
        "sᵢ = exp( 1/|yᵢ| Σₜ log( π_θ(yᵢₜ) / π_old(yᵢₜ) ) )",
    ]
    return "GSPO-token", _clipped("sᵢₜ", "Âᵢₜ", o), definitions


def _clipped_tokens(title: str) -> Callable[[Any], Term]:
    return lambda o: (title, _clipped("rᵢₜ", "Âᵢₜ", o), [_RATIO])


def _sapo(o: Any) -> Term:
    definitions = [
        "f(r) = 4/τ sigmoid( τ (r - 1) )",
        f"τ = {o.tau_pos:g} where Â > 0, else {o.tau_neg:g}",
        _RATIO,
    ]
    return "SAPO", "f(rᵢₜ) Âᵢₜ", definitions


def _cispo(o: Any) -> Term:
    return "CISPO", f"sg[ min(rᵢₜ, {1 + o.clip_high:g}) ] Âᵢₜ log π_θ(yᵢₜ)", [_RATIO]


def _gmpo(o: Any) -> Term:
    definitions = [
        "gᵢ = exp( 1/|yᵢ| Σₜ cᵢₜ )",
        f"cᵢₜ = min(log rᵢₜ, {o.clip_high:g}) where Âᵢ > 0, max(log rᵢₜ, {-o.clip_low:g}) where Âᵢ < 0",
        _RATIO,
    ]
    return "GMPO", "gᵢ Âᵢ", definitions


def _vespo(o: Any) -> Term:
    definitions = [
        f"φ(W) = W^{o.k_pos:g} exp({o.lambda_pos:g} (1 - W)) where Âᵢ >= 0, "
        f"W^{o.k_neg:g} exp({o.lambda_neg:g} (1 - W)) where Âᵢ < 0",
        "Wᵢ = Πₜ π_θ(yᵢₜ) / π_old(yᵢₜ)",
    ]
    return "VESPO", "sg[ φ(Wᵢ) ] Âᵢ log π_θ(yᵢₜ)", definitions


def _dppo(o: Any) -> Term:
    tv, kl = "|π_θ(yᵢₜ) - π_old(yᵢₜ)|", "KL( {π_old(yᵢₜ), rest} || {π_θ(yᵢₜ), rest} )"
    definitions = [
        f"Mᵢₜ = 0 where D > {o.threshold:g} and (Âᵢₜ > 0, rᵢₜ > 1 or Âᵢₜ < 0, rᵢₜ < 1), else 1",
        f"D = {tv if o.divergence == 'tv' else kl}",
        _RATIO,
    ]
    return "DPPO", f"sg[ Mᵢₜ min(rᵢₜ, {o.max_ratio:g}) ] Âᵢₜ log π_θ(yᵢₜ)", definitions


def _minirl(o: Any) -> Term:
    definitions = [
        f"Mᵢₜ = 0 where Âᵢₜ > 0, rᵢₜ > {1 + o.clip_high:g} or Âᵢₜ < 0, rᵢₜ < {1 - o.clip_low:g}, else 1",
        _RATIO,
    ]
    return "MiniRL", f"sg[ Mᵢₜ min(π_θ / π_rollout, {o.max_weight:g}) ] Âᵢₜ log π_θ(yᵢₜ)", definitions


_RATIO = "rᵢₜ = π_θ(yᵢₜ) / π_old(yᵢₜ)"

# One for every policy objective.
FORMULAS: dict[str, Callable[[Any], Term]] = {
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "grpo": _clipped_tokens("GRPO"),
    "ppo": _clipped_tokens("PPO"),
    "dapo": _clipped_tokens("DAPO"),
    "dr_grpo": _clipped_tokens("Dr.GRPO"),
    "sapo": _sapo,
    "cispo": _cispo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "dppo": _dppo,
    "minirl": _minirl,
}


def _clipped(ratio: str, advantage: str, o: Any) -> str:
    return f"min( {ratio} {advantage} , clip({ratio}, 1 - {o.clip_low:g}, 1 + {o.clip_high:g}) {advantage} )"


def _sum(recipe: Recipe) -> str:
    match aggregation_of(recipe):
        case Aggregation.sequence_mean:
            # Terms without t are the same for all tokens: their mean over tokens is the term itself.
            objective = cast(PolicyObjective, recipe.objective)
            plain = objective.name in ("gspo", "gmpo") and not recipe.correction and not objective.kl
            return "1/N Σᵢ" if plain else "1/N Σᵢ 1/|yᵢ| Σₜ"
        case Aggregation.token_mean:
            return "1/T Σᵢ Σₜ"
        case Aggregation.sequence_sum:
            return "1/N Σᵢ Σₜ"
        case Aggregation.constant:
            return f"1/N Σᵢ 1/{cast(RolloutConfig, recipe.rollout).max_new_tokens} Σₜ"


def aggregation_of(recipe: Recipe) -> Aggregation:
    """How the terms of tokens add up in the objective of `recipe`."""
    return getattr(recipe.objective, "aggregation", Aggregation.sequence_mean)


def _aggregation_note(recipe: Recipe) -> str:
    if aggregation_of(recipe) is Aggregation.token_mean:
        return "; T = Σᵢ |yᵢ| over the whole mini-batch"
    if aggregation_of(recipe) is Aggregation.sequence_mean:
        return "; every sequence weighs 1/N, whatever its length"
    return ""


def _weighted(recipe: Recipe, term: str) -> str:
    if recipe.correction:
        term = f"ωᵢₜ {term}"
    kl = cast(PolicyObjective, recipe.objective).kl
    return f"[ {term} - {kl.coef:g} KLᵢₜ ]" if kl else term


def _correction(section: CorrectionConfig | None) -> list[str]:
    if section is None:
        return []
    level = {
        Level.token: "wᵢₜ = π_old(yᵢₜ) / π_rollout(yᵢₜ)",
        Level.sequence: "wᵢ = exp( 1/|yᵢ| Σₜ log( π_old(yᵢₜ) / π_rollout(yᵢₜ) ) )",
        Level.sequence_product: "wᵢ = Πₜ π_old(yᵢₜ) / π_rollout(yᵢₜ)",
    }
    factors, lines = [], []
    if section.truncate:
        factors.append(f"min(w, {section.truncate.high:g})")
        lines.append(level[section.truncate.level])
    if section.icepop:
        factors.append(f"(w where {section.icepop.low:g} <= w <= {section.icepop.high:g}, else 0)")
        lines.append(level[section.icepop.level])
    if section.sequence_mask:
        mask = section.sequence_mask
        factors.append(f"1[ {mask.low:g} <= exp(mean of log(π_old / π_rollout)) <= {mask.high:g} ]")
    if section.opsm:
        factors.append(f"1[ Â >= 0 or mean of log(π_rollout / π_θ) <= {section.opsm.delta:g} ]")
    return [f"ωᵢₜ = sg[ {' '.join(factors)} ]", *lines]


def _reference(recipe: Recipe) -> list[str]:
    kl = cast(PolicyObjective, recipe.objective).kl
    if kl is None:
        return []
    estimates = {"k1": "d", "k2": "d² / 2", "k3": "exp(-d) - 1 + d"}
    return [
        f"KLᵢₜ = {estimates[kl.estimator]},  d = log( π_θ(yᵢₜ) / π_ref(yᵢₜ) )",
        f"π_ref = {kl.reference or recipe.policy.hf}, fixed",
    ]


def _advantage(recipe: Recipe, term: str) -> list[str]:
    section = cast(AdvantageConfig, recipe.advantage)
    if isinstance(section, GaeConfig):
        whitened = ", then shifted and scaled to mean 0, std 1 over the batch's tokens" if section.whiten else ""
        return [
            f"Âᵢₜ = Σₖ ({section.gamma:g} · {section.lam:g})ᵏ δᵢ,ₜ₊ₖ{whitened}",
            f"δᵢₜ = rewardᵢₜ + {section.gamma:g} V(yᵢ,≤ₜ) - V(yᵢ,<ₜ);  rewardᵢₜ = rᵢ at the last token, else 0",
        ]
    group = f"r₁ … r_G of the G = {recipe.batch.samples} responses to one prompt"
    name = "Âᵢₜ" if "Âᵢₜ" in term else "Âᵢ"
    if isinstance(section, GroupConfig) and section.normalize_std:
        return [f"{name} = (rᵢ - mean(r₁ … r_G)) / (std(r₁ … r_G) + {section.eps:g}), std over G - 1;  {group}"]
    if isinstance(section, GroupConfig):
        return [f"{name} = rᵢ - mean(r₁ … r_G);  {group}"]
    return [f"{name} = rᵢ - mean of the other r;  {group}"]


def _critic(recipe: Recipe) -> str:
    if recipe.critic is None:
        return ""
    critic: CriticConfig = recipe.critic
    clip = f"max( (V - R)², (clip(V, V_old ± {critic.clip:g}) - R)² )" if critic.clip else "(V - R)²"
    lines = [f"L(φ) = 1/T Σᵢ Σₜ ½ {clip}", "R = Âᵢₜ + V_old before any shift and scale"]
    return f"\n\nCritic, minimised:\n\n{_block(lines)}"


def _sft(recipe: Recipe) -> str:
    batch = recipe.batch
    sequences = batch.prompts // batch.mini_batches
    where = [
        f"N = {sequences} sequences per optimizer step: {batch.prompts} prompts, {_cut(batch)}",
        "T = Σᵢ |yᵢ|, all response tokens of the mini-batch; every token weighs 1/T",
        "π = softmax(logits)",
    ]
    loss = ["L(θ) = - 1/T Σᵢ Σₜ log π_θ(yᵢₜ)"]
    return f"Cross-entropy on given responses, minimised:\n\n{_block(loss)}\n\n{_block(where)}"


def _block(lines: list[str]) -> str:
    """Indented `name = value` lines, aligned at their first equals sign."""
    width = max(len(line.partition(" = ")[0]) for line in lines)
    parts = (line.partition(" = ") for line in lines)
    return "\n".join(f"  {name.ljust(width)} = {value}" for name, _, value in parts)


def _cut(batch: BatchConfig) -> str:
    return "1 mini-batch" if batch.mini_batches == 1 else f"{batch.mini_batches} mini-batches"


def _old_policy(recipe: Recipe) -> str:
    mini_batches = recipe.batch.mini_batches
    if cast(PolicyObjective, recipe.objective).anchored_to_rollout:
        return "π_rollout, the rollout engine's policy; no scoring pass"
    if mini_batches == 1:
        return "sg(π_θ), as there is one mini-batch a step; no scoring pass, and every ratio is 1"
    return f"the trainer's weights before the step; scored once, for all {mini_batches} mini-batches"


def _truncation(rollout: RolloutConfig) -> str:
    cuts = [f"top_p {rollout.top_p:g}"] * (rollout.top_p < 1) + [f"top_k {rollout.top_k}"] * (rollout.top_k > 0)
    return f"; responses are sampled with {' and '.join(cuts)}, which the ratios do not know of" if cuts else ""

"""From finished rollouts to rows with advantages: the steps between the queue and the tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from agl import plugins
from agl.continuation import Context
from agl.credit import Baseline, agent_rewards
from agl.errors import CaptureError, ConfigError, NonFiniteReward
from agl.protocols import Algorithm
from agl.records import Outcome, Reward, Rollout, Row, Transition, total_tokens
from agl.selection import Selection
from agl.transitions import build_rows, causes
from agl_trainer.algorithms import needs
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights
from agl_trainer.config import TrainConfig

PER_CALL = ("turn", "state")
"""Baselines that compare single calls, not whole rollouts."""
STATE_WEIGHT = 1.0
"""Of equal states beside whole rollouts (GiGPO's omega), unless ``baseline={"state": w}`` sets another."""


async def score(rollout: Rollout) -> Rollout:
    """The rollout with the reward that all reward hooks agree on; None stays None (unscored).

    A reward that is not finite is none, and the rollout tells so as its error.
    """
    if rollout.outcome != "ok":
        return replace(rollout, returned=None)
    try:
        parts = await plugins.compute_reward(rollout)
    except NonFiniteReward as error:
        return replace(rollout, returned=None, error=str(error))
    agents = rollout.returned.agents if rollout.returned else {}
    if not parts and not agents:
        return replace(rollout, returned=None)
    return replace(rollout, returned=Reward(parts=parts, agents=agents))


def broken_rewards(rollouts: Sequence[Rollout]) -> list[str]:
    """What is wrong with the rewards of rollouts that ended well and have a reward that is not finite."""
    return [f"rollout {r.id!r}: {r.error}" for r in rollouts if r.outcome == "ok" and r.returned is None and r.error]


@dataclass(frozen=True, slots=True)
class Scored:
    """One scored rollout and those of its transitions that are trained, each with its credit."""

    rollout: Rollout
    transitions: Sequence[Transition]
    signals: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sum over the rollout's steps of every intermediate reward by name, before weights, whoever caused it."""


def credited(
    rollouts: Sequence[Rollout],
    selection: Selection,
    seen: Collection[str] = (),
    *,
    discount: float | None = None,
    signals: Mapping[str, float] = MappingProxyType({}),
) -> list[Scored]:
    """Join, signal, assign credit, select.

    Args:
        rollouts: of one step.
        selection: the agents that are trained.
        seen: agents that made calls earlier in the run. A selected one that rests in this step is no error.
        discount: of a call's return by the calls to come; None credits each call with all that its agent earned.
        signals: weights of intermediate rewards by name.

    Raises:
        CaptureError: no call counts at all; the text says what was seen instead.
        SelectionError: calls count, but of no agent that is selected.
    """
    scored: list[Scored] = []
    joined = 0
    for rollout in rollouts:
        if rollout.returned is not None:
            transitions, totals = _signalled(rollout, plugins.build_transitions(rollout), signals)
            transitions = plugins.assign_credit(rollout, transitions, discount)
            joined += len(transitions)
            scored.append(Scored(rollout, [t for t in transitions if t.agent in selection], totals))
    resting = joined > 0 and any(agent in selection for agent in seen)
    if not resting and not any(item.transitions for item in scored):
        raise CaptureError(explain_emptiness(rollouts, selection))
    return scored


def _signalled(
    rollout: Rollout, transitions: Sequence[Transition], weights: Mapping[str, float]
) -> tuple[list[Transition], dict[str, float]]:
    """The transitions with the weighted signals that each caused, and the unweighted sums by name."""
    totals: dict[str, float] = {}
    caused = [0.0] * len(transitions)
    for values, cause in zip(plugins.signal_rewards(rollout.steps), causes(rollout, transitions), strict=True):
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value
            if cause is not None:
                caused[cause] += weights.get(name, 0.0) * value
    return [replace(t, signal=signal) for t, signal in zip(transitions, caused, strict=True)], totals


def explain_emptiness(rollouts: Sequence[Rollout], selection: Selection) -> str:
    """Why there is nothing to train on, in the order of likelihood."""
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    calls = [call for rollout in rollouts for call in rollout.calls]
    agents = sorted({call.agent for call in calls})
    if outcomes["ok"] == 0:
        errors = Counter(rollout.error for rollout in rollouts if rollout.error)
        common = errors.most_common(1)[0] if errors else ("no error text", 0)
        return f"none of {len(rollouts)} rollouts ended well ({dict(outcomes)}); the commonest error: {common[0]}"
    if broken := broken_rewards(rollouts):
        return f"none of {len(rollouts)} rollouts has a reward; {broken[0]}"
    if all(rollout.returned is None for rollout in rollouts):
        return f"none of {len(rollouts)} rollouts has a reward: the agent function returned None; return a number"
    if not calls:
        return (
            f"{len(rollouts)} rollouts made no model call through agl: build the agent's model from the llm argument, "
            "for instance ChatOpenAI(**llm.openai())"
        )
    if not any(agent in selection for agent in agents):
        selection.check(agents)
    return (
        f"{len(calls)} calls were recorded (states {dict(Counter(call.state for call in calls))}, agents {agents}), "
        "but none counts: an adapter labelled them and reported no end. Pass the callback handler to the run, not only "
        "to the model"
    )


def check_credit(algorithm: Algorithm, config: TrainConfig) -> None:
    """Refuse settings that cannot work together, before a model is loaded.

    Raises:
        ConfigError: a discount gives the calls of a rollout different credits, and nothing compares single calls; or a
            group of one, which the algorithm compares with nobody.
        PluginError: a signal that no plugin knows.
    """
    per_call = "values" in needs(algorithm) or baseline_and_weight(config.baseline)[0] in PER_CALL
    if config.discount is not None and not per_call:
        raise ConfigError(
            f"discount={config.discount:g} gives the calls of a rollout credits of their own, but "
            f"baseline={config.baseline!r} compares whole rollouts; use baseline='turn' or 'state', or an algorithm "
            "with a critic"
        )
    alone = config.steps > 0 and config.group_size == 1 and not per_call
    own_groups = len(plugins.manager().hook.agl_group_key.get_hookimpls()) > 1  # a plugin's may span several tasks
    if alone and not own_groups and algorithm.advantages([1.0], ["a group"]) == [0.0]:
        name = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
        raise ConfigError(
            f"group_size=1: {name!r} compares rollouts of the same task, and one has nobody to be compared with, so "
            "nothing would be learned; use group_size=8, or algorithm='reinforce_pp' or 'ppo', which need no group"
        )
    whole = "kl" in needs(algorithm) and not hasattr(algorithm, "token_advantages")
    if whole and baseline_and_weight(config.baseline)[0] in PER_CALL:
        raise ConfigError(
            f"baseline={config.baseline!r} compares single calls, but kl_in='reward' takes the KL of a whole rollout "
            "off its reward; use kl_in='loss', or baseline='task' or 'agent'"
        )
    if config.refill and "values" in needs(algorithm):
        raise ConfigError(
            f"refill={config.refill} replaces groups whose rewards are equal, but with a critic they teach something; "
            "leave it out"
        )
    plugins.check_signals(config.signals)


def baseline_and_weight(baseline: Baseline | Mapping[str, float]) -> tuple[Baseline, float]:
    """The name of a baseline, and how much the comparison of states counts beside that of rollouts."""
    return ("state", baseline["state"]) if isinstance(baseline, Mapping) else (baseline, STATE_WEIGHT)


def advantages(
    scored: Sequence[Scored], algorithm: Algorithm, baseline: Baseline | Mapping[str, float]
) -> list[list[float]]:
    """Advantage of every transition of every rollout against the group that `agl.credit.group_key` names.

    What is compared: for baselines ``task`` and ``agent`` unique rollouts (of a task, or a task's agent), never
    transitions or rows, so that a rollout with many calls does not count more; for ``turn`` and ``state`` single
    calls, and so where a critic is the baseline. ``state`` adds two comparisons, :math:`A = A^E + w A^S` (GiGPO, arXiv
    2505.10978): of all that an agent earned in a rollout, and of the credits of its calls in equal states.

    Raises:
        ConfigError: transitions of one unit have different credits, which a baseline per unit cannot compare.
    """
    name, weight = ("turn", 0.0) if "values" in needs(algorithm) else baseline_and_weight(baseline)
    credits = [[transition.reward or 0.0 for transition in item.transitions] for item in scored]
    gains = _compared(scored, credits, algorithm, name)
    if name != "state":
        return gains
    earned = [agent_rewards(item.rollout, item.transitions) for item in scored]
    episodes = _compared(scored, earned, algorithm, "agent")
    return [
        [whole + weight * step for whole, step in zip(*pair, strict=True)] for pair in zip(episodes, gains, strict=True)
    ]


def _compared(
    scored: Sequence[Scored], credits: Sequence[Sequence[float]], algorithm: Algorithm, baseline: Baseline
) -> list[list[float]]:
    """Advantage of every transition by one comparison of units, each of which counts once."""
    units: list[list[tuple[int, str, str]]] = []
    values: dict[tuple[int, str, str], float] = {}
    for index, (item, own) in enumerate(zip(scored, credits, strict=True)):
        keys = plugins.group_keys(item.rollout, item.transitions, baseline)
        calls = [t.call if baseline in PER_CALL else "" for t in item.transitions]
        units.append([(index, key, call) for key, call in zip(keys, calls, strict=True)])
        for unit, credit in zip(units[-1], own, strict=True):
            if values.setdefault(unit, credit) != credit:
                raise ConfigError(
                    f"calls of rollout {item.rollout.id!r} have different credits ({values[unit]:g} and {credit:g}), "
                    f"but baseline={baseline!r} compares one value of a rollout; agents with rewards of their own need "
                    "baseline='agent', calls with credits of their own 'turn' or 'state'"
                )
    groups = [key for _, key, _ in values]
    gains = dict(zip(values, algorithm.advantages(list(values.values()), groups), strict=True))
    return [[gains[unit] for unit in own] for own in units]


def learnable_groups(scored: Sequence[Scored], advantages: Sequence[Sequence[float]]) -> set[str]:
    """Groups (rollouts of one task) with at least one call that has an advantage."""
    return {item.rollout.group for item, own in zip(scored, advantages, strict=True) if any(own)}


def train_rows(
    scored: Sequence[Scored],
    advantages: Sequence[Sequence[float]],
    algorithm: Algorithm,
    max_length: int,
) -> list[TrainRow]:
    """Merge and fork each rollout's transitions into rows, and weigh them.

    Args:
        scored: the rollouts of the step.
        advantages: of each rollout's transitions.
        algorithm: says how token losses add up. Rows whose advantages are all 0 are left out, unless it does more
            with them (KL, entropy, a critic).
        max_length: longer rows are an error of the engine's limit, not something to cut.
    """
    keep_zero = hasattr(algorithm, "token_advantages") or bool(needs(algorithm) - {"old_logprobs", "kl"})
    kept: list[tuple[Row, list[float]]] = []
    everything: list[Row] = []
    for item, own in zip(scored, advantages, strict=True):
        for row in build_rows(item.transitions):
            if len(row.token_ids) > max_length:
                raise CaptureError(f"a row of {len(row.token_ids)} tokens exceeds max_length={max_length}")
            per_token = [own[index] for index in row.transitions if index >= 0]
            everything.append(row)
            if keep_zero or any(per_token):
                kept.append((row, per_token))
    # Weights are fixed before anything is dropped.
    weights = dict(
        zip(map(id, everything), token_weights(everything, algorithm.aggregation, length=max_length), strict=True)
    )
    return [TrainRow(row, per_token, weights[id(row)]) for row, per_token in kept]


def count(
    rollouts: Sequence[Rollout], scored: Sequence[Scored], advantages: Sequence[Sequence[float]]
) -> dict[str, float]:
    """What the step is made of: nothing that was left out stays silent.

    Counts: rollouts, those unscored, those of each bad outcome, transitions, answers cut off at the token limit
    (``truncated_answers``), calls refused because their prompt was too long (``overlong_prompts``), and how prompts
    were made, where the backend tells (``context/...``, see `agl.continuation.Context`). Means over
    rollouts: ``reward``, its parts, the signals. Share of groups: ``degenerate_groups``. And for each trained agent
    what it earned in a rollout, its calls and sampled tokens, and the mean size of its advantages.
    """
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    groups = {item.rollout.group for item in scored}
    degenerate = groups - learnable_groups(scored, advantages)
    transitions = [t for item in scored for t in item.transitions]
    refused = [call.error or "" for rollout in rollouts for call in rollout.calls if call.state == "error"]
    metrics = {
        "rollouts": len(rollouts),
        "unscored": len(rollouts) - len(scored),
        "degenerate_groups": len(degenerate) / max(1, len(groups)),
        "transitions": len(transitions),
        "response_tokens": total_tokens(transitions) / max(1, len(transitions)),
        "truncated_answers": sum(t.finish_reason == "length" for t in transitions),
        "overlong_prompts": sum("context length" in error for error in refused),
    }
    contexts = Counter(call.context for rollout in rollouts for call in rollout.calls if call.state == "done")
    metrics |= {f"context/{name}": contexts[name] for name in get_args(Context) if any(contexts)}
    metrics |= {f"outcome/{name}": outcomes[name] for name in get_args(Outcome) if name != "ok"}
    rewards = [item.rollout.returned or Reward() for item in scored]
    metrics["reward"] = _mean([reward.total for reward in rewards])
    for name in sorted({part for reward in rewards for part in reward.parts}):
        metrics[f"reward/{name}"] = _mean([reward.parts.get(name, 0.0) for reward in rewards])
    for name in sorted({name for item in scored for name in item.signals}):
        metrics[f"signal/{name}"] = _mean([item.signals.get(name, 0.0) for item in scored])
    for agent in sorted({t.agent for t in transitions}):
        metrics |= _of_agent(agent, scored, advantages)
    return {name: float(value) for name, value in metrics.items()}


def staleness(scored: Sequence[Scored], version: int) -> dict[str, float]:
    """How many updates old the step's sampled tokens are: the mean, the most, and how many are not of ``version``.

    A call that an update fell into is as old as its oldest token.
    """
    ages = [
        (version - t.policy_version, len(t.response_ids))
        for item in scored
        for t in item.transitions
        if t.policy_version is not None
    ]
    tokens = sum(size for _, size in ages)
    return {
        "staleness/mean": sum(age * size for age, size in ages) / max(1, tokens),
        "staleness/max": float(max((age for age, _ in ages), default=0)),
        "staleness/tokens": float(sum(size for age, size in ages if age)),
        "staleness/calls": float(sum(age > 0 for age, _ in ages)),
    }


def _of_agent(agent: str, scored: Sequence[Scored], advantages: Sequence[Sequence[float]]) -> dict[str, float]:
    earned: list[float] = []
    calls: list[tuple[Transition, float]] = []
    for item, own in zip(scored, advantages, strict=True):
        mine = [(t, gain) for t, gain in zip(item.transitions, own, strict=True) if t.agent == agent]
        earned += agent_rewards(item.rollout, [t for t, _ in mine])[:1]
        calls += mine
    return {
        f"agent/{agent}/reward": _mean(earned),
        f"agent/{agent}/advantage": _mean([abs(gain) for _, gain in calls]),
        f"agent/{agent}/calls": len(calls),
        f"agent/{agent}/tokens": total_tokens([t for t, _ in calls]),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))

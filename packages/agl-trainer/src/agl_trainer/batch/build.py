"""From finished rollouts to rows with advantages: the steps between the queue and the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agl import plugins
from agl.errors import CaptureError, ConfigError
from agl.protocols import Algorithm
from agl.records import Reward, Rollout, Row, Transition
from agl.selection import Selection
from agl.transitions import build_rows
from agl_trainer.algorithms import needs
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights


async def score(rollout: Rollout, signal_weight: float = 0.0) -> Rollout:
    """The rollout with the reward that all reward hooks agree on; None stays None (unscored)."""
    if rollout.outcome != "ok":
        return replace(rollout, returned=None)
    parts = await plugins.compute_reward(rollout)
    agents = rollout.returned.agents if rollout.returned else {}
    if not parts and not agents:
        return replace(rollout, returned=None)
    if signal_weight and (signals := plugins.signal_rewards(rollout.steps)):
        parts["signals"] = signal_weight * sum(signals) / len(signals)
    return replace(rollout, returned=Reward(parts=parts, agents=agents))


@dataclass(frozen=True, slots=True)
class Scored:
    """One scored rollout and those of its transitions that are trained, each with its credit."""

    rollout: Rollout
    transitions: Sequence[Transition]


def credited(rollouts: Sequence[Rollout], selection: Selection, seen: Collection[str] = ()) -> list[Scored]:
    """Join, select, assign credit.

    Args:
        rollouts: of one step.
        selection: the agents that are trained.
        seen: agents that made calls earlier in the run. A selected one that rests in this step is no error.

    Raises:
        CaptureError: no call counts at all; the text says what was seen instead.
        SelectionError: calls count, but of no agent that is selected.
    """
    scored: list[Scored] = []
    joined = 0
    for rollout in rollouts:
        if rollout.returned is not None:
            transitions = plugins.assign_credit(rollout, plugins.build_transitions(rollout))
            joined += len(transitions)
            scored.append(Scored(rollout, [t for t in transitions if t.agent in selection]))
    resting = joined > 0 and any(agent in selection for agent in seen)
    if not resting and not any(item.transitions for item in scored):
        raise CaptureError(explain_emptiness(rollouts, selection))
    return scored


def explain_emptiness(rollouts: Sequence[Rollout], selection: Selection) -> str:
    """Why there is nothing to train on, in the order of likelihood."""
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    calls = [call for rollout in rollouts for call in rollout.calls]
    agents = sorted({call.agent for call in calls})
    if outcomes["ok"] == 0:
        errors = Counter(rollout.error for rollout in rollouts if rollout.error)
        common = errors.most_common(1)[0] if errors else ("no error text", 0)
        return f"none of {len(rollouts)} rollouts ended well ({dict(outcomes)}); the commonest error: {common[0]}"
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


def advantages(scored: Sequence[Scored], algorithm: Algorithm, baseline: Literal["task", "agent"]) -> list[list[float]]:
    """Advantage of every transition of every rollout.

    The baseline is taken over unique rollouts of a task (or unique rollout-and-agent pairs of a task and agent),
    never over transitions or rows: a rollout with many calls does not count more.

    Raises:
        ConfigError: transitions of one unit have different credits, which a baseline per unit cannot compare.
    """
    unit_of = [
        [(index, t.agent if baseline == "agent" else "") for t in s.transitions] for index, s in enumerate(scored)
    ]
    values: dict[tuple[int, str], float] = {}
    for item, units in zip(scored, unit_of, strict=True):
        for transition, unit in zip(item.transitions, units, strict=True):
            credit = transition.reward or 0.0
            if values.setdefault(unit, credit) != credit:
                raise ConfigError(
                    f"calls of rollout {item.rollout.id!r} have different credits ({values[unit]:g} and {credit:g}), "
                    f"but baseline={baseline!r} compares one value of a rollout; agents with rewards of their own need "
                    "baseline='agent'"
                )
    groups = [f"{scored[index].rollout.group}/{agent}" for index, agent in values]
    by_unit = dict(zip(values, algorithm.advantages(list(values.values()), groups), strict=True))
    return [[by_unit[unit] for unit in units] for units in unit_of]


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
    keep_zero = hasattr(algorithm, "token_advantages") or bool(needs(algorithm) - {"old_logprobs"})
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


def count(rollouts: Sequence[Rollout], scored: Sequence[Scored]) -> dict[str, float]:
    """What the step is made of: nothing that was left out stays silent."""
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    groups: dict[str, set[float]] = {}
    for item in scored:
        assert item.rollout.returned is not None
        groups.setdefault(item.rollout.group, set()).add(item.rollout.returned.total)
    transitions = [t for item in scored for t in item.transitions]
    metrics = {
        "rollouts": len(rollouts),
        "unscored": len(rollouts) - len(scored),
        "degenerate_groups": sum(len(rewards) == 1 for rewards in groups.values()) / max(1, len(groups)),
        "transitions": len(transitions),
        "response_tokens": sum(len(t.response_ids) for t in transitions) / max(1, len(transitions)),
    }
    metrics |= {f"outcome/{name}": float(n) for name, n in outcomes.items() if name != "ok"}
    for name in sorted({part for item in scored for part in (item.rollout.returned or Reward()).parts}):
        values = [(item.rollout.returned or Reward()).parts.get(name, 0.0) for item in scored]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    totals = [item.rollout.returned.total for item in scored if item.rollout.returned]
    metrics["reward"] = sum(totals) / max(1, len(totals))
    for agent in sorted({t.agent for t in transitions}):
        metrics[f"calls/{agent}"] = sum(t.agent == agent for t in transitions)
    return {name: float(value) for name, value in metrics.items()}

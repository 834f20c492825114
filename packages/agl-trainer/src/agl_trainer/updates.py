"""Optimiser steps on the rows of one batch: lay them out, ask the model what the algorithm needs, step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from agl.errors import ConfigError, NumericsError, PluginError
from agl.protocols import Algorithm, StepTokens, TokenAdvantages
from agl.transitions import build_rows
from agl_trainer import algorithms
from agl_trainer.batch import layout
from agl_trainer.batch.build import Scored
from agl_trainer.batch.pack import MicroBatch, TrainRow
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy


def learn(
    policy: Policy, rows: Sequence[TrainRow], algorithm: Algorithm, config: TrainConfig, passes: int
) -> dict[str, float]:
    """``passes`` optimiser steps on all rows, of which each rank computes its share; returns the metrics of the last.

    Raises:
        NumericsError: too many steps in a row were refused.
        ConfigError: an agent is to learn that has no adapter.
    """
    needs = algorithms.needs(algorithm)
    metrics: dict[str, float] = {}
    if hasattr(algorithm, "token_advantages"):
        batches = estimate(policy, lay_out(policy, rows, config), needs, passes)
        try:
            batches, metrics = token_advantages(policy, rows, batches, algorithm)
        except NumericsError as error:  # on all ranks alike
            policy.refuse(str(error))
            return {"refused": 1.0}
    else:  # KL in the reward is in the advantages already; see `with_kl`
        batches = estimate(policy, lay_out(policy, rows, config), needs - {"kl"}, passes)
    critic = policy.critic if "values" in needs else None
    warming = critic is not None and int(critic.steps) < getattr(algorithm, "value_warmup", 0)
    for _ in range(passes):
        metrics |= policy.update(batches, algorithm, only_critic=warming)
        if "refused" in metrics:
            break
    if critic is not None and "refused" not in metrics:
        critic.steps += 1
    computed = policy.ranks.gather(sum(batch.token_ids.numel() for batch in batches))
    metrics |= {"rows": float(len(rows))} | layout.counts(rows, sum(computed))
    if len(computed) > 1:
        metrics["imbalance"] = max(computed) * len(computed) / max(1, sum(computed))  # 1 is even
    return metrics


def lay_out(policy: Policy, rows: Sequence[TrainRow], config: TrainConfig) -> list[MicroBatch]:
    """The micro-batches of this rank's share of the rows; their ``index`` counts the tokens of all rows of the step.

    Where each agent has an adapter, every micro-batch holds rows of one agent.

    Raises:
        ConfigError: an agent is to learn that has no adapter.
    """
    if policy.agents and (strangers := sorted({item.row.agent for item in rows}.difference(policy.agents))):
        raise ConfigError(
            f"agents {strangers!r} are to learn and have no adapter: with adapters='agent' only those named by "
            f"optimize={list(policy.agents)!r} can; name them there"
        )
    own = layout.shares(rows, policy.ranks.size, config.layout, policy.model)[policy.ranks.rank]
    first = [0, *accumulate(sum(item.row.sampled) for item in rows)]
    batches: list[MicroBatch] = []
    for agent in policy.agents or ("",):
        mine = [row for row in own if agent in ("", rows[row].row.agent)]
        places = torch.tensor([place for row in mine for place in range(first[row], first[row + 1])], dtype=torch.long)
        part = [rows[row] for row in mine]
        for batch in layout.micro_batches(part, config.micro_batch_tokens, config.layout, policy.model):
            batches.append(replace(batch, agent=agent, index=places[batch.index]))
    return batches


def of_the_step(policy: Policy, batches: Sequence[MicroBatch], name: str, size: int) -> torch.Tensor:
    """One number for each sampled token of the step, in the order of the rows, from all ranks.

    Args:
        policy: knows the other ranks.
        batches: of this rank.
        name: of what the batches hold.
        size: sampled tokens of the step.
    """
    numbers = torch.zeros(size, dtype=torch.float64)
    for batch in batches:
        numbers[batch.index] = getattr(batch, name).double().cpu()
    return torch.stack(policy.ranks.gather(numbers)).sum(0)  # each rank knows its own and has 0 elsewhere


def estimate(policy: Policy, batches: Sequence[MicroBatch], needs: AbstractSet[str], passes: int) -> list[MicroBatch]:
    """Ask the model for what an algorithm needs to know from the start of the step, and for nothing else."""
    values = "values" in needs
    # In a single pass the old logprobs are its own, and need no forward of their own.
    old = values or "kl" in needs or ("old_logprobs" in needs and passes > 1)
    outputs = policy.all_outputs(batches, values=values) if old else []
    result: list[MicroBatch] = []
    for place, batch in enumerate(batches):
        known: dict[str, Any] = {}
        if old:
            known |= {"old_logprobs": outputs[place].logprobs, "old_values": outputs[place].values}
        if needs & {"ref_logprobs", "kl"}:
            known["ref_logprobs"] = policy.reference_logprobs(batch)
        result.append(replace(batch, **known))
    return result


def token_advantages(
    policy: Policy, rows: Sequence[TrainRow], batches: Sequence[MicroBatch], algorithm: Any
) -> tuple[list[MicroBatch], dict[str, float]]:
    """Replace the advantages of calls by those of tokens, which depend on the whole step.

    Returns:
        The micro-batches with their advantages and returns, and what is to be logged.

    Raises:
        PluginError: the algorithm gave more or fewer numbers than there are tokens.
    """
    needs = algorithms.needs(algorithm)
    size = sum(len(item.advantages) for item in rows)

    def flat(name: str) -> torch.Tensor:
        return of_the_step(policy, batches, name, size)

    step = StepTokens(
        rewards=token_rewards(rows),
        episodes=[[place for call in calls for place in call] for calls in episodes(rows)],
        kl=(flat("old_logprobs") - flat("ref_logprobs")).tolist() if "kl" in needs else None,
        values=flat("old_values").tolist() if "values" in needs else None,
    )
    found: TokenAdvantages = algorithm.token_advantages(step)
    for name, numbers in (("advantages", found.advantages), ("returns", found.returns)):
        if numbers is not None and len(numbers) != size:
            raise PluginError(
                f"{type(algorithm).__name__}.token_advantages gave {len(numbers)} {name} for {size} sampled tokens; "
                "return one for each"
            )
    advantages = torch.tensor(found.advantages, dtype=torch.float64)
    metrics: dict[str, float] = {}
    result = [replace(batch, advantages=advantages[batch.index]) for batch in batches]
    if step.kl is not None:
        metrics["kl"] = sum(step.kl) / max(1, len(step.kl))
    if found.returns is not None:
        returns = torch.tensor(found.returns, dtype=torch.float64)
        result = [replace(batch, returns=returns[batch.index]) for batch in result]
        if step.values is not None:
            rest = returns - torch.tensor(step.values, dtype=torch.float64)
            metrics["explained_variance"] = float(1 - rest.var(correction=0) / returns.var(correction=0).clamp(1e-12))
    return result, metrics


def with_kl(policy: Policy, scored: Sequence[Scored], algorithm: Any, config: TrainConfig) -> list[Scored]:
    """Subtract from every call's credit ``kl_coef`` times the k1 of its whole rollout, before advantages are taken.

    For algorithms that compare whole rollouts and have KL in the reward (RLOO, arXiv 2402.14740); it costs a forward
    of the policy and of the reference.
    """
    rows = [
        TrainRow(row, [0.0] * sum(row.sampled), [0.0] * sum(row.sampled))
        for item in scored
        for row in build_rows(item.transitions)
    ]
    batches = estimate(policy, lay_out(policy, rows, config), {"kl"}, 1)
    size = sum(len(item.advantages) for item in rows)
    kl = of_the_step(policy, batches, "old_logprobs", size) - of_the_step(policy, batches, "ref_logprobs", size)
    spent: dict[str, float] = defaultdict(float)
    for item, own in zip(rows, kl.split([len(item.advantages) for item in rows]), strict=True):
        spent[item.row.rollout] += float(own.sum())
    return [
        replace(
            item,
            transitions=[
                replace(t, reward=(t.reward or 0.0) - algorithm.kl_coef * spent[t.rollout]) for t in item.transitions
            ],
        )
        for item in scored
    ]


def episodes(rows: Sequence[TrainRow]) -> list[list[range]]:
    """The calls of each agent of each rollout in the order of time, each as the places of its tokens in the step.

    A row that forked off is still a later part of the same episode.
    """
    calls: dict[tuple[str, str], dict[int, range]] = defaultdict(dict)
    place = 0
    for item in rows:
        own = calls[item.row.rollout, item.row.agent]
        for call in item.row.transitions:
            if call >= 0:
                own[call] = range(own[call].start if call in own else place, place + 1)
                place += 1
    return [[parts[call] for call in sorted(parts)] for parts in calls.values()]


def token_rewards(rows: Sequence[TrainRow]) -> list[float]:
    """Reward of each sampled token, from the advantages of calls; see `agl.protocols.StepTokens`."""
    credits = [credit for item in rows for credit in item.advantages]
    rewards = [0.0] * len(credits)
    for calls in episodes(rows):
        later = [credits[call.start] for call in calls[1:]] + [0.0]
        for call, next_credit in zip(calls, later, strict=True):
            rewards[call.stop - 1] = credits[call.start] - next_credit
    return rewards

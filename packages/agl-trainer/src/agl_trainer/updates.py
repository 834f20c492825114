"""Optimiser steps on the rows of one batch: lay them out, ask the model what the algorithm needs, step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from agl.protocols import Algorithm, StepTokens, TokenAdvantages
from agl_trainer import algorithms
from agl_trainer.batch.balance import shares
from agl_trainer.batch.pack import MicroBatch, TrainRow, micro_batches
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy


def learn(
    policy: Policy, rows: Sequence[TrainRow], algorithm: Algorithm, config: TrainConfig, passes: int
) -> dict[str, float]:
    """``passes`` optimiser steps on all rows, of which each rank computes its share; returns the metrics of the last.

    Raises:
        NumericsError: too many steps in a row had no finite gradient.
    """
    own = shares([len(item.row.token_ids) for item in rows], policy.ranks.size)[policy.ranks.rank]
    batches: list[MicroBatch] = list(micro_batches([rows[place] for place in own], config.micro_batch_tokens))
    batches = estimate(policy, batches, algorithm, passes)
    metrics: dict[str, float] = {}
    if hasattr(algorithm, "token_advantages"):
        batches, metrics = token_advantages(policy, rows, own, batches, algorithm)
    critic = policy.critic if "values" in algorithms.needs(algorithm) else None
    warming = critic is not None and int(critic.steps) < getattr(algorithm, "value_warmup", 0)
    for _ in range(passes):
        metrics |= policy.update(batches, algorithm, only_critic=warming)
    if critic is not None:
        critic.steps += 1
    computed = policy.ranks.gather(sum(batch.token_ids.numel() for batch in batches))
    metrics["rows"] = float(len(rows))
    metrics["tokens_computed"] = float(sum(computed))
    if len(computed) > 1:
        metrics["imbalance"] = max(computed) * len(computed) / max(1, sum(computed))  # 1 is even
    return metrics


def estimate(policy: Policy, batches: Sequence[MicroBatch], algorithm: Algorithm, passes: int) -> list[MicroBatch]:
    """Ask the model for what the algorithm needs to know from the start of the step, and for nothing else."""
    needs = algorithms.needs(algorithm)
    values = "values" in needs
    # In a single pass the old logprobs are its own, and need no forward of their own.
    old = values or "kl" in needs or ("old_logprobs" in needs and passes > 1)
    result: list[MicroBatch] = []
    for batch in batches:
        known: dict[str, Any] = {}
        if old:
            outputs = policy.outputs(batch, values=values)
            known |= {"old_logprobs": outputs.logprobs, "old_values": outputs.values}
        if needs & {"ref_logprobs", "kl"}:
            known["ref_logprobs"] = policy.reference_logprobs(batch)
        result.append(replace(batch, **known))
    return result


def token_advantages(
    policy: Policy, rows: Sequence[TrainRow], own: Sequence[int], batches: Sequence[MicroBatch], algorithm: Any
) -> tuple[list[MicroBatch], dict[str, float]]:
    """Replace the advantages of calls by those of tokens, which depend on the whole step.

    Args:
        policy: knows the other ranks.
        rows: of the step, on all ranks.
        own: which of them this rank computes.
        batches: made of those.
        algorithm: has ``token_advantages``.

    Returns:
        The micro-batches with their advantages and returns, and what is to be logged.
    """
    needs = algorithms.needs(algorithm)
    first = [0, *accumulate(len(item.advantages) for item in rows)]
    places = torch.tensor([place for row in own for place in range(first[row], first[row + 1])], dtype=torch.long)

    def flat(name: str) -> torch.Tensor:
        """One number for each sampled token of the step, in the order of the rows."""
        numbers = torch.zeros(first[-1], dtype=torch.float64)
        for batch in batches:
            numbers[places[batch.index]] = getattr(batch, name).double().cpu()
        return torch.stack(policy.ranks.gather(numbers)).sum(0)  # each rank knows its own and has 0 elsewhere

    step = StepTokens(
        rewards=call_rewards(rows),
        episodes=[[place for call in calls for place in call] for calls in episodes(rows)],
        kl=(flat("old_logprobs") - flat("ref_logprobs")).tolist() if "kl" in needs else None,
        values=flat("old_values").tolist() if "values" in needs else None,
    )
    found: TokenAdvantages = algorithm.token_advantages(step)
    advantages = torch.tensor(found.advantages, dtype=torch.float64)
    metrics: dict[str, float] = {}
    result = [replace(batch, advantages=advantages[places[batch.index]]) for batch in batches]
    if step.kl is not None:
        metrics["kl"] = sum(step.kl) / max(1, len(step.kl))
    if found.returns is not None:
        returns = torch.tensor(found.returns, dtype=torch.float64)
        result = [replace(batch, returns=returns[places[batch.index]]) for batch in result]
        if step.values is not None:
            rest = returns - torch.tensor(step.values, dtype=torch.float64)
            metrics["explained_variance"] = float(1 - rest.var(correction=0) / returns.var(correction=0).clamp(1e-12))
    return result, metrics


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


def call_rewards(rows: Sequence[TrainRow]) -> list[float]:
    """Reward of each sampled token, from the advantages of calls; see `agl.protocols.StepTokens`."""
    credits = [credit for item in rows for credit in item.advantages]
    rewards = [0.0] * len(credits)
    for calls in episodes(rows):
        later = [credits[call.start] for call in calls[1:]] + [0.0]
        for call, next_credit in zip(calls, later, strict=True):
            rewards[call.stop - 1] = credits[call.start] - next_credit
    return rewards

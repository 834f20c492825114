"""The calls of synthetic agents, as lists that every system can read: the same tokens, masks and advantages for all."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

GROUP = 8
"""Rollouts of a task."""
FIRST_TOKEN = 300
"""Smaller ids may be special ones."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens, each drawn evenly between two bounds."""

    groups: int
    prompt: tuple[int, int]
    """System message, tools and task: the same for the whole group."""
    turns: tuple[int, ...]
    """Calls of the rollouts of a group, in a circle."""
    answer: tuple[int, int]
    observation: tuple[int, int]
    """What the agent adds between two calls: a tool's result."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One call of a rollout; its prompt holds all that went before."""

    rollout: str
    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float


def make(shape: Shape, vocabulary: int, seed: int = 0) -> list[SampledCall]:
    """Calls of all rollouts; every prompt begins with the prompt and answer before it."""
    order = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [order.randrange(min(FIRST_TOKEN, vocabulary // 2), vocabulary) for _ in range(order.randint(*bounds))]

    calls: list[SampledCall] = []
    for group in range(shape.groups):
        prompt = tokens(shape.prompt)
        rewards = [float(member % 3 == 0) for member in range(GROUP)]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        for member, reward in enumerate(rewards):
            context = prompt
            for turn in range(shape.turns[member % len(shape.turns)]):
                if turn:
                    context = context + tokens(shape.observation)
                answer = tokens(shape.answer)
                calls.append(SampledCall(f"{group}-{member}", context, answer, (reward - mean) / deviation))
                context = context + answer
    return calls


def as_json(calls: list[SampledCall]) -> list[dict[str, Any]]:
    """For the way to another process."""
    return [asdict(call) for call in calls]


def unique_tokens(calls: list[SampledCall]) -> int:
    """Tokens that differ from every other by themselves or by what stands before them: the least a network can do."""
    seen: set[int] = set()
    for call in calls:
        before = 0
        for token in [*call.prompt_ids, *call.response_ids]:
            before = hash((before, token))
            seen.add(before)
    return len(seen)

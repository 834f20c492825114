"""Warm-up: before reinforcement learning, imitate a teacher in the agent's own surroundings.

The agent runs as always; only its model calls are answered by `Warmup.demonstrate`. So prompts, tools and the order
of calls are exactly those of training, and the recorded calls become supervised examples.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.errors import UsageError
from agl.protocols import Sampling, Token
from agl.records import Task
from agl_trainer.chat import ChatFormat

Demonstrate = Callable[[Mapping[str, Any], str, str], str]
"""``demonstrate(task, agent, prompt) -> answer``; the prompt is the rendered chat."""


PLAYED = -1
"""Policy version of an answer that is not to be learned: it is kept with the call, and so outlives this process."""


class Played(str):
    """An answer that is played but not learned, such as a mistake for another agent to repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """How to warm up."""

    demonstrate: Demonstrate
    """Answers every model call of the agent."""
    agents: Sequence[str] | None = None
    """Names or globs of the agents that learn; default: the optimised ones."""
    tasks: Sequence[Mapping[str, Any]] | None = None
    """Default: the training tasks."""
    steps: int = 20
    """Optimiser steps."""
    batch: int = 16
    """Demonstrated rollouts in one step."""
    learning_rate: float | None = None
    """Default: the run's."""

    def __post_init__(self) -> None:
        if not callable(self.demonstrate):
            raise UsageError(f"demonstrate={self.demonstrate!r} is no function; write demonstrate(task, agent, prompt)")
        for name, value in (("steps", self.steps), ("batch", self.batch)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"a warm-up needs {name} of at least 1, not {value!r}")
        rate = self.learning_rate
        if rate is not None and not (isinstance(rate, (int, float)) and 0 < rate < float("inf")):
            raise UsageError(f"a warm-up needs a learning_rate above 0, not {rate!r}")


class Demonstrator:
    """An engine whose answers come from the teacher (`agl.protocols.Engine`)."""

    def __init__(self, tokenizer: Any, max_length: int, warmup: Warmup, tasks: Mapping[str, Task]) -> None:
        """Stand in for an engine.

        Args:
            tokenizer: the policy's; chats are rendered as in training.
            max_length: the engine's.
            warmup: holds the teacher.
            tasks: the task of every rollout id.
        """
        chat = ChatFormat(tokenizer)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.render = chat.render
        self.parse = chat.parse
        self._demonstrate = warmup.demonstrate
        self._tasks = tasks

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Token]:
        """The teacher's answer, token by token, each with logprob 0: it was certain."""
        rollout, agent = sampling.labels["rollout"], sampling.labels["agent"]
        task = self._tasks[rollout]
        answer = self._demonstrate(task.data, agent, self.tokenizer.decode(prompt_ids))
        if inspect.isawaitable(answer):
            answer = await answer
        if not isinstance(answer, str):
            raise UsageError(
                f"demonstrate() returned {answer!r} for agent {agent!r} on task {task.id!r}; return a string"
            )
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        if len(ids) > sampling.max_tokens:
            raise UsageError(
                f"the demonstration for agent {agent!r} on task {task.id!r} has {len(ids)} tokens, but the agent asked "
                f"for at most {sampling.max_tokens}"
            )
        version = PLAYED if isinstance(answer, Played) else 0
        for place, token in enumerate(ids):
            yield Token(token, 0.0, version, "stop" if place == len(ids) - 1 else None)

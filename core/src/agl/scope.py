"""Who is calling: the current rollout, agent and call, carried by context variables.

Context variables follow ``asyncio`` tasks and ``asyncio.to_thread``; they do not follow threads that a program
starts itself. Wrap such a function with `wrap` before handing it to the thread.
"""

from __future__ import annotations

import contextvars
import functools
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from agl.records import Step, StepKind
from agl.selection import Selection

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Labels that the next model call carries on the wire."""

    call_id: str | None = None
    agent: str | None = None
    parent: str | None = None


@dataclass(slots=True)
class RolloutScope:
    """The rollout that the current context works for. Adapters put their steps into it."""

    rollout: str
    attempt: int
    selection: Selection
    steps: list[Step] = field(default_factory=list[Step])

    def emit(
        self,
        kind: StepKind,
        call_id: str,
        *,
        agent: str | None = None,
        parent: str | None = None,
        name: str | None = None,
        **data: Any,
    ) -> None:
        """Report what a framework's callback told. Never blocks; `list.append` is thread-safe."""
        self.steps.append(
            Step(
                id=uuid.uuid4().hex,
                kind=kind,
                call_id=call_id,
                agent=agent,
                parent=parent,
                name=name,
                data=data,
                time=time.time(),
            )
        )


@dataclass(slots=True)
class _Label:
    info: CallInfo | None


_rollout: contextvars.ContextVar[RolloutScope | None] = contextvars.ContextVar("agl_rollout", default=None)
_active: list[RolloutScope] = []
_agent: contextvars.ContextVar[str | None] = contextvars.ContextVar("agl_agent", default=None)
_call: contextvars.ContextVar[_Label | None] = contextvars.ContextVar("agl_call", default=None)


def current_rollout() -> RolloutScope | None:
    """The rollout this context works for, or None outside of one."""
    return _rollout.get()


@contextmanager
def rollout(scope: RolloutScope) -> Generator[RolloutScope]:
    """Work for this rollout inside the block."""
    token = _rollout.set(scope)
    _active.append(scope)
    try:
        yield scope
    finally:
        _rollout.reset(token)
        _active[:] = [one for one in _active if one is not scope]


def active_rollouts() -> Sequence[RolloutScope]:
    """The rollouts that are under way in this process, in whatever context."""
    return _active


@contextmanager
def agent(name: str) -> Generator[None]:
    """Name the agent of the model calls made inside the block, where no framework names it."""
    label = _call.set(None)  # what an earlier call may have left behind
    token = _agent.set(name)
    try:
        yield
    finally:
        _agent.reset(token)
        _call.reset(label)


def current_agent() -> str | None:
    """The agent named by `agent`."""
    return _agent.get()


def set_call(info: CallInfo) -> Callable[[], None]:
    """Label the model call that this context makes next.

    Returns:
        How to withdraw the label when the call has ended: a later call must not inherit it. It works from any
        context, because frameworks report the end of a call from a task of their own.
    """
    label = _Label(info)
    _call.set(label)

    def withdraw() -> None:
        label.info = None

    return withdraw


def current_call() -> CallInfo | None:
    """The label an adapter set, else the agent named by `agent`, else None."""
    label = _call.get()
    if label is not None and label.info is not None:
        return label.info
    name = current_agent()
    return CallInfo(agent=name) if name is not None else None


NOTHING = frozenset({"", "[]", "{}", "()", '""', "''", "null", "None"})
"""How tools write that they found nothing."""
TOOL_CALL_MARKS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
"""How the models of the Hermes and Qwen, Llama and Mistral families begin a tool call."""


def result_length(result: object) -> int:
    """Characters in what a tool returned, 0 where it found nothing. Adapters report this and not the content."""
    text = str(result).strip()
    return 0 if text in NOTHING else len(text)


def unparsed_tool_calls(text: str) -> int:
    """How many tool calls an answer's text still holds: a server takes out those that it can parse."""
    return sum(text.count(mark) for mark in TOOL_CALL_MARKS)


def wrap(function: Callable[P, R]) -> Callable[P, R]:
    """Carry the current scope into a thread that the program starts itself."""
    context = contextvars.copy_context()

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.copy().run(function, *args, **kwargs)

    return inside

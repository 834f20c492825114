"""What is told about a run: who starts a model or tool call, how it ended, and inside of what.

An error in here never reaches the agent: the first of a process is logged, and the call is not counted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from agl import scope
from agl.records import StepKind
from agl.scope import CallInfo, RolloutScope

log = logging.getLogger("agl_openai_agents")

_failed = False


def tell(rollout: RolloutScope | None, kind: StepKind, call_id: str, **more: Any) -> None:
    """Report a step to a rollout, if there is one."""
    global _failed
    if rollout is None:
        return
    try:
        rollout.emit(kind, call_id, **more)
    except Exception:
        if not _failed:
            log.exception("agl could not record an event of the Agents SDK; calls of this rollout may be missing")
        _failed = True


@dataclass(frozen=True, slots=True)
class Made:
    """A tool call that an answer of the model made, before it is seen to run."""

    agent: str
    parent: str
    tool: str


class Pending:
    """The tool calls of a run's answers that were not yet seen to run, by id."""

    def __init__(self) -> None:
        self._made: dict[str, Made] = {}

    def add(self, call_id: str, made: Made) -> None:
        """An answer makes this call."""
        self._made[call_id] = made

    def take(self, call_id: str, tool: str | None = None) -> Made | None:
        """The call, which is no longer pending; None when it is not, or when it calls another tool."""
        made = self._made.get(call_id)
        return self._made.pop(call_id) if made is not None and tool in (None, made.tool) else None

    def tell_results(self, rollout: RolloutScope | None, items: Any) -> None:
        """Report calls that were answered though no tool was seen to run: handoffs, unknown tools, without tracing all.

        Args:
            rollout: who is told.
            items: the input of the next model call.
        """
        for item in items if self._made and isinstance(items, list) else ():
            if isinstance(item, Mapping) and item.get("type") == "function_call_output":
                call_id = str(item.get("call_id"))
                if (call := self.take(call_id)) is not None:
                    about = {"agent": call.agent, "parent": call.parent, "name": call.tool, "tool_call_id": call_id}
                    step = uuid.uuid4().hex
                    tell(rollout, "tool_start", step, **about)
                    tell(rollout, "tool_end", step, **about, result_length=scope.result_length(item.get("output")))


_answer: ContextVar[tuple[Pending, Sequence[str]] | None] = ContextVar("agl_openai_agents_answer", default=None)
"""The tool calls of the last answer; tools run in tasks that inherit the context of the model call."""


def take_call(tool: str) -> str | None:
    """The id of the first tool call of the last answer that calls this tool and is still pending."""
    pending, call_ids = _answer.get() or (Pending(), ())
    return next((call_id for call_id in call_ids if pending.take(call_id, tool)), None)


class Reported:
    """A model call between its start and its end, which is told once."""

    def __init__(
        self, rollout: RolloutScope | None, agent: str, parent: str, model: str | None, pending: Pending
    ) -> None:
        self.id = uuid.uuid4().hex
        self._pending = pending
        self.agent = agent
        self.parent = parent
        self._rollout = rollout
        self._about = {"agent": agent, "parent": parent, "name": model}
        self._ended = False
        self._void: str | None = None
        tell(rollout, "model_start", self.id, **self._about)

    def end(self, output: Iterable[Any] = ()) -> None:
        """It answered, and the answer was used."""
        if self._void is not None:
            self.fail(self._void)
            return
        calls, unparsed = _tool_calls(output)
        for call_id, tool in calls.items():
            self._pending.add(call_id, Made(self.agent, self.parent, tool))
        _answer.set((self._pending, list(calls)))
        data = ({"tool_calls": list(calls)} if calls else {}) | ({"unparsed": unparsed} if unparsed else {})
        self._finish("end", data)

    def fail(self, error: str) -> None:
        """It failed, or nobody waited for its end."""
        self._finish("error", {"error": error[:500]})

    def void(self, error: str) -> None:
        """Its answer was thrown away, maybe after it had ended: an error that is told after the end takes it back."""
        if self._ended:
            tell(self._rollout, "model_error", self.id, **self._about, error=error[:500])
        else:
            self._void = error

    def _finish(self, how: Literal["end", "error"], data: Mapping[str, Any]) -> None:
        if not self._ended:
            self._ended = True
            kind: StepKind = "model_end" if how == "end" else "model_error"
            tell(self._rollout, kind, self.id, **self._about, **data)


def _tool_calls(output: Iterable[Any]) -> tuple[dict[str, str], int]:
    """The tool calls that an answer makes, by id, and how many more of them do not parse."""
    calls: dict[str, str] = {}
    unparsed = 0
    for item in output:
        if getattr(item, "type", None) == "function_call":
            calls[item.call_id] = item.name
        for part in getattr(item, "content", None) or ():
            unparsed += scope.unparsed_tool_calls(getattr(part, "text", None) or "")
    return calls, unparsed


@contextmanager
def model_call(
    rollout: RolloutScope | None, agent: str, parent: str, model: str | None, pending: Pending
) -> Generator[Reported]:
    """Report a model call and label the request that is made inside the block; an end must be told inside it."""
    call = Reported(rollout, agent, parent, model, pending)
    # Only what is reported may carry an id: a call with an id counts when its end was told, and never otherwise.
    withdraw = scope.set_call(CallInfo(call.id if rollout else None, agent, parent))
    try:
        yield call
        call.fail("the model's stream ended without an answer")
    except BaseException as error:  # also a cancellation, and a stream that is left before its end
        call.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        withdraw()

"""What is told about a run: who starts a model or tool call, how it ended, and inside of what.

An error in here never reaches the agent: the first of a run is logged, all are kept in `Run.failures`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from autogen_core import FunctionCall
from autogen_core.models import CreateResult, FunctionExecutionResult

from agl import LLM, scope
from agl.records import StepKind
from agl.scope import CallInfo, RolloutScope

log = logging.getLogger("agl_autogen")

_tool: ContextVar[str | None] = ContextVar("agl_autogen_tool", default=None)


def current_tool() -> str | None:
    """The tool call that this context works for."""
    return _tool.get()


@dataclass(slots=True)
class Run:
    """One wrapped team at work for one rollout: where its steps go."""

    llm: LLM
    rollout: RolloutScope | None
    """None outside of a rollout: nobody listens, and calls carry no id."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    failures: list[Exception] = field(default_factory=list[Exception])
    """What went wrong in the reporting; the agents were not disturbed by it."""
    executed: Counter[str] = field(default_factory=Counter[str])
    """Tool calls that were reported while they ran, by the id that the model's answer gave them."""

    def emit(self, kind: StepKind, call_id: str, **more: Any) -> None:
        """Report a step to the rollout, if there is one."""
        if self.rollout is None:
            return
        try:
            self.rollout.emit(kind, call_id, **more)
        except Exception as error:
            if not self.failures:
                log.exception("agl could not record an AutoGen event; calls of this rollout may be missing")
            self.failures.append(error)


class Reported:
    """A model or tool call between its start and its end, which is told once."""

    def __init__(self, run: Run, kind: Literal["model", "tool"], agent: str, name: str | None, **data: Any) -> None:
        self.id = uuid.uuid4().hex
        self.parent = current_tool() or run.id
        self._run = run
        self._kind = kind
        self._about = {"agent": agent, "parent": self.parent, "name": name, **data}
        self._ended = False
        self._tell("start")

    def end(self, **data: Any) -> None:
        """It returned, and what it returned was used; ``data`` tells of it (`agl.records.Step.data`)."""
        self._finish("end", **data)

    def fail(self, error: str) -> None:
        """It failed, or nobody waited for its end."""
        self._finish("error", error=error[:500])

    def _finish(self, how: Literal["end", "error"], **data: Any) -> None:
        if not self._ended:
            self._ended = True
            self._tell(how, **data)

    def _tell(self, what: Literal["start", "end", "error"], **data: Any) -> None:
        kind: Any = f"{self._kind}_{what}"
        self._run.emit(kind, self.id, **self._about, **data)


@contextmanager
def model_call(run: Run, agent: str, model: str | None) -> Generator[Reported]:
    """Report a model call and label the request that is made inside the block."""
    call = Reported(run, "model", agent, model)
    # Only what is reported may carry an id: a call with an id counts when its end was told, and never otherwise.
    withdraw = scope.set_call(CallInfo(call.id if run.rollout else None, agent, call.parent))
    with _told(call, withdraw):
        yield call


@contextmanager
def tool_call(run: Run, agent: str, tool: str, tool_call_id: str | None) -> Generator[Reported]:
    """Report a tool call; what happens inside the block has it as its parent."""
    data = {"tool_call_id": tool_call_id} if tool_call_id else {}
    run.executed[tool_call_id or ""] += 1
    call = Reported(run, "tool", agent, tool, **data)
    before = current_tool()
    _tool.set(call.id)
    # Not by its token: a stream may be closed in another context than it was opened in.
    with _told(call, lambda: _tool.set(before)):
        yield call


def tool_not_executed(run: Run, agent: str, result: FunctionExecutionResult) -> None:
    """Report a call that reached no tool: a handoff, an unknown tool, arguments that are no JSON."""
    call = Reported(run, "tool", agent, result.name, tool_call_id=result.call_id)
    call.fail(result.content) if result.is_error else call.end(result_length=scope.result_length(result.content))


def answered(call: Reported, result: CreateResult) -> None:
    """Report the end of a model call, with the tool calls that its answer makes and how many more do not parse."""
    texts = [result.content] if isinstance(result.content, str) else []
    texts += [result.thought] if result.thought else []
    unparsed = sum(map(scope.unparsed_tool_calls, texts))
    asked: list[FunctionCall] = [] if isinstance(result.content, str) else result.content
    unparsed += sum(not _is_json_object(one.arguments) for one in asked)
    ids = [one.id for one in asked]
    call.end(**({"tool_calls": ids} if ids else {}), **({"unparsed": unparsed} if unparsed else {}))


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


@contextmanager
def _told(call: Reported, leave: Callable[[], Any]) -> Generator[None]:
    try:
        yield
    except BaseException as error:  # also a cancellation, and a stream that is left before its end
        call.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        leave()
    call.end()

"""The callback handler: says who calls the model and which answers were used. The tokens come from the gateway.

It keeps five rules. It never blocks. It never raises into the agent: what goes wrong in here is logged once and
kept in `AglCallbackHandler.failures`. It looks at the rollout when a call starts, because the end may be reported from
another context. It never touches messages. It is scoped by context variables, and `install` can be undone.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from agl import scope
from agl.records import StepKind
from agl.scope import CallInfo, RolloutScope
from agl_langchain.naming import name_agent

P = ParamSpec("P")
log = logging.getLogger("agl_langchain")

MOST_RUNS = 10_000
"""Runs that are remembered at once: a cancelled model call never ends, so the oldest are forgotten."""


@dataclass(slots=True)
class _Run:
    """A model call, a tool call or an output parser between its start and its end."""

    kind: Literal["model", "tool", "parser"]
    rollout: RolloutScope
    agent: str | None
    parent: str | None
    name: str | None
    data: dict[str, Any]
    withdraw: Callable[[], None] | None = None


class _Runs:
    """All open runs of the process, shared by all handlers: one run is reported once, however often it is seen."""

    def __init__(self) -> None:
        self._runs: dict[UUID, _Run] = {}
        self._lock = threading.Lock()

    def add(self, run_id: UUID, run: _Run) -> bool:
        """Remember a run; False when it is known already."""
        with self._lock:
            if run_id in self._runs:
                return False
            if len(self._runs) >= MOST_RUNS:
                del self._runs[next(iter(self._runs))]
            self._runs[run_id] = run
            return True

    def take(self, run_id: UUID) -> _Run | None:
        """The run, which is forgotten; None when it is not open."""
        with self._lock:
            return self._runs.pop(run_id, None)


_runs = _Runs()


def _guarded(
    method: Callable[Concatenate[AglCallbackHandler, P], None],
) -> Callable[Concatenate[AglCallbackHandler, P], None]:
    """The boundary to the agent: an error of ours ends here."""

    @functools.wraps(method)
    def guarded(self: AglCallbackHandler, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            if not self.failures:
                log.exception("agl could not record a LangChain event; calls of this rollout may be missing")
            self.failures.append(error)

    return guarded


class AglCallbackHandler(BaseCallbackHandler):
    """Reports model and tool calls to the current rollout; give it as a callback, or use `install`.

    Outside of a rollout it does nothing, so it may stay in a production agent.
    """

    run_inline = True
    """In the caller's own context, also in asynchronous code: the HTTP request that follows reads the label there."""
    raise_error = False

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        """What went wrong inside the handler; the agent was not disturbed by it."""

    # ------------------------------------------------------------------------------------------------------- models

    @_guarded
    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A chat model is about to be called."""
        self._model_start(run_id, parent_run_id, metadata, kwargs)

    @_guarded
    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A text model is about to be called."""
        self._model_start(run_id, parent_run_id, metadata, kwargs)

    @_guarded
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """The model's answer was used."""
        self._end("end", run_id, **_tool_calls(response))

    @_guarded
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The model failed, or its stream was left before its end."""
        self._end("error", run_id, error=_describe(error))

    def _model_start(
        self, run_id: UUID, parent_run_id: UUID | None, metadata: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> None:
        run = self._start("model", run_id, parent_run_id, metadata, more.get("name"), _model_name(more), {})
        if run is None:
            return
        # Where several prompts start together, nobody can tell which request is whose: they go without an id.
        call_id = str(run_id) if more.get("batch_size", 1) == 1 else None
        run.withdraw = scope.set_call(CallInfo(call_id, run.agent, run.parent))

    # -------------------------------------------------------------------------------------------------------- tools

    @_guarded
    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool is about to run."""
        name = (serialized or {}).get("name") or kwargs.get("name")
        data = {"tool_call_id": kwargs["tool_call_id"]} if kwargs.get("tool_call_id") else {}
        self._start("tool", run_id, parent_run_id, metadata, None, name, data)

    @_guarded
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The tool returned; ``status`` tells when what it returned is an error for the model to read."""
        status = getattr(output, "status", None)
        told: dict[str, Any] = {"status": status} if isinstance(status, str) else {}
        self._end("end", run_id, **told, result_length=scope.result_length(getattr(output, "content", output)))

    @_guarded
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The tool raised."""
        self._end("error", run_id, error=_describe(error))

    # ------------------------------------------------------------------------------------------------------ parsers

    @_guarded
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A part of a chain begins; of these only output parsers say something about the model's answer."""
        if kwargs.get("run_type") == "parser":
            self._start("parser", run_id, parent_run_id, metadata, None, kwargs.get("name"), {})

    @_guarded
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """The parser could read the answer."""
        _runs.take(run_id)

    @_guarded
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """The parser could not."""
        if not isinstance(error, GeneratorExit):  # a stream that was left early
            self._end("error", run_id, error=_describe(error))

    # ------------------------------------------------------------------------------------------------------- shared

    def _start(
        self,
        kind: Literal["model", "tool", "parser"],
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: Mapping[str, Any] | None,
        run_name: str | None,
        name: str | None,
        data: dict[str, Any],
    ) -> _Run | None:
        """Report the start (but of parsers); None outside of a rollout, or when another handler has reported it."""
        rollout = scope.current_rollout()
        if rollout is None:
            return None
        agent = name_agent(metadata or {}, run_name) or scope.current_agent()
        run = _Run(kind, rollout, agent, str(parent_run_id) if parent_run_id else None, name, data)
        if not _runs.add(run_id, run):
            return None
        if kind != "parser":
            step = "model_start" if kind == "model" else "tool_start"
            rollout.emit(step, str(run_id), agent=agent, parent=run.parent, name=name, **data)
        return run

    def _end(self, how: Literal["end", "error"], run_id: UUID, **data: Any) -> None:
        run = _runs.take(run_id)
        if run is None:
            return
        if run.withdraw is not None:
            run.withdraw()
        step: StepKind
        match run.kind:
            case "model":
                step = "model_end" if how == "end" else "model_error"
            case "tool":
                step = "tool_end" if how == "end" else "tool_error"
            case "parser":
                step = "parser_error"
        run.rollout.emit(step, str(run_id), agent=run.agent, parent=run.parent, name=run.name, **run.data, **data)


def _tool_calls(response: LLMResult) -> dict[str, Any]:
    """Ids of the tool calls that the answer makes, and how many more of them do not parse."""
    ids: list[str] = []
    unparsed = 0
    for generation in (one for prompt in response.generations for one in prompt):
        message = getattr(generation, "message", None)
        ids += [call["id"] for call in getattr(message, "tool_calls", ()) if call.get("id")]
        unparsed += len(getattr(message, "invalid_tool_calls", ())) + scope.unparsed_tool_calls(generation.text)
    return ({"tool_calls": ids} if ids else {}) | ({"unparsed": unparsed} if unparsed else {})


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _model_name(more: Mapping[str, Any]) -> str | None:
    parameters: Mapping[str, Any] = more.get("invocation_params") or {}
    return parameters.get("model") or parameters.get("model_name")


# ----------------------------------------------------------------------------------------------------- installation

_installed: ContextVar[AglCallbackHandler | None] = ContextVar("agl_langchain", default=None)


@functools.cache
def _register() -> None:
    # Registration cannot be undone, and need not be: an empty variable adds no handler.
    register_configure_hook(_installed, inheritable=True, handle_class=AglCallbackHandler)


def install() -> Callable[[], None]:
    """Report every LangChain run of this context, and of all tasks and threads that inherit it.

    Returns:
        How to undo it.
    """
    _register()
    before = _installed.get()
    _installed.set(before or AglCallbackHandler())

    def undo() -> None:
        _installed.set(before)

    return undo

"""The SDK's own traces: which tools run, who is at work, and inside of what. None of them leaves for OpenAI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agents import Span, Trace, TracingProcessor, set_trace_processors
from agents.tracing import get_current_span, get_trace_provider
from agents.tracing.processors import default_processor

from agl import scope
from agl.scope import RolloutScope
from agl.selection import clean_name
from agl_openai_agents.reporting import Reported, take_call, tell

MOST_SPANS = 10_000
"""Spans that are remembered at once; of a run that is killed the ends are never told, so the oldest are forgotten."""


@dataclass(slots=True)
class Run:
    """One ``Runner.run``, which the input guardrails of its first agent may throw away."""

    calls: list[tuple[Reported, frozenset[str]]] = field(default_factory=list[tuple[Reported, frozenset[str]]])
    """Its model calls, each with the names of the guardrails that may reject it."""


@dataclass(slots=True)
class _Open:
    rollout: RolloutScope
    run: Run
    inside: str
    """The id of the tool call or guardrail around it, else of the trace: what agl calls a parent."""
    agent: str | None = None
    """Who is at work; nobody, where a tool or a guardrail has its own code run."""
    told: dict[str, Any] | None = None
    """What was told at the start of a tool."""


class Watcher(TracingProcessor):
    """Reports tool calls to the rollout that is current when they start; outside of a rollout it does nothing."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def on_span_start(self, span: Span[Any]) -> None:
        """Remember what begins; tell of it when it is a tool."""
        rollout = scope.current_rollout()
        if rollout is None:
            return
        around = self._open.get(span.parent_id or "") or _Open(rollout, Run(), inside=span.trace_id)
        here = _Open(rollout, around.run, around.inside, around.agent)
        match span.span_data.type:
            case "task":
                here.run = Run()
            case "agent":
                here.agent = clean_name(span.span_data.name)
            case "guardrail":
                here.inside, here.agent = span.span_id, None
            case "function":
                here.inside, here.agent = span.span_id, None
                here.told = {"agent": around.agent, "parent": around.inside, "name": span.span_data.name}
                if (call_id := take_call(span.span_data.name)) is not None:
                    here.told["tool_call_id"] = call_id
                tell(rollout, "tool_start", span.span_id, **here.told)
        if len(self._open) >= MOST_SPANS:
            self._open.pop(next(iter(self._open)), None)
        self._open[span.span_id] = here

    def on_span_end(self, span: Span[Any]) -> None:
        """Tell how a tool ended, and which answers a guardrail threw away."""
        here = self._open.pop(span.span_id, None)
        if here is None:
            return
        data = span.span_data
        if here.told is not None:
            if span.error is not None:
                details = span.error.get("data") or {}
                error = details.get("error") or span.error["message"]
                tell(here.rollout, "tool_error", span.span_id, **here.told, error=str(error)[:500])
            else:  # without sensitive data in traces, nobody knows what it returned
                length = {} if data.output is None else {"result_length": scope.result_length(data.output)}
                tell(here.rollout, "tool_end", span.span_id, **here.told, **length)
        elif data.type == "guardrail" and data.triggered:
            for call, guardrails in here.run.calls:
                if data.name in guardrails:
                    call.void(f"the input guardrail {data.name!r} rejected what was asked")

    def here(self) -> tuple[str | None, Run | None]:
        """What the current span lies in, and its run; None where nothing is traced."""
        span = get_current_span()
        found = None if span is None else self._open.get(span.span_id)
        return (None, None) if found is None else (found.inside, found.run)

    def current_agent(self) -> str | None:
        """The agent that is at work in this context."""
        span = get_current_span()
        found = None if span is None else self._open.get(span.span_id)
        return None if found is None else found.agent

    def on_trace_start(self, trace: Trace) -> None:
        """Nothing: spans tell it all."""

    def on_trace_end(self, trace: Trace) -> None:
        """Nothing: spans tell it all."""

    def shutdown(self) -> None:
        """Nothing is held back."""

    def force_flush(self) -> None:
        """Nothing is held back."""


watcher = Watcher()
"""The one of this process: a processor can be added to the SDK, and only all of them can be replaced."""

_lock = threading.Lock()
_watching = 0
_before: tuple[TracingProcessor, ...] = ()


def watch() -> Callable[[], None]:
    """Report tools from now on, in the place of the exporter that would send every prompt to OpenAI.

    Other processors, such as those of a tracing service that the program chose itself, stay.

    Returns:
        How to undo it; the exporter is back when all who asked have undone it.
    """
    global _watching, _before
    with _lock:
        _watching += 1
        if _watching == 1:
            _before = _processors()
            set_trace_processors([*(one for one in _before if one is not default_processor()), watcher])
    undone = False

    def undo() -> None:
        global _watching
        nonlocal undone
        with _lock:
            if undone:
                return
            undone = True
            _watching -= 1
            if _watching == 0:
                added = [one for one in _processors() if one is not watcher and one not in _before]
                set_trace_processors([*_before, *added])

    return undo


def _processors() -> tuple[TracingProcessor, ...]:
    """The SDK offers to replace its processors and not to read them."""
    provider: Any = get_trace_provider()
    return tuple(getattr(getattr(provider, "_multi_processor", None), "_processors", ()))

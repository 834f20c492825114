"""Train any agent of the OpenAI Agents SDK with agl: a run configuration, or nothing at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agl import hookimpl, scope
from agl.scope import CallInfo

if TYPE_CHECKING:
    from agl_openai_agents.configuring import run_config
    from agl_openai_agents.installing import install

__all__ = ["install", "run_config"]


def __getattr__(name: str) -> Any:
    # This module is loaded as a plugin by every `agl` command; the SDK is not, before somebody needs it.
    if name == "run_config":
        from agl_openai_agents import configuring

        return configuring.run_config
    if name == "install":
        from agl_openai_agents import installing

        return installing.install
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_asked: list[list[Callable[[], None]]] = []
"""For each `agl_instrument` that is not undone: how to undo the watching, once it has begun."""


@hookimpl
def agl_instrument() -> Callable[[], None]:
    """Report the tools of every run in this process, and keep its traces from leaving for OpenAI."""
    undo: list[Callable[[], None]] = []
    _asked.append(undo)
    watch_if_asked()

    def stop() -> None:
        _asked[:] = [one for one in _asked if one is not undo]
        while undo:
            undo.pop()()

    return stop


def watch_if_asked() -> None:
    """Begin to watch where `agl_instrument` asked for it, once the SDK is there: its import takes a second."""
    if "agents.tracing" in sys.modules and not all(_asked):
        from agl_openai_agents.tracing import watch

        for undo in _asked:
            if not undo:
                undo.append(watch())


@hookimpl
def agl_current_call() -> CallInfo | None:
    """Name the agent of a run that nobody configured, where neither a label nor `agl.agent` names it."""
    if "agents.tracing" not in sys.modules:
        return None
    watch_if_asked()
    if scope.current_call() is not None:
        return None
    from agl_openai_agents.tracing import watcher

    name = watcher.current_agent()
    return CallInfo(agent=name) if name else None

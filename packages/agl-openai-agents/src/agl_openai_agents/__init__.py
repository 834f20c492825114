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


@hookimpl
def agl_instrument() -> Callable[[], None]:
    """Report the tools of every run in this process, and keep its traces from leaving for OpenAI."""
    from agl_openai_agents.tracing import watch

    return watch()


@hookimpl
def agl_current_call() -> CallInfo | None:
    """Name the agent of a run that nobody configured, where neither a label nor `agl.agent` names it."""
    if "agents.tracing" not in sys.modules or scope.current_call() is not None:
        return None
    from agl_openai_agents.tracing import watcher

    name = watcher.current_agent()
    return CallInfo(agent=name) if name else None

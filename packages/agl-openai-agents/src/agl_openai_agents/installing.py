"""For programs that nobody edits: the SDK's default runner, which gives every run of a context our configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from agents import RunConfig
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from agl import LLM
from agl.selection import Selection
from agl_openai_agents.configuring import routed
from agl_openai_agents.routing import Route, RoutedModel


@dataclass(frozen=True, slots=True)
class _Wanted:
    route: Route
    optimize: Selection


_wanted: ContextVar[_Wanted | None] = ContextVar("agl_openai_agents", default=None)


class _Runner(AgentRunner):
    """The runner that was there before, with our configuration where it is wanted."""

    def __init__(self, before: AgentRunner) -> None:
        self.before = before

    async def run(self, starting_agent: Any, input: Any, **options: Any) -> Any:
        return await self.before.run(starting_agent, input, **_configured(options))

    def run_sync(self, starting_agent: Any, input: Any, **options: Any) -> Any:
        return self.before.run_sync(starting_agent, input, **_configured(options))

    def run_streamed(self, starting_agent: Any, input: Any, **options: Any) -> Any:
        return self.before.run_streamed(starting_agent, input, **_configured(options))


def _configured(options: dict[str, Any]) -> dict[str, Any]:
    wanted, given = _wanted.get(), options.get("run_config")
    config = given if isinstance(given, RunConfig) else RunConfig(**(given or {}))
    if wanted is None or isinstance(config.model, RoutedModel):
        return options
    return {**options, "run_config": routed(wanted.route, wanted.optimize, config)}


_lock = threading.Lock()
_installed = 0
_runner: _Runner | None = None


def install(
    llm: LLM, optimize: Sequence[str] | None = None, *, use_responses: bool | None = None
) -> Callable[[], None]:
    """Let the agents of every run of this context ask ``llm``, and of all tasks that inherit the context.

    The arguments are those of `run_config`. A configuration that a run is given holds.

    Returns:
        How to undo it. At the end of a rollout nothing needs to be undone: its context ends with it, and elsewhere the
        runner does what it did before.
    """
    global _installed, _runner
    token = _wanted.set(_Wanted(Route(llm, use_responses), Selection(optimize)))
    with _lock:
        _installed += 1
        if _runner is None:
            _runner = _Runner(get_default_agent_runner())
            set_default_agent_runner(_runner)
    before = token.old_value if token.old_value is not token.MISSING else None
    undone = False

    def undo() -> None:
        global _installed, _runner
        nonlocal undone
        with _lock:
            if undone:
                return
            undone = True
            _installed -= 1
            if _installed == 0 and _runner is not None and get_default_agent_runner() is _runner:
                set_default_agent_runner(_runner.before)
                _runner = None
        _wanted.set(before)

    return undo

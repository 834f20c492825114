"""agl: reinforcement learning for the language model inside any agent, without touching the agent."""

from typing import TYPE_CHECKING, Any

from agl.errors import AglError, RunError, UsageError
from agl.records import Call, Reward, Rollout, Row, Step, Task, Transition
from agl.scope import agent, current_rollout, wrap

if TYPE_CHECKING:
    from agl.hookspecs import hookimpl, hookspec
    from agl.llm import LLM

__all__ = [
    "LLM",
    "AglError",
    "Call",
    "Reward",
    "Rollout",
    "Row",
    "RunError",
    "Step",
    "Task",
    "Transition",
    "UsageError",
    "agent",
    "current_rollout",
    "hookimpl",
    "hookspec",
    "wrap",
]

_ON_DEMAND = {"LLM": "agl.llm", "hookimpl": "agl.hookspecs", "hookspec": "agl.hookspecs"}
"""What needs the plugin manager, which is more than half of the time to import all; agents seldom name these."""


def __getattr__(name: str) -> Any:
    """Import a name of `_ON_DEMAND` when it is first asked for (PEP 562)."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'agl' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_ON_DEMAND[name]), name)
    return value

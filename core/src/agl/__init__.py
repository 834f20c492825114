"""agl: reinforcement learning for the language model inside any agent, without touching the agent."""

from agl.errors import AglError, RunError, UsageError
from agl.hookspecs import hookimpl, hookspec
from agl.llm import LLM
from agl.records import Call, Reward, Rollout, Row, Step, Task, Transition
from agl.scope import agent, current_rollout, wrap

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

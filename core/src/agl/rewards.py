"""Default reward plugin: what the agent function returned, and what tools signalled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl.errors import RewardError
from agl.hookspecs import hookimpl
from agl.records import Rollout, Step, as_number

__all__ = ["agl_compute_reward", "agl_signal_reward", "as_number", "sum_parts"]


@hookimpl
def agl_compute_reward(rollout: Rollout) -> Mapping[str, float] | None:
    """The shared parts that the agent function returned; None when it returned none (unscored)."""
    return rollout.returned.parts if rollout.returned is not None else None


@hookimpl
def agl_signal_reward(step: Step) -> float | None:
    """A tool that succeeded signals 1, one that failed -1 (automatic intermediate rewards, arXiv 2508.03680 §3.3)."""
    return {"tool_end": 1.0, "tool_error": -1.0}.get(step.kind)


def sum_parts(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add parts of the same name.

    Raises:
        RewardError: an answer that is no mapping, or a part that is not a finite number.
    """
    parts: dict[str, float] = {}
    for answer in cast("Sequence[Any]", answers):
        if not isinstance(answer, Mapping):
            raise RewardError(f"agl_compute_reward returned {answer!r}; return named parts, such as {{'reward': 1.0}}")
        for name, value in cast("Mapping[str, Any]", answer).items():
            parts[name] = parts.get(name, 0.0) + as_number(name, value)
    return parts

"""Default reward plugin: what the agent function returned, and what tools signalled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agl.hookspecs import hookimpl
from agl.records import Rollout, Step, as_number, check_finite

__all__ = ["agl_compute_reward", "agl_signal_reward", "check_finite", "sum_parts"]


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
        RewardError: a part that is not a finite number.
    """
    parts: dict[str, float] = {}
    for answer in answers:
        for name, value in answer.items():
            parts[name] = parts.get(name, 0.0) + as_number(name, value)
    return parts

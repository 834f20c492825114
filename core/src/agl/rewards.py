"""Default reward plugin: what the agent function returned, and what the framework's callbacks signal."""

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
def agl_signal_reward(step: Step) -> Mapping[str, float] | None:
    """What a framework's callbacks tell (automatic intermediate rewards, arXiv 2508.03680 §3.3): 1 where it happened.

    ``tool_success``, ``tool_error``: how a tool ended. ``empty_result``: it returned nothing. ``parse_failure``: a
    tool call of the model, or its answer to an output parser, could not be read. The weight has the sign.
    """
    data = step.data
    match step.kind:
        case "tool_end":
            failed = data.get("status") == "error"
            empty = not failed and data.get("result_length") == 0
            return {"tool_success": float(not failed), "tool_error": float(failed), "empty_result": float(empty)}
        case "tool_error":
            return {"tool_error": 1.0}
        case "model_end":
            return {"parse_failure": float(bool(data.get("unparsed")))}
        case "parser_error":
            return {"parse_failure": 1.0}
        case _:
            return None


def sum_parts(answers: Sequence[Mapping[str, float]], hook: str = "agl_compute_reward") -> dict[str, float]:
    """Add parts of the same name; ``hook`` is whose answers they are.

    Raises:
        RewardError: an answer that is no mapping, or a part that is not a finite number.
    """
    parts: dict[str, float] = {}
    for answer in cast("Sequence[Any]", answers):
        if not isinstance(answer, Mapping):
            raise RewardError(f"{hook} returned {answer!r}; return named parts, such as {{'reward': 1.0}}")
        for name, value in cast("Mapping[str, Any]", answer).items():
            parts[name] = parts.get(name, 0.0) + as_number(name, value)
    return parts

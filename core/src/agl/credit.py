"""Default credit: every transition receives the whole reward of its agent (LightningRL's identity assignment)."""

from __future__ import annotations

from collections.abc import Sequence

from agl.hookspecs import hookimpl
from agl.records import Rollout, Transition


@hookimpl(trylast=True)
def agl_assign_credit(rollout: Rollout, transitions: Sequence[Transition]) -> Sequence[float] | None:
    """Shared parts plus the agent's own, to every transition of that agent (arXiv 2508.03680 §3.2)."""
    if rollout.returned is None:
        return None
    return [rollout.returned.for_agent(transition.agent) for transition in transitions]

"""Which agent makes a call, by what LangChain and LangGraph tell about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl.selection import clean_name


def name_agent(metadata: Mapping[str, Any], run_name: str | None) -> str | None:
    """The agent's name: what the author wrote, else the agent's own name, else its place in the graph, else the run's.

    Args:
        metadata: of the run; LangChain hands it down from the run around it.
        run_name: of the model's own run.

    Returns:
        None when nothing names it.
    """
    for name in (
        metadata.get("agl_agent"),
        metadata.get("lc_agent_name"),
        _place(metadata.get("langgraph_checkpoint_ns")),
        metadata.get("langgraph_node"),
        run_name,
    ):
        if isinstance(name, str) and (clean := clean_name(name)):
            return clean
    return None


def _place(namespace: Any) -> str | None:
    """``writer:<uuid>|model:<uuid>`` is ``writer/model``: the path of nodes, without what changes from run to run."""
    if not isinstance(namespace, str):
        return None
    parts = [part.partition(":")[0] for part in namespace.split("|") if not part.isdigit()]
    return "/".join(parts)

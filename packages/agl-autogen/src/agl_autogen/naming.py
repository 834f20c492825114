"""Which agent makes a call, by what AutoGen tells about the present moment: for teams that nobody wrapped."""

from __future__ import annotations

import re

from autogen_core import MessageHandlerContext
from opentelemetry import trace

from agl.selection import clean_name
from agl_autogen.reporting import current_tool

MANAGERS = {"SelectorGroupChatManager": "SelectorGroupChat", "MagenticOneOrchestrator": "MagenticOneGroupChat"}
"""The parts of a team that call a model themselves, and the name of such a team unless its author gave another."""

_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


def current_agent() -> str | None:
    """The agent that AutoGen says is at work: the span it opened, else the message that is being handled.

    The span is there only where the program sets up OpenTelemetry. It is the more exact of the two: an agent that
    runs as another one's tool handles no message of its own. While a tool runs, nobody is named: what the tool
    asks of a model is not the agent's own call.
    """
    if current_tool() is not None:
        return None
    attributes = getattr(trace.get_current_span(), "attributes", None) or {}
    if attributes.get("gen_ai.operation.name") == "execute_tool":
        return None
    name = attributes.get("gen_ai.agent.name")
    if isinstance(name, str):
        return clean_name(name)
    try:
        kind = MessageHandlerContext.agent_id().type
    except RuntimeError:  # outside of a message handler
        return None
    name = _TEAM_ID.sub("", kind)
    return clean_name(MANAGERS.get(name, name))

"""Where the agents of a team keep their model clients and workbenches.

They lie in attributes of agents, of teams that ask a model themselves, and of what these hold: tools that are
agents, workbenches, memories, inner teams. AutoGen calls all of these components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from autogen_agentchat.base import ChatAgent, Team
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import AgentId, ComponentBase
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import Workbench

from agl.selection import clean_name


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute that holds a model client, a workbench, or several workbenches."""

    owner: Any
    attribute: str
    agent: str
    """The agent, or the team, whose calls go through it."""

    @property
    def value(self) -> Any:
        """What lies there now."""
        return vars(self.owner).get(self.attribute)

    def put(self, value: Any) -> None:
        """Lay something else there."""
        setattr(self.owner, self.attribute, value)


def client_slots(team: ChatAgent | Team) -> list[Slot]:
    """Where model clients lie, before the team has run."""
    return [
        slot
        for component, agent in _components(team)
        for slot in _slots(component, agent)
        if isinstance(slot.value, ChatCompletionClient)
    ]


async def all_slots(team: ChatAgent | Team) -> list[Slot]:
    """All places, those of managers too: a team builds its manager, around the client that it finds, when it runs."""
    found: list[Slot] = []
    for component, agent in _components(team):
        found += _slots(component, agent)
        if isinstance(component, BaseGroupChat) and (manager := await _manager(component)) is not None:
            found += _slots(manager, agent)
    return found


def _components(root: Any) -> Iterator[tuple[Any, str]]:
    """Everything in a team, each once, with the agent it belongs to: the nearest one around it."""
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(root, "")]
    while waiting:
        component, agent = waiting.pop()
        if id(component) in seen:
            continue
        seen.add(id(component))
        if isinstance(component, ChatAgent | Team):
            agent = clean_name(component.name)
        yield component, agent
        waiting += [(inner, agent) for inner in _parts(component)]


def _parts(component: Any) -> list[Any]:
    values = [one for value in vars(component).values() for one in _each(value)]
    return [one for one in values if isinstance(one, ComponentBase) and not isinstance(one, ChatCompletionClient)]


def _each(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(cast("Mapping[Any, Any]", value).values())
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple | set) else [value]


def _slots(owner: Any, agent: str) -> list[Slot]:
    return [
        Slot(owner, attribute, agent)
        for attribute, value in vars(owner).items()
        if isinstance(value, ChatCompletionClient)
        or (isinstance(owner, ChatAgent) and any(isinstance(one, Workbench) for one in _each(value)))
    ]


async def _manager(team: Any) -> Any | None:
    """The part of a team that picks speakers; None before the team's first run, or where it runs on another machine."""
    try:
        address = AgentId(team._group_chat_manager_topic_type, team._team_id)
        return await team._runtime.try_get_underlying_agent_instance(address)
    except (LookupError, NotImplementedError):
        return None

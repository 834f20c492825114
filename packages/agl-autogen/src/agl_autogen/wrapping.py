"""Wrap a team: for the length of a run its agents ask the policy, and every call is told; then it is as it was.

AutoGen's agents and teams keep their model client and workbenches in attributes. During a run stand-ins lie there;
nothing else is touched, and no class is patched.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Self, cast

from autogen_agentchat.base import ChatAgent, TaskResult, Team
from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core.models import ChatCompletionClient

from agl import LLM, scope
from agl.errors import UsageError
from agl.selection import Selection, clean_name
from agl_autogen.clients import Route, WatchedClient
from agl_autogen.reporting import Run, tool_not_executed
from agl_autogen.slots import Slot, all_slots, client_slots
from agl_autogen.tools import watch


def wrap(team: ChatAgent | Team, llm: LLM, optimize: Sequence[str] | None = None) -> Wrapped:
    """Let the agents of a team, or one agent, ask ``llm`` while they run.

    Args:
        team: as its author wrote it; any agent, team, or team of teams.
        llm: what the agent function received.
        optimize: exact names or globs of agents. It only narrows what the trainer selects; agents that are not selected
            by both keep their own client. A team that asks a model itself is named by the team's name,
            which is ``SelectorGroupChat`` or ``MagenticOneGroupChat`` unless its author gave another.

    Raises:
        UsageError: no agent or team, or none of its agents has a model client.
        SelectionError: a name in ``optimize`` matches no agent of the team.
    """
    if not isinstance(cast(Any, team), ChatAgent | Team):
        raise UsageError(f"wrap() takes an agent or a team of AutoGen, not {type(team).__name__}")
    return Wrapped(team, llm, Selection(optimize))


class Wrapped:
    """A team whose agents ask the policy: ``run`` and ``run_stream`` are those of the team, and so is all else.

    To do more than one thing with the team, or to build a larger one around it, hold it open:
    ``async with wrap(team, llm): ...``
    """

    def __init__(self, team: ChatAgent | Team, llm: LLM, optimize: Selection) -> None:
        self.team = team
        """The author's."""
        self.llm = llm
        self._rollout = scope.current_rollout()
        self._optimize = optimize
        self._open = 0
        self._run = Run(llm, self._rollout)
        self._route: Route | None = None
        self._put: list[tuple[Slot, Any, Any]] = []
        """What lies where now, and what lay there before."""
        agents = {slot.agent for slot in client_slots(team)}
        if not agents:
            raise UsageError(f"no agent of the {type(team).__name__} {team.name!r} has a model client; nothing to wrap")
        optimize.check(agents)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the team offers."""
        return getattr(self.__dict__["team"], name)

    async def run(self, **arguments: Any) -> TaskResult:
        """``team.run(**arguments)``."""
        async with self:
            result = await self.team.run(**arguments)
            for message in result.messages:
                self._observe(message)
            return result

    async def run_stream(self, **arguments: Any) -> AsyncGenerator[Any, None]:
        """``team.run_stream(**arguments)``."""
        async with self, aclosing(cast("AsyncGenerator[Any]", self.team.run_stream(**arguments))) as messages:
            async for message in messages:
                self._observe(message)
                yield message

    def _observe(self, message: Any) -> None:
        """Tell of the tool calls that no workbench saw."""
        if isinstance(message, ToolCallExecutionEvent):
            for result in message.content:
                if self._run.executed[result.call_id]:
                    self._run.executed[result.call_id] -= 1
                else:
                    tool_not_executed(self._run, clean_name(message.source), result)

    # ------------------------------------------------------------------------------------------------- open and close

    async def __aenter__(self) -> Self:
        """Put the stand-ins in their places."""
        slots = await all_slots(self.team)
        if self._open == 0:
            for slot in slots:
                self._check_free(slot)
            self._run, self._route = Run(self.llm, self._rollout), Route(self.llm)
            for slot in slots:
                self._occupy(slot, self._route)
        self._open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        """Put back what the author put there."""
        self._open -= 1
        if self._open or self._route is None:
            return
        run, route = self._run, self._route
        for slot, now, before in reversed(self._put):
            if slot.value is now:
                slot.put(before)
        self._put.clear()
        for slot in await all_slots(self.team):  # what the run itself built around the clients that it found
            if isinstance(slot.value, WatchedClient) and slot.value.run is run:
                slot.put(slot.value.own)
        await route.close()

    def _check_free(self, slot: Slot) -> None:
        client = slot.value
        if isinstance(client, WatchedClient) and client.run.llm is not self.llm:
            raise UsageError(
                f"agent {slot.agent!r} is at work for another rollout. AutoGen's agents remember what was said, "
                "so each rollout needs its own: build the team inside the agent function"
            )

    def _occupy(self, slot: Slot, route: Route) -> None:
        before = slot.value
        if isinstance(before, WatchedClient):  # wrapped twice, for the same rollout
            return
        if isinstance(before, ChatCompletionClient):
            now: Any = WatchedClient(before, route if self._selects(slot.agent) else None, slot.agent, self._run)
        elif isinstance(before, list | tuple):
            now = [watch(one, slot.agent, self._run) for one in cast("Sequence[Any]", before)]
        else:
            now = watch(before, slot.agent, self._run)
        slot.put(now)
        self._put.append((slot, now, before))

    def _selects(self, agent: str) -> bool:
        return agent in self._optimize and (self._rollout is None or agent in self._rollout.selection)

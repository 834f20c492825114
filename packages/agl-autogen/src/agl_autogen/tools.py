"""Workbenches: the ones that stand in for an agent's own during a run, so that its tool calls are told as they run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from autogen_core import CancellationToken, ComponentModel
from autogen_core.tools import StaticStreamWorkbench, ToolResult, ToolSchema, Workbench

from agl import scope
from agl_autogen.reporting import Reported, Run, tool_call


class WatchedWorkbench(Workbench):
    """Hands everything on to an agent's own workbench, and tells the run of each tool call."""

    def __init__(self, own: Any, agent: str, run: Run) -> None:
        self.own = own
        self.agent = agent
        self.run = run

    def __getattr__(self, name: str) -> Any:
        """Whatever else the agent's own workbench offers."""
        return getattr(self.__dict__["own"], name)

    async def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> ToolResult:
        """Run a tool."""
        with tool_call(self.run, self.agent, name, call_id) as call:
            result = await self.own.call_tool(name, arguments, cancellation_token, call_id)
            _judge(call, result)
            return result

    async def list_tools(self) -> list[ToolSchema]:
        """The tools of the agent's own workbench."""
        return await self.own.list_tools()

    async def start(self) -> None:
        """Start the agent's own workbench."""
        await self.own.start()

    async def stop(self) -> None:
        """Stop the agent's own workbench."""
        await self.own.stop()

    async def reset(self) -> None:
        """Reset the agent's own workbench."""
        await self.own.reset()

    async def save_state(self) -> Mapping[str, Any]:
        """The state of the agent's own workbench."""
        return await self.own.save_state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Give the agent's own workbench its state."""
        await self.own.load_state(state)

    def dump_component(self) -> ComponentModel:
        """The agent's own workbench."""
        return self.own.dump_component()


class WatchedStreamWorkbench(WatchedWorkbench, StaticStreamWorkbench):
    """The same for tools that stream: an agent streams from this kind only."""

    async def call_tool_stream(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None,
        call_id: str | None = None,
    ) -> AsyncGenerator[Any | ToolResult, None]:
        """Run a tool, and hand on what it says on the way."""
        with tool_call(self.run, self.agent, name, call_id) as call:
            async with aclosing(self.own.call_tool_stream(name, arguments, cancellation_token, call_id)) as events:
                async for event in events:
                    if isinstance(event, ToolResult):
                        _judge(call, event)
                    yield event


def _judge(call: Reported, result: ToolResult) -> None:
    text = result.to_text(replace_image="an image")
    call.fail(text) if result.is_error else call.end(result_length=scope.result_length(text))


def watch(workbench: Workbench, agent: str, run: Run) -> Workbench:
    """The stand-in for a workbench; one that has a stand-in already keeps it."""
    if isinstance(workbench, WatchedWorkbench):
        return workbench
    kind = WatchedStreamWorkbench if isinstance(workbench, StaticStreamWorkbench) else WatchedWorkbench
    return kind(workbench, agent, run)

"""Teams that nobody wrapped: whom the plugin names, by what AutoGen tells about the present moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import Played
from agl_autogen import model_client

Rollout = Callable[..., Any]


def picks_writer(_: str, labels: Mapping[str, str]) -> str:
    return "writer" if labels.get("agent") == "SelectorGroupChat" else "a text"


def test_the_plugin_is_loaded_without_autogen():
    code = "import sys, agl.plugins; agl.plugins.current_call(); sys.exit('autogen_core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


async def unwrapped(llm: agl.LLM) -> None:
    client = model_client(llm)
    agents = [AssistantAgent(name, client, system_message=None) for name in ("writer", "critic")]
    await SelectorGroupChat(agents, client, max_turns=1).run(task="hi")
    with agl.agent("judge"):
        await agents[0].run(task="hi")
    await agents[0].run(task="hi")


async def test_a_team_that_nobody_wrapped_is_named_by_the_message_at_hand(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(picks_writer)
    (await rollout(unwrapped)).expect("SelectorGroupChat", "writer", "judge", "main")


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry, set up as a program does; the tracers of AutoGen are made when a span starts."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())


async def test_where_there_is_telemetry_an_agent_alone_is_named_too(
    telemetry: None, rollout: Rollout, server: ModelServer
):
    server.engine = ScriptedEngine(picks_writer)
    (await rollout(unwrapped)).expect("SelectorGroupChat", "writer", "judge", "writer")


async def test_where_there_is_telemetry_an_agent_that_is_a_tool_is_named_and_a_tool_is_nobody(
    telemetry: None, rollout: Rollout, server: ModelServer
):
    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        if "<|im_start|>tool\n" in prompt or labels["agent"] != "manager":
            return "done"
        return tool_call("solver", task="6 x 7") + tool_call("look_up", word="agl")

    server.engine = ScriptedEngine(reply)

    async def agent(llm: agl.LLM) -> None:
        async def look_up(word: str) -> str:
            """Look a word up."""
            async with llm.async_client() as client:
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}])
            return "found"

        solver = AssistantAgent("solver", model_client(llm), system_message=None)
        tools: Any = [AgentTool(solver), look_up]
        manager = AssistantAgent("manager", model_client(llm), tools=tools, max_tool_iterations=2)
        await RoundRobinGroupChat([manager], max_turns=1).run(task="hi")

    played: Played = await rollout(agent)
    played.expect("manager", "solver", "main", "manager")


async def test_a_client_for_the_policy_says_who_calls_in_a_team_that_nobody_wrapped(rollout: Any):
    async def agent(llm: agl.LLM) -> None:
        client = model_client(llm, temperature=0.5)
        writer, critic = (AssistantAgent(name, client, system_message=None) for name in ("writer", "critic"))
        team = SelectorGroupChat([writer, critic], client, max_turns=1, selector_func=lambda _: "critic")
        await team.run(task="hi")

    played = await rollout(agent)
    played.expect("critic")
    assert played.exchanges[0].body["temperature"] == 0.5
    assert not played.rollout.steps

"""Recorded exchanges of real models drive real AutoGen programs: the same requests leave, under the right names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.transitions import build_rows
from agl_autogen import wrap

Json = Mapping[str, Any]


@pytest.fixture
def traces(data_dir: Path) -> Path:
    return data_dir / "traces"


def said(message: Json) -> str:
    """What the model wrote, as the scripted model writes it."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (message.get("content") or "") + "".join(
        tool_call(call["name"], **json.loads(call["arguments"])) for call in calls
    )


def script(replies: Sequence[Json]) -> ScriptedEngine:
    return ScriptedEngine([said(reply) for reply in replies])


def comparable(messages: Sequence[Json]) -> list[Any]:
    """Messages without what differs between two runs: ids of tool calls, spaces in JSON, the model's own name."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
            message.get("name") if message["role"] == "user" else None,
        )
        for message in messages
        for calls in [message.get("tool_calls") or []]
    ]


def asked(played: Any) -> list[Any]:
    return [comparable(exchange.body["messages"]) for exchange in played.exchanges]


def streamed(body: str) -> Json:
    """The message that a recorded stream adds up to."""
    content, calls = "", {}
    for line in body.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                known = calls.setdefault(call["index"], {"name": "", "arguments": ""})
                for key in known:
                    known[key] += call["function"].get(key) or ""
    return {"content": content, "tool_calls": [{"function": call} for call in calls.values()]}


def writer_and_critic(assistant: Callable[..., AssistantAgent], system: Sequence[str]) -> RoundRobinGroupChat:
    """The team of the recordings, from AutoGen's own tutorial."""
    primary = assistant("primary", system_message=system[0])
    critic = assistant("critic", system_message=system[1])
    return RoundRobinGroupChat([primary, critic], termination_condition=TextMentionTermination("APPROVE"), max_turns=4)


@pytest.mark.parametrize("optimize", [None, ["critic"]])
async def test_the_writer_and_critic_of_agent_lightning(
    optimize: list[str] | None, traces: Path, rollout: Any, assistant: Any, server: ModelServer, own: ModelServer
):
    lines = (traces / "cassettes/agl_prompt_caches.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines[9:13]]
    requests = [one["request"] for one in recorded]
    replies = [one["response"]["choices"][0]["message"] for one in recorded]
    selected = replies if optimize is None else replies[1::2]
    server.engine, own.engine = script(selected), script(replies[::2])
    team = writer_and_critic(assistant, [request["messages"][0]["content"] for request in requests[:2]])
    played = await rollout(lambda llm: wrap(team, llm, optimize).run(task=requests[0]["messages"][1]["content"]))
    played.expect(*["primary", "critic"] * 2 if optimize is None else ["critic"] * 2)
    expected = [comparable(request["messages"]) for request in requests]
    assert asked(played) == (expected if optimize is None else expected[1::2])
    assert [step.agent for step in played.steps("model_end")] == ["primary", "critic"] * 2
    rows = build_rows(played.transitions)
    assert [row.agent for row in rows] == (["primary", "critic"] if optimize is None else ["critic"])


async def test_the_writer_and_critic_of_openinference(traces: Path, rollout: Any, assistant: Any, server: ModelServer):
    recorded = json.loads((traces / "cassettes/autogen_team.json").read_text())
    requests = [one["request"] for one in recorded]
    server.engine = script([json.loads(one["response"])["choices"][0]["message"] for one in recorded])
    team = writer_and_critic(assistant, [request["messages"][0]["content"] for request in requests[:2]])

    async def agent(llm: agl.LLM) -> None:
        task = requests[0]["messages"][1]["content"]
        assert [message async for message in wrap(team, llm).run_stream(task=task)]

    played = await rollout(agent)
    played.expect(*(["primary", "critic"] * len(requests))[: len(requests)])
    assert asked(played) == [comparable(request["messages"]) for request in requests]


async def test_the_streaming_weather_agent_of_openinference(
    traces: Path, rollout: Any, assistant: Any, server: ModelServer
):
    recorded = json.loads((traces / "cassettes/autogen_assistant.json").read_text())
    server.engine = script([streamed(one["response"]) for one in recorded])

    async def get_weather(city: str) -> str:
        """Get the weather for a given city."""
        return f"The weather in {city} is 73 degrees and Sunny."

    first = recorded[0]["request"]
    agent = assistant(
        "weather_agent",
        tools=[get_weather],
        system_message=first["messages"][0]["content"],
        model_client_stream=True,
        reflect_on_tool_use=True,
    )

    async def run(llm: agl.LLM) -> None:
        assert [m async for m in wrap(agent, llm).run_stream(task=first["messages"][1]["content"])]

    played = await rollout(run)
    played.expect("weather_agent", "weather_agent")
    assert [step.name for step in played.steps("tool_end")] == ["get_weather"]
    assert asked(played) == [comparable(one["request"]["messages"]) for one in recorded]
    assert [bool(exchange.body.get("tools")) for exchange in played.exchanges] == [True, False]


async def test_the_calculator_whose_truth_is_known(traces: Path, rollout: Any, assistant: Any, server: ModelServer):
    truth = json.loads((traces / "truth/autogen_calc.truth.json").read_text())
    calls = truth["calls"]
    server.engine = script([call["response"]["message"] for call in calls])

    def calculator(expression: str) -> str:
        """Evaluate a+b, a-b, a*b or a/b."""
        return {"2/2": "1.0", "2+1": "3.0"}[expression]

    request = calls[0]["request"]
    solver = assistant(
        "solver", tools=[calculator], system_message=request["messages"][0]["content"], max_tool_iterations=5
    )

    async def agent(llm: agl.LLM) -> None:
        result = await wrap(solver, llm).run(task=request["messages"][1]["content"])
        assert [(m.source, type(m).__name__) for m in result.messages] == [
            (message["source"], message["type"]) for message in truth["messages"]
        ]

    played = await rollout(agent)
    played.expect(*["solver"] * len(calls))
    assert asked(played) == [comparable(call["request"]["messages"]) for call in calls]
    assert [exchange.body["tools"] for exchange in played.exchanges] == [call["request"]["tools"] for call in calls]
    assert [step.name for step in played.steps("tool_end")] == ["calculator", "calculator"]
    (row,) = build_rows(played.transitions)
    assert sum(row.sampled) == sum(len(one.response_ids) for one in played.transitions)

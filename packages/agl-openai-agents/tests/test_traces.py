"""Recorded exchanges of real models drive real programs of the Agents SDK: the same requests leave, rightly named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelSettings,
    Runner,
    function_tool,
)
from pydantic import BaseModel

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.transitions import build_rows
from agl_openai_agents import run_config

Json = Mapping[str, Any]
Rollout = Callable[..., Any]
both = pytest.mark.parametrize("use_responses", [False, True], ids=["chat", "responses"])


def said(message: Json) -> str:
    """What the model wrote, as the scripted model writes it."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (message.get("content") or "") + "".join(
        tool_call(call["name"], **json.loads(call["arguments"])) for call in calls
    )


def comparable(messages: Sequence[Json]) -> list[Any]:
    """Messages without what differs between two runs: ids of tool calls, spaces in JSON."""
    return [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls],
        )
        for message in messages
        for calls in [message.get("tool_calls") or []]
    ]


class Recorded:
    """Some exchanges of agentlightning's own tests with gpt-4.1-mini, in their order."""

    def __init__(self, data: Path, first: int, last: int) -> None:
        lines = (data / "traces/cassettes/agl_prompt_caches.jsonl").read_text().splitlines()
        exchanges = [json.loads(line) for line in lines[first : last + 1]]
        requests = [one["request"] for one in exchanges]
        self.system = [request["messages"][0]["content"] for request in requests]
        self.question = requests[0]["messages"][-1]["content"]
        self.messages = [comparable(request["messages"]) for request in requests]
        self.tools = [[tool["function"]["name"] for tool in request.get("tools", ())] for request in requests]
        self.formats = [request.get("response_format") for request in requests]
        self.replies = [said(one["response"]["choices"][0]["message"]) for one in exchanges]

    def check(self, played: Any, order: Sequence[int] | None = None) -> None:
        """The same requests left."""
        exchanges = played.exchanges if order is None else [played.exchanges[index] for index in order]
        assert [comparable(one.body["messages"]) for one in exchanges] == self.messages
        assert [[tool["function"]["name"] for tool in one.body.get("tools", ())] for one in exchanges] == self.tools
        assert [one.body.get("response_format") for one in exchanges] == self.formats


class MathOutput(BaseModel):
    answer: int


class OutputType(BaseModel):
    response: float


class HomeworkOutput(BaseModel):
    is_homework: bool
    reasoning: str


def add(a: int, b: int) -> int:
    return a + b


def calculate(expression: str) -> str:
    """Calculates/evaluates the given expression."""
    return json.dumps(
        {"type": "text", "text": {"43*57": "2451"}[expression], "annotations": None}, separators=(",", ":")
    )


@both
async def test_the_handoffs_of_agent_lightning(
    use_responses: bool, data_dir: Path, rollout: Rollout, server: ModelServer
):
    recorded = Recorded(data_dir, 18, 21)
    server.engine = ScriptedEngine(recorded.replies)
    mathematician = Agent(
        "MathAgent", instructions=recorded.system[1], tools=[function_tool(add)], output_type=MathOutput
    )
    historian = Agent("HistoryAgent", instructions="Answer history questions.")
    triage = Agent("TriageAgent", instructions=recorded.system[0], handoffs=[mathematician, historian])
    judge = Agent("Judge", instructions=recorded.system[3], output_type=OutputType)
    rewards: list[float] = []

    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm, use_responses=use_responses)
        result = await Runner.run(triage, recorded.question, run_config=config)
        verdict = await Runner.run(judge, str(result.final_output.answer), run_config=config)
        rewards.append(verdict.final_output.response)

    played = await rollout(agent)
    played.expect("TriageAgent", "MathAgent", "MathAgent", "Judge")
    recorded.check(played)
    assert rewards == [1.0]
    assert [(step.name, step.agent) for step in played.steps("tool_end")] == [
        ("transfer_to_mathagent", "TriageAgent"),
        ("add", "MathAgent"),
    ]
    assert sorted(row.agent for row in build_rows(played.transitions)) == ["Judge", "MathAgent", "TriageAgent"]


async def test_the_other_handoff(data_dir: Path, rollout: Rollout, server: ModelServer):
    recorded = Recorded(data_dir, 22, 23)
    server.engine = ScriptedEngine(recorded.replies)
    others = [Agent("MathAgent"), Agent("HistoryAgent", instructions=recorded.system[1])]
    triage = Agent("TriageAgent", instructions=recorded.system[0], handoffs=others)  # pyright: ignore
    played = await rollout(lambda llm: Runner.run(triage, recorded.question, run_config=run_config(llm)))
    played.expect("TriageAgent", "HistoryAgent")
    recorded.check(played)


async def test_the_guardrail_of_agent_lightning(data_dir: Path, rollout: Rollout, server: ModelServer):
    recorded = Recorded(data_dir, 14, 15)
    names = ("Guardrail check", "Homework agent")
    replies = dict(zip(names, recorded.replies, strict=True))
    server.engine = ScriptedEngine(lambda prompt, labels: replies[labels["agent"]])
    guard = Agent(names[0], instructions=recorded.system[0], output_type=HomeworkOutput)

    async def agent(llm: agl.LLM) -> None:
        async def about_homework(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
            result = await Runner.run(guard, given, context=context.context, run_config=run_config(llm))
            return GuardrailFunctionOutput(result.final_output, tripwire_triggered=not result.final_output.is_homework)

        guards = [InputGuardrail(about_homework)]
        main = Agent(names[1], instructions=recorded.system[1], input_guardrails=guards)  # pyright: ignore
        await Runner.run(main, recorded.question, run_config=run_config(llm))

    played = await rollout(agent)
    played.expect(*names)
    asking = [exchange.headers["x-agl-agent"] for exchange in played.exchanges]
    recorded.check(played, [asking.index(name) for name in ("Guardrail check", "Homework agent")])


@both
@pytest.mark.parametrize("streaming", [False, True])
async def test_the_calculator_of_agent_lightning(
    streaming: bool, use_responses: bool, data_dir: Path, rollout: Rollout, server: ModelServer
):
    recorded = Recorded(data_dir, 16, 17)
    server.engine = ScriptedEngine(recorded.replies)
    writer = Agent("calculator", instructions=recorded.system[0], tools=[function_tool(calculate)])

    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm, use_responses=use_responses)
        if streaming:
            result = Runner.run_streamed(writer, recorded.question, run_config=config)
            assert [event async for event in result.stream_events()]
        else:
            result = await Runner.run(writer, recorded.question, run_config=config)
        assert result.final_output == recorded.replies[1]

    played = await rollout(agent)
    played.expect("calculator", "calculator")
    recorded.check(played)
    assert len(build_rows(played.transitions)) == 1


@both
@pytest.mark.parametrize("name", ["openai_agents_rag", "openai_agents_tool_error"])
async def test_programs_whose_truth_is_known(
    name: str, use_responses: bool, data_dir: Path, rollout: Rollout, server: ModelServer
):
    truth = json.loads((data_dir / f"traces/truth/{name}.truth.json").read_text())
    native = json.loads((data_dir / f"traces/native/{name}.native.json").read_text())
    calls = truth["calls"]
    server.engine = ScriptedEngine([said(call["response"]["message"]) for call in calls])
    results = [m["content"] for m in calls[-1]["request"]["messages"] if m["role"] == "tool"]
    returns = iter(results)

    def retrieve(query: str) -> str:
        """Search Wikipedia passages."""
        if not query:
            raise ValueError("no query")
        return next(returns)

    system, question = (message["content"] for message in calls[0]["request"]["messages"][:2])
    settings = ModelSettings(temperature=calls[0]["request"]["temperature"])
    rag = Agent(truth["last_agent"], instructions=system, tools=[function_tool(retrieve)], model_settings=settings)

    async def agent(llm: agl.LLM) -> None:
        result = await Runner.run(rag, question, run_config=run_config(llm, use_responses=use_responses))
        assert (result.final_output, result.last_agent.name) == (truth["final"], truth["last_agent"])

    played = await rollout(agent)
    played.expect(*[truth["last_agent"]] * len(calls))
    assert [comparable(one.body["messages"]) for one in played.exchanges] == [
        comparable(call["request"]["messages"]) for call in calls
    ]
    assert [one.body["temperature"] for one in played.exchanges] == [0.7] * len(calls)
    assert played.exchanges[0].body["tools"] == calls[0]["request"]["tools"]
    (row,) = build_rows(played.transitions)
    assert sum(row.sampled) == sum(len(one.response_ids) for one in played.transitions)
    spans = [item for item in native if item["object"] == "trace.span" and item["span_data"]["type"] == "function"]
    told = [(step.name, step.kind == "tool_error") for step in played.steps("tool_end", "tool_error")]
    assert told == [(span["span_data"]["name"], span["error"] is not None) for span in spans]

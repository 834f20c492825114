"""Tools of AutoGen: which calls reached one, what came back, and which signals that gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_core import FunctionCall
from autogen_core.models import CreateResult, RequestUsage

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl_autogen import wrap
from agl_autogen.reporting import answered

Assistant = Callable[..., AssistantAgent]
Rollout = Callable[..., Any]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("streaming", [False, True])
async def test_calls_that_reach_no_tool_are_told_as_failed(
    streaming: bool, rollout: Rollout, assistant: Assistant, server: ModelServer
):
    unknown, invalid, right = tool_call("subtract", a=1), tool_call("add", a=1, b="x"), tool_call("add", a=1, b=2)
    server.engine = ScriptedEngine([unknown, invalid, right, "3"])

    async def agent(llm: agl.LLM) -> None:
        wrapped = wrap(assistant(tools=[add], max_tool_iterations=4), llm)
        if streaming:
            assert [message async for message in wrapped.run_stream(task="1 + 2")]
        else:
            await wrapped.run(task="1 + 2")

    played = await rollout(agent)
    played.expect(*["writer"] * 4)
    told = {(step.kind, step.name, step.agent) for step in played.steps("tool_end", "tool_error")}
    assert told == {
        ("tool_error", "subtract", "writer"),
        ("tool_error", "add", "writer"),
        ("tool_end", "add", "writer"),
    }
    started = [step.data["tool_call_id"] for step in played.steps("tool_start")]
    assert len(set(started)) == 3
    errors = " ".join(step.data["error"] for step in played.steps("tool_error"))
    assert "not found in any workbench" in errors and "validation error" in errors
    json.dumps([dict(step.data) for step in played.rollout.steps])


def look_up(word: str) -> list[str]:
    """Look a word up."""
    return [word] if word == "agl" else []


BROKEN = '<tool_call>{"name": "add", "arg</tool_call>'


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([tool_call("look_up", word="agl"), "done"], [{"tool_success": 1.0}, {}]),
        ([tool_call("look_up", word="x"), "done"], [{"tool_success": 1.0, "empty_result": 1.0}, {}]),
        ([tool_call("add", a=1, b="x"), "done"], [{"tool_error": 1.0}, {}]),
        ([BROKEN], [{"parse_failure": 1.0}]),
        (
            [tool_call("look_up", word="x") + tool_call("add", a=1, b=2), "done"],
            [{"tool_success": 2.0, "empty_result": 1.0}, {}],
        ),
    ],
    ids=["found", "nothing found", "wrong arguments", "no JSON", "two at once"],
)
async def test_what_tools_and_answers_came_to_is_signalled_to_the_call_that_caused_it(
    streaming: bool, script: list[str], told: Any, rollout: Rollout, assistant: Assistant, server: ModelServer
):
    server.engine = ScriptedEngine(script)

    async def agent(llm: agl.LLM) -> None:
        solver = assistant(tools=[add, look_up], max_tool_iterations=3, model_client_stream=streaming)
        await wrap(solver, llm).run(task="1 + 2")

    assert (await rollout(agent)).signals() == told


def test_arguments_that_are_no_json_are_a_parse_failure():
    """Servers that do not check them hand them on; the call keeps its id, so that its error finds its cause."""

    class Told:
        def end(self, **data: Any) -> None:
            self.data = data

    call, calls = Told(), [FunctionCall(id=str(n), name="add", arguments=x) for n, x in enumerate(["{}", "{", "[1]"])]
    result = CreateResult(
        finish_reason="function_calls", content=calls, usage=RequestUsage(0, 0), cached=False, thought=BROKEN
    )
    answered(cast(Any, call), result)
    assert call.data == {"tool_calls": ["0", "1", "2"], "unparsed": 3}

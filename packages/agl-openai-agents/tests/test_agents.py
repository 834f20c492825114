"""The SDK's own ways of running agents: each call under the right name, and only answers that were used count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    GuardrailFunctionOutput,
    InputGuardrail,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelRetrySettings,
    ModelSettings,
    OutputGuardrail,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    retry_policies,
)
from pydantic import BaseModel

import agl
from agl.testing import Fault, ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import play, use_tool_once
from agl.transitions import build_rows
from agl_openai_agents import run_config

Rollout = Callable[..., Any]
both = pytest.mark.parametrize("use_responses", [False, True], ids=["chat", "responses"])


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def by_agent(**replies: str) -> ScriptedEngine:
    """Each agent's first answer, and a word after the result of a tool."""

    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        return "done" if "<|im_start|>tool\n" in prompt else replies[labels["agent"]]

    return ScriptedEngine(reply)


# ---------------------------------------------------------------------------------------------------- several agents


@both
async def test_a_handoff_changes_the_agent_and_is_told_as_a_tool(
    use_responses: bool, rollout: Rollout, server: ModelServer
):
    replies = iter([tool_call("transfer_to_math_solver"), "42"])
    server.engine = ScriptedEngine(lambda *_: next(replies))
    triage = Agent("triage", handoffs=[Agent("math solver")])

    async def agent(llm: agl.LLM) -> None:
        result = await Runner.run(triage, "6 x 7?", run_config=run_config(llm, use_responses=use_responses))
        assert (result.final_output, result.last_agent.name) == ("42", "math solver")

    played = await rollout(agent)
    played.expect("triage", "math solver")
    assert [(step.agent, step.name) for step in played.steps("tool_end")] == [("triage", "transfer_to_math_solver")]


async def test_either_side_of_a_handoff_can_be_the_one_that_learns(
    rollout: Rollout, server: ModelServer, own: ModelServer, gpt: Any
):
    for optimize, ours in (["triage"], 0), (["solver"], 1):
        own.exchanges.clear()
        scripts = [ScriptedEngine([tool_call("transfer_to_solver")]), ScriptedEngine(["42"])]
        server.engine, own.engine = scripts[ours], scripts[1 - ours]
        solver = Agent("solver", model=gpt)
        triage = Agent("triage", model=gpt, handoffs=[handoff(solver)])
        played = await rollout(
            lambda llm, a=triage, o=optimize: Runner.run(a, "6 x 7?", run_config=run_config(llm, o))  # pyright: ignore
        )
        played.expect(*optimize)
        assert len(own.exchanges) == 1
        assert [step.agent for step in played.steps("model_end")] == ["triage", "solver"]


@both
async def test_an_agent_that_is_a_tool_has_the_tool_call_as_its_parent(
    use_responses: bool, rollout: Rollout, server: ModelServer
):
    server.engine = ScriptedEngine(use_tool_once("ask_solver", "manager", input="6 x 7"))
    solver = Agent("solver")
    manager = Agent("manager", tools=[solver.as_tool("ask_solver", "Ask the solver.")])
    played = await rollout(
        lambda llm: Runner.run(manager, "hi", run_config=run_config(llm, use_responses=use_responses))
    )
    played.expect("manager", "solver", "manager")
    (tool,) = played.steps("tool_start")
    (first, inner, last) = played.steps("model_start")
    assert (tool.agent, tool.name, tool.parent) == ("manager", "ask_solver", first.parent)
    assert (inner.parent, last.parent) == (tool.call_id, first.parent)
    (made,) = played.steps("model_end")[0].data["tool_calls"]
    assert tool.data["tool_call_id"] == made


async def test_two_agents_that_are_tools_run_at_once_and_keep_apart(rollout: Rollout, server: ModelServer):
    left, right = (tool_call(f"ask_{name}", input=name) for name in ("left", "right"))
    server.engine = by_agent(manager=left + right, left="l", right="r")
    tools: Any = [Agent(name).as_tool(f"ask_{name}", "Ask.") for name in ("left", "right")]
    played = await rollout(lambda llm: Runner.run(Agent("manager", tools=tools), "hi", run_config=run_config(llm)))
    played.expect("manager", "left", "right", "manager")
    tools_by_id = {step.call_id: step.name for step in played.steps("tool_start")}
    inner = [step for step in played.steps("model_start") if step.agent != "manager"]
    assert {(step.agent, tools_by_id[step.parent or ""]) for step in inner} == {
        ("left", "ask_left"),
        ("right", "ask_right"),
    }
    assert {step.data["tool_call_id"] for step in played.steps("tool_end")} == set(
        played.steps("model_end")[0].data["tool_calls"]
    )


async def test_32_rollouts_in_one_loop_keep_their_calls_apart(lightning: Any, server: ModelServer):
    server.engine = ScriptedEngine(use_tool_once("ask_solver", "manager", input="6 x 7"), token_delay=0.001)
    manager = Agent("manager", tools=[Agent("solver").as_tool("ask_solver", "Ask the solver.")])  # one for all

    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
        await Runner.run(manager, f"task {task['number']}", run_config=run_config(llm))
        return float(task["number"])

    for played in await play(agent, lightning, server, rollouts=32):
        played.expect("manager", "solver", "manager")
        number = played.rollout.task.data["number"]
        asked = [e for e in played.exchanges if e.headers["x-agl-agent"] == "manager"]
        assert len(asked) == 2
        assert all(f"task {number}" in str(exchange.body["messages"]) for exchange in asked)


# -------------------------------------------------------------------------------------------------------- guardrails


async def rejects(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
    """Reject after the model has answered."""
    await asyncio.sleep(0.3)
    return GuardrailFunctionOutput(None, tripwire_triggered=True)


async def accepts(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
    return GuardrailFunctionOutput(None, tripwire_triggered=False)


@pytest.mark.parametrize("slow_model", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_that_an_input_guardrail_throws_away_is_no_transition(
    streaming: bool, slow_model: bool, rollout: Rollout, server: ModelServer
):
    server.engine = ScriptedEngine(["too late"], latency=1.0 if slow_model else 0.0)
    writer = Agent("writer", input_guardrails=[InputGuardrail(rejects), InputGuardrail(accepts)])

    async def agent(llm: agl.LLM) -> None:
        with pytest.raises(InputGuardrailTripwireTriggered):
            if streaming:
                result = Runner.run_streamed(writer, "hi", run_config=run_config(llm))
                assert [event async for event in result.stream_events()]
            else:
                await Runner.run(writer, "hi", run_config=run_config(llm))

    played = await rollout(agent)
    played.expect()
    assert len(played.steps("model_error")) == 1
    assert len(played.steps("model_end")) == (0 if slow_model else 1)


async def test_an_answer_that_an_output_guardrail_rejects_was_used(rollout: Rollout):
    writer = Agent("writer", output_guardrails=[OutputGuardrail(rejects)])

    async def agent(llm: agl.LLM) -> None:
        with pytest.raises(OutputGuardrailTripwireTriggered):
            await Runner.run(writer, "hi", run_config=run_config(llm))

    (await rollout(agent)).expect("writer")


async def test_an_agent_that_guards_is_an_agent_too(rollout: Rollout, server: ModelServer):
    server.engine = by_agent(guard="fine", writer="a text")

    async def agent(llm: agl.LLM) -> None:
        async def ask_guard(context: Any, agent: Any, given: Any) -> GuardrailFunctionOutput:
            said = await Runner.run(Agent("guard"), given, run_config=run_config(llm))
            return GuardrailFunctionOutput(None, tripwire_triggered=said.final_output != "fine")

        writer = Agent("writer", input_guardrails=[InputGuardrail(ask_guard)])
        await Runner.run(writer, "hi", run_config=run_config(llm))

    played = await rollout(agent)
    played.expect("writer", "guard")
    assert len({step.parent for step in played.steps("model_start")}) == 2


async def test_guardrails_of_the_run_configuration_hold(rollout: Rollout):
    async def agent(llm: agl.LLM) -> None:
        config = RunConfig(input_guardrails=[InputGuardrail(rejects)])
        with pytest.raises(InputGuardrailTripwireTriggered):
            await Runner.run(Agent("writer"), "hi", run_config=run_config(llm, config=config))

    (await rollout(agent)).expect()


# ---------------------------------------------------------------------------------------------- streams, output, turns


@both
async def test_a_streamed_run_with_tools_extends_its_own_context(
    use_responses: bool, rollout: Rollout, server: ModelServer
):
    server.engine = ScriptedEngine(use_tool_once("add", "writer", a=2, b=3))

    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm, use_responses=use_responses)
        result = Runner.run_streamed(Agent("writer", tools=[add]), "2 + 3?", run_config=config)
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert result.final_output == "writer is done"

    played = await rollout(agent)
    played.expect("writer", "writer")
    assert len(build_rows(played.transitions)) == 1
    assert [step.data["result_length"] for step in played.steps("tool_end")] == [1]


async def test_a_stream_that_nobody_reads_to_its_end_runs_on_and_counts(rollout: Rollout):
    async def agent(llm: agl.LLM) -> None:
        result = Runner.run_streamed(Agent("writer"), "hi", run_config=run_config(llm))
        async for _ in result.stream_events():
            break
        while not result.is_complete:
            await asyncio.sleep(0.01)

    (await rollout(agent)).expect("writer")


class Verdict(BaseModel):
    """What a judge says."""

    right: bool


@both
@pytest.mark.parametrize("strict", [False, True])
async def test_structured_output(strict: bool, use_responses: bool, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(['{"right": true}'])
    judge = Agent("judge", output_type=AgentOutputSchema(Verdict, strict_json_schema=strict))

    async def agent(llm: agl.LLM) -> None:
        result = await Runner.run(judge, "6 x 7 = 42?", run_config=run_config(llm, use_responses=use_responses))
        assert result.final_output == Verdict(right=True)

    played = await rollout(agent)
    played.expect("judge")
    schema = played.exchanges[0].body["response_format"]["json_schema"]
    assert schema["strict"] is strict and "right" in schema["schema"]["properties"]


async def test_output_that_does_not_parse_was_used(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(["right"])
    judge = Agent("judge", output_type=Verdict)
    played = await rollout(lambda llm: Runner.run(judge, "hi", run_config=run_config(llm)), expect="agent_error")
    played.expect("judge")
    assert "ModelBehaviorError" in (played.rollout.error or "")


async def test_a_run_that_takes_too_many_turns_keeps_all_its_calls(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=1, b=1)] * 3)

    async def agent(llm: agl.LLM) -> None:
        with pytest.raises(MaxTurnsExceeded):
            await Runner.run(Agent("writer", tools=[add]), "hi", run_config=run_config(llm), max_turns=3)

    played = await rollout(agent)
    played.expect(*["writer"] * 3)
    assert len(build_rows(played.transitions)) == 1


@both
async def test_a_session_brings_what_was_said_before(use_responses: bool, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=1, b=1), "2", "4"])

    async def agent(llm: agl.LLM) -> None:
        session = SQLiteSession("one")
        config = run_config(llm, use_responses=use_responses)
        for question in ("1 + 1?", "and twice that?"):
            await Runner.run(Agent("writer", tools=[add]), question, session=session, run_config=config)
        session.close()

    played = await rollout(agent)
    played.expect(*["writer"] * 3)
    (row,) = build_rows(played.transitions)
    assert sum(row.sampled) == sum(len(one.response_ids) for one in played.transitions)


# ------------------------------------------------------------------------------------------------- retries and errors


@both
@pytest.mark.parametrize("streaming", [False, True])
async def test_each_attempt_of_the_runners_own_retries_is_a_call_and_the_good_one_counts(
    streaming: bool, use_responses: bool, rollout: Rollout, server: ModelServer
):
    server.faults.extend([Fault(status=500)])
    retry = ModelRetrySettings(max_retries=2, policy=retry_policies.http_status([500]), backoff={"initial_delay": 0.01})
    writer = Agent("writer", model_settings=ModelSettings(retry=retry))

    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm, use_responses=use_responses)
        if streaming:
            result = Runner.run_streamed(writer, "hi", run_config=config)
            assert [event async for event in result.stream_events()]
        else:
            result = await Runner.run(writer, "hi", run_config=config)
        assert result.final_output == "a word of writer"

    played = await rollout(agent)
    played.expect("writer")
    states = [(call.state, call.retry) for call in played.rollout.calls]
    assert states[-1][0] == "done" and {state for state, _ in states[:-1]} == {"error"}


async def test_a_model_that_takes_too_long_for_the_runner(rollout: Rollout, server: ModelServer):
    server.faults.append(Fault(delay=1.0))
    writer = Agent("writer", model_settings=ModelSettings(timeout=0.3))

    async def agent(llm: agl.LLM) -> None:
        with pytest.raises(Exception, match="timed out"):
            await Runner.run(writer, "hi", run_config=run_config(llm))
        await Runner.run(writer, "hi", run_config=run_config(llm))

    (await rollout(agent)).expect("writer")


async def test_a_broken_stream_is_no_transition(rollout: Rollout, server: ModelServer):
    server.faults.append(Fault(break_after=5))

    async def agent(llm: agl.LLM) -> None:
        result = Runner.run_streamed(Agent("writer"), "hi", run_config=run_config(llm))
        async for _ in result.stream_events():
            pass

    played = await rollout(agent, expect=None)
    played.expect()
    assert [step.kind for step in played.rollout.steps] == ["model_start", "model_error"]


async def test_an_unknown_tool_is_told_when_its_error_reaches_the_model(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("subtract", a=1), "sorry"])
    config = RunConfig(tool_not_found_behavior="return_error_to_model")
    writer = Agent("writer", tools=[add])
    played = await rollout(lambda llm: Runner.run(writer, "hi", run_config=run_config(llm, config=config)))
    played.expect("writer", "writer")
    (start,) = played.steps("tool_start")
    assert (start.name, start.agent) == ("subtract", "writer")
    assert start.data["tool_call_id"] == played.steps("model_end")[0].data["tool_calls"][0]


async def test_arguments_that_do_not_fit_are_a_tools_error(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=1, b="x"), "sorry"])
    writer = Agent("writer", tools=[add])
    played = await rollout(lambda llm: Runner.run(writer, "hi", run_config=run_config(llm)))
    played.expect("writer", "writer")
    (error,) = played.steps("tool_error")
    assert error.name == "add" and error.data["error"]
    json.dumps([dict(step.data) for step in played.rollout.steps])


async def test_what_the_responses_api_here_cannot_do_names_the_field(rollout: Rollout):
    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm, use_responses=True)
        with pytest.raises(Exception, match="previous_response_id: is not supported"):
            await Runner.run(Agent("writer"), "hi", run_config=config, previous_response_id="resp_1")

    (await rollout(agent)).expect()

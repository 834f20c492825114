"""Every kind of agent and team of AutoGen: who called, with which parent, and token by token what was sampled."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig, PerSourceFilter
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, HandoffMessage, TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken
from autogen_core.models import ChatCompletionClient, UserMessage
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams
from pydantic import BaseModel

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import use_tool_once
from agl_autogen import wrap

Assistant = Callable[..., AssistantAgent]


def run(team: Any, **options: Any) -> Callable[[agl.LLM], Any]:
    return lambda llm: wrap(team, llm, **options).run(task="hi")


def run_stream(team: Any) -> Callable[[agl.LLM], Any]:
    async def agent(llm: agl.LLM) -> None:
        assert [message async for message in wrap(team, llm).run_stream(task="hi")][-1].messages

    return agent


BOTH = pytest.mark.parametrize("way", [run, run_stream], ids=["run", "run_stream"])


# --------------------------------------------------------------------------------------------------------- one agent


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_alone(way: Any, streaming: bool, rollout: Any, assistant: Assistant):
    played = await rollout(way(assistant(model_client_stream=streaming)))
    played.expect("writer")
    (start,) = played.steps("model_start")
    assert (start.agent, start.name) == ("writer", "policy")
    assert start.parent == played.rollout.calls[0].parent


class Answer(BaseModel):
    """What a structured answer looks like."""

    text: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own, for its parsed answers
@BOTH
@pytest.mark.parametrize("streaming", [False, True])
async def test_structured_output(way: Any, streaming: bool, rollout: Any, assistant: Assistant, server: ModelServer):
    server.engine = ScriptedEngine(['{"text": "four"}'])
    agent = assistant(output_content_type=Answer, model_client_stream=streaming)
    (await rollout(way(agent))).expect("writer")


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
async def test_tools_extend_one_row(way: Any, streaming: bool, rollout: Any, assistant: Assistant, server: ModelServer):
    from agl.transitions import build_rows

    server.engine = ScriptedEngine(use_tool_once("add", "writer", a=2, b=3))
    agent = assistant(tools=[add], max_tool_iterations=3, model_client_stream=streaming)
    played = await rollout(way(agent))
    played.expect("writer", "writer")
    assert len(build_rows(played.transitions)) == 1
    (start,), (end,) = played.steps("tool_start"), played.steps("tool_end")
    assert start.call_id == end.call_id and start.name == "add" and start.agent == "writer"
    assert start.data["tool_call_id"].startswith("call")
    times = [step.time for step in played.rollout.steps]
    kinds = [step.kind for step in played.rollout.steps]
    assert times == sorted(times)
    assert kinds == ["model_start", "model_end", "tool_start", "tool_end", "model_start", "model_end"]


async def test_a_reflection_is_a_row_of_its_own_because_autogen_leaves_the_tools_out_of_its_prompt(
    rollout: Any, assistant: Assistant, server: ModelServer
):
    from agl.transitions import build_rows

    server.engine = ScriptedEngine(use_tool_once("add", "writer", a=2, b=3))
    played = await rollout(run(assistant(tools=[add], reflect_on_tool_use=True)))
    played.expect("writer", "writer")
    assert [bool(exchange.body.get("tools")) for exchange in played.exchanges] == [True, False]
    assert len(build_rows(played.transitions)) == 2


class Pair(BaseChatAgent):
    """An agent of the author's own, that asks two clients, five times at once each."""

    def __init__(self, name: str, quick: ChatCompletionClient, thorough: ChatCompletionClient):
        super().__init__(name, "two clients")
        self.quick = quick
        self.clients_by_use = thorough

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        question = [UserMessage(content="same", source="user")]
        answers = await asyncio.gather(
            *(client.create(question) for client in (self.quick, self.clients_by_use) for _ in range(5))
        )
        return Response(chat_message=TextMessage(content=str(answers[0].content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        pass


async def test_an_agent_of_the_authors_own_with_parallel_calls_of_one_prompt(
    rollout: Any, gpt: Any, server: ModelServer
):
    server.engine = ScriptedEngine([f"answer {number}" for number in range(10)])
    played = await rollout(run(Pair("pair", gpt(), gpt())))
    played.expect(*["pair"] * 10)
    assert len({one.response_ids for one in played.transitions}) == 10


# -------------------------------------------------------------------------------------------------------------- teams


@BOTH
async def test_round_robin(way: Any, rollout: Any, assistant: Assistant):
    team = RoundRobinGroupChat([assistant("writer"), assistant("critic")], max_turns=3)
    (await rollout(way(team))).expect("writer", "critic", "writer")


@BOTH
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", [None, "the chair"])
async def test_a_selectors_own_calls_are_the_teams(
    way: Any, streaming: bool, name: str | None, rollout: Any, assistant: Assistant, gpt: Any, server: ModelServer
):
    picks = iter(["writer", "critic"])
    selector = name or "SelectorGroupChat"
    server.engine = ScriptedEngine(lambda _, labels: next(picks) if labels["agent"] == selector else "a text")
    team = SelectorGroupChat(
        [assistant("writer"), assistant("critic")],
        gpt(),
        **({"name": name} if name else {}),
        max_turns=2,
        allow_repeated_speaker=True,
        model_client_streaming=streaming,
    )
    (await rollout(way(team))).expect(selector, "writer", selector, "critic")


@BOTH
async def test_a_swarm_hands_over(way: Any, rollout: Any, assistant: Assistant, server: ModelServer):
    server.engine = ScriptedEngine(
        lambda _, labels: tool_call("transfer_to_solver") if labels["agent"] == "triage" else "solved"
    )
    team = Swarm([assistant("triage", handoffs=["solver"]), assistant("solver", handoffs=["user"])], max_turns=2)
    played = await rollout(way(team))
    played.expect("triage", "solver")
    (start,), (end,) = played.steps("tool_start"), played.steps("tool_end")
    assert (start.agent, start.name) == ("triage", "transfer_to_solver")
    assert start.call_id == end.call_id


async def test_a_swarm_that_is_left_for_the_user_and_taken_up_again(
    rollout: Any, assistant: Assistant, server: ModelServer
):
    replies = iter([tool_call("transfer_to_user"), "at last"])
    server.engine = ScriptedEngine(lambda *_: next(replies))
    team = Swarm(
        [assistant("solver", handoffs=["user"])], termination_condition=HandoffTermination("user"), max_turns=1
    )

    async def agent(llm: agl.LLM) -> None:
        async with wrap(team, llm) as wrapped:
            await wrapped.run(task="hi")
            await wrapped.run(task=HandoffMessage(source="user", target="solver", content="go on"))

    (await rollout(agent)).expect("solver", "solver")


@BOTH
async def test_a_graph_with_parallel_branches(way: Any, rollout: Any, assistant: Assistant):
    start, left, right, end = (assistant(name) for name in ("start", "left", "right", "end"))
    builder = DiGraphBuilder()
    for agent in (start, left, right, end):
        builder.add_node(agent)
    for source, target in ((start, left), (start, right), (left, end), (right, end)):
        builder.add_edge(source, target)
    team = GraphFlow(builder.get_participants(), builder.build())
    (await rollout(way(team))).expect("start", "left", "right", "end")


def ledger(satisfied: bool) -> str:
    answers = {
        "is_request_satisfied": satisfied,
        "is_in_loop": False,
        "is_progress_being_made": True,
        "next_speaker": "writer",
        "instruction_or_question": "write",
    }
    return json.dumps({key: {"reason": "", "answer": answer} for key, answer in answers.items()})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # AutoGen's own, for its parsed answers
@BOTH
async def test_the_orchestrator_of_magentic_one(
    way: Any, rollout: Any, assistant: Assistant, gpt: Any, server: ModelServer
):
    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        if labels["agent"] == "writer":
            return "the text of the writer"
        if "is_request_satisfied" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return ledger("the text of the writer" in prompt)
        return "facts and a plan"

    server.engine = ScriptedEngine(reply)
    team = MagenticOneGroupChat([assistant()], gpt())
    played = await rollout(way(team))
    played.expect(*["MagenticOneGroupChat"] * 5, "writer")


@BOTH
async def test_a_society_of_mind_inside_a_team(way: Any, rollout: Any, assistant: Assistant, gpt: Any):
    inner = RoundRobinGroupChat([assistant("thinker"), assistant("doubter")], max_turns=2)
    society = SocietyOfMindAgent("society", team=inner, model_client=gpt())
    team = RoundRobinGroupChat([society, assistant("writer")], max_turns=2)
    (await rollout(way(team))).expect("thinker", "doubter", "society", "writer")


async def test_a_team_inside_a_team(rollout: Any, assistant: Assistant):
    inner = RoundRobinGroupChat([assistant("thinker")], name="inner", max_turns=1)
    team = RoundRobinGroupChat([inner, assistant("writer")], max_turns=2)
    (await rollout(run(team))).expect("thinker", "writer")


async def test_an_agent_behind_a_message_filter(rollout: Any, assistant: Assistant):
    only = MessageFilterConfig(per_source=[PerSourceFilter(source="user", position="first", count=1)])
    team = RoundRobinGroupChat([MessageFilterAgent("behind", assistant("writer"), only)], max_turns=1)
    (await rollout(run(team))).expect("writer")


@BOTH
@pytest.mark.parametrize("kind", ["agent", "team"])
async def test_an_agent_as_a_tool(way: Any, kind: str, rollout: Any, assistant: Assistant, server: ModelServer):
    solver = assistant("solver")
    if kind == "agent":
        the_tool: Any = AgentTool(solver)
    else:
        the_tool = TeamTool(RoundRobinGroupChat([solver], max_turns=1), name="solver", description="solves")
    server.engine = ScriptedEngine(use_tool_once("solver", "manager", task="6 x 7"))
    played = await rollout(way(assistant("manager", tools=[the_tool], max_tool_iterations=2)))
    played.expect("manager", "solver", "manager")
    (called,) = played.steps("tool_start")
    assert called.agent == "manager"
    parents = {step.agent: step.parent for step in played.steps("model_start")}
    assert parents == {"manager": called.parent, "solver": called.call_id}
    (ended,) = played.steps("tool_end")
    assert played.steps("model_end")[1].time <= ended.time


# ---------------------------------------------------------------------------------------------------------------- MCP


def sums(**options: Any) -> McpWorkbench:
    server = str(Path(__file__).parent / "mcp_server.py")
    return McpWorkbench(StdioServerParams(command=sys.executable, args=[server], read_timeout_seconds=60), **options)


@pytest.mark.parametrize(
    ("tool", "arguments", "kind"), [("add", {"a": 2, "b": 3}, "tool_end"), ("fail", {}, "tool_error")]
)
async def test_mcp_tools(tool: str, arguments: Any, kind: str, rollout: Any, assistant: Assistant, server: ModelServer):
    server.engine = ScriptedEngine(use_tool_once(tool, "writer", **arguments))

    async def agent(llm: agl.LLM) -> None:
        async with sums() as workbench:
            await wrap(assistant(workbench=workbench, max_tool_iterations=2), llm).run(task="hi")

    played = await rollout(agent)
    played.expect("writer", "writer")
    (start,), (end,) = played.steps("tool_start"), played.steps("tool_end", "tool_error")
    assert (start.agent, start.name, end.kind) == ("writer", tool, kind)
    assert ("5" if tool == "add" else "it never works") in str(played.exchanges[1].body["messages"][-1])


async def test_a_model_call_that_an_mcp_server_asks_for_is_its_agents(
    rollout: Any, assistant: Assistant, gpt: Any, server: ModelServer
):
    server.engine = ScriptedEngine(use_tool_once("ask", "writer"))

    async def agent(llm: agl.LLM) -> None:
        workbench = sums(model_client=gpt())
        await wrap(assistant(workbench=[workbench], max_tool_iterations=2), llm).run(task="hi")
        assert type(workbench._model_client).__name__ == "OpenAIChatCompletionClient"
        assert workbench._actor is not None and workbench._actor._model_client is workbench._model_client
        await workbench.stop()

    (await rollout(agent)).expect("writer", "writer", "writer")


# ---------------------------------------------------------------------------------------------------- many at once


async def test_32_rollouts_in_one_loop_keep_their_calls_apart(
    lightning: Any, server: ModelServer, assistant: Assistant, gpt: Any
):
    from agl.testing.contract import play

    server.engine = ScriptedEngine(
        lambda prompt, labels: "writer" if labels["agent"] == "SelectorGroupChat" else f"by {labels['agent']}",
        token_delay=0.001,
    )
    shared = gpt()  # one client for all of them, as a module of the author's has it

    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
        team = SelectorGroupChat(
            [assistant("writer", shared), assistant("critic", shared)],
            shared,
            termination_condition=MaxMessageTermination(3),
            allow_repeated_speaker=True,
        )
        result = await wrap(team, llm).run(task=f"task {task['number']}")
        assert {m.to_text() for m in result.messages[1:]} == {"by writer"}
        return float(task["number"])

    for played in await play(agent, lightning, server, rollouts=32):
        played.expect(*["SelectorGroupChat", "writer"] * 2)
        assert len(played.exchanges) == 4
        number = played.rollout.task.data["number"]
        assert all(f"task {number}" in str(exchange.body["messages"]) for exchange in played.exchanges)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

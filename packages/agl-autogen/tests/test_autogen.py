"""The traps of AutoGen: the team stays as it was, keys stay apart, and only answers that were used count."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, UserProxyAgent
from autogen_agentchat.base import Team
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import EVENT_LOGGER_NAME, CancellationToken
from autogen_core.model_context import TokenLimitedChatCompletionContext
from autogen_core.models import ChatCompletionClient, CreateResult, UserMessage
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.replay import ReplayChatCompletionClient
from pydantic import BaseModel

import agl
from agl import scope
from agl.errors import SelectionError, UsageError
from agl.selection import Selection
from agl.testing import Fault, ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import play
from agl_autogen import model_client, wrap
from agl_autogen.clients import MODEL_INFO
from agl_autogen.reporting import Run

Assistant = Callable[..., AssistantAgent]
Rollout = Callable[..., Any]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def clients(*agents: Any) -> list[Any]:
    return [agent._model_client for agent in agents]


# --------------------------------------------------------------------------------------------- the team stays as it was


@pytest.fixture
def team(assistant: Assistant, gpt: Any) -> SelectorGroupChat:
    """A team with every kind of place for a client: agents, the selector, an agent that is a tool."""
    solver = assistant("solver")
    writer = assistant("writer", tools=[add, AgentTool(solver)])
    return SelectorGroupChat(
        [writer, assistant("critic")], gpt(), selector_func=None, max_turns=1, allow_repeated_speaker=True
    )


def snapshot(team: Any) -> list[Any]:
    """What lies in all attributes of a team and its agents, by identity."""
    agents = team._participants
    solver = agents[0]._workbench[0]._tools[1]._agent if agents[0].name == "writer" else agents[0]
    owners = [*agents, solver]
    parts = [part for owner in owners for part in (owner._model_client, owner._workbench, *owner._workbench)]
    return [*parts, team._model_client, dict(vars(team)), *(dict(vars(owner)) for owner in owners)]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(one is other or one == other for one, other in zip(before, after, strict=True))


def picks_writer(_: str, labels: Mapping[str, str]) -> str:
    return "writer" if labels.get("agent") == "SelectorGroupChat" else "a text"


async def manager_of(team: Any) -> Any:
    from autogen_core import AgentId

    address = AgentId(team._group_chat_manager_topic_type, team._team_id)
    return await team._runtime.try_get_underlying_agent_instance(address)


@pytest.mark.parametrize("how", ["run", "run_stream", "held open"])
async def test_a_team_is_restored(how: str, team: Any, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(picks_writer)
    before = snapshot(team)
    variable = {"_initialized", "_is_running", "_runtime", "_output_message_queue"}

    def lasting(parts: list[Any]) -> list[Any]:
        return [{k: v for k, v in p.items() if k not in variable} if isinstance(p, dict) else p for p in parts]

    async def agent(llm: agl.LLM) -> None:
        if how == "run":
            await wrap(team, llm).run(task="hi")
        elif how == "run_stream":
            async for _ in wrap(team, llm).run_stream(task="hi"):
                assert not same(before, snapshot(team))
        else:
            async with wrap(team, llm):
                await team.run(task="hi")

    (await rollout(agent)).expect("SelectorGroupChat", "writer")
    assert same(lasting(before), lasting(snapshot(team)))
    assert (await manager_of(team))._model_client is team._model_client


async def test_after_a_wrapped_run_the_team_asks_its_own_model_and_in_the_next_one_the_policy(
    team: Any, rollout: Rollout, server: ModelServer, own: ModelServer
):
    server.engine = ScriptedEngine(picks_writer)
    own.engine = ScriptedEngine(lambda prompt, _: "critic" if "select the next role" in prompt else "from elsewhere")

    async def agent(llm: agl.LLM) -> None:
        await wrap(team, llm).run(task="hi")
        assert len(own.exchanges) == 0
        await team.run(task="hi")
        assert len(own.exchanges) == 2
        await wrap(team, llm).run(task="hi")
        assert len(own.exchanges) == 2

    (await rollout(agent)).expect(*["SelectorGroupChat", "writer"] * 2)
    assert {exchange.headers["authorization"] for exchange in own.exchanges} == {"Bearer sk-author"}


async def test_a_team_is_restored_after_an_error(team: Any, rollout: Rollout, server: ModelServer):
    server.faults.extend([Fault(status=400)])
    before = clients(team, *team._participants)
    played = await rollout(lambda llm: wrap(team, llm).run(task="hi"), expect=None)
    assert played.rollout.outcome == "agent_error"
    assert "400" in played.steps("model_error")[0].data["error"]
    played.expect()
    assert clients(team, *team._participants) == before
    assert (await manager_of(team))._model_client is team._model_client


async def test_a_team_is_restored_when_its_stream_is_left(team: Any, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(picks_writer)
    before = clients(team, *team._participants)

    async def agent(llm: agl.LLM) -> None:
        async with aclosing(wrap(team, llm).run_stream(task="hi")) as messages:
            async for _ in messages:
                break

    await rollout(agent)
    assert clients(team, *team._participants) == before


async def test_a_team_is_restored_when_it_is_cancelled(assistant: Assistant, rollout: Rollout, server: ModelServer):
    server.faults.append(Fault(delay=5))
    writer = assistant()
    before = clients(writer)

    async def agent(llm: agl.LLM) -> None:
        token = CancellationToken()
        asyncio.get_running_loop().call_later(0.3, token.cancel)
        with pytest.raises(asyncio.CancelledError):
            await wrap(writer, llm).run(task="hi", cancellation_token=token)
        assert clients(writer) == before

    played = await rollout(agent)
    played.expect()
    assert [step.kind for step in played.rollout.steps] == ["model_start", "model_error"]


async def test_what_a_team_offers_is_at_hand(team: Any, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(picks_writer)

    async def agent(llm: agl.LLM) -> None:
        async with wrap(team, llm) as wrapped:
            assert wrapped.name == "SelectorGroupChat" and wrapped.team is team
            await wrapped.run(task="hi")
            state = await wrapped.save_state()
            await wrapped.reset()
            await wrapped.load_state(state)
            await wrapped.run(task="hi")
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = wrapped.nothing

    (await rollout(agent)).expect(*["SelectorGroupChat", "writer"] * 2)


async def test_one_wrapped_team_may_run_in_one_loop_after_another(assistant: Assistant, server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "none")
    wrapped = wrap(assistant(), llm)
    for _ in range(3):
        assert await asyncio.to_thread(lambda: asyncio.run(wrapped.run(task="hi")))
    await llm.close()


# ------------------------------------------------------------------------------------------- components, secrets, keys


async def test_what_is_dumped_during_a_run_is_the_authors_team_without_secrets(
    assistant: Assistant, gpt: Any, rollout: Rollout, server: ModelServer
):
    server.engine = ScriptedEngine(picks_writer)
    inner = SelectorGroupChat([assistant("writer"), assistant("critic")], gpt(), max_turns=1)
    before = inner.dump_component().model_dump_json()
    assert "sk-author" not in before

    async def agent(llm: agl.LLM) -> None:
        async with wrap(inner, llm):
            dumped = inner.dump_component().model_dump_json()
        assert dumped == before
        assert llm.key not in dumped and llm.base_url not in dumped
        loaded = Team.load_component(json.loads(dumped))
        await wrap(loaded, llm).run(task="hi")  # whose key is masked: an optimised agent needs none

    (await rollout(agent)).expect("SelectorGroupChat", "writer")


async def test_keys_and_headers_stay_with_their_servers(
    assistant: Assistant, rollout: Rollout, server: ModelServer, own: ModelServer
):
    team = RoundRobinGroupChat([assistant("writer"), assistant("critic")], max_turns=2)

    async def agent(llm: agl.LLM) -> None:
        result = await wrap(team, llm, optimize=["writer"]).run(task="hi")
        assert result.messages[-1].to_text() == "from elsewhere"  # pyright: ignore

    played = await rollout(agent)
    played.expect("writer")
    (theirs,), (ours,) = own.exchanges, played.exchanges
    assert theirs.headers["authorization"] == "Bearer sk-author"
    assert not [name for name in theirs.headers if name.startswith("x-agl")]
    assert not [key for key in theirs.body if key.startswith("agl")]
    assert "sk-author" not in str(ours.headers) and "x-author" not in ours.headers
    assert theirs.body["model"] == "gpt-4o-mini-2024-07-18"


# ---------------------------------------------------------------------------------------------------------- selection


async def test_agents_that_are_not_selected_keep_their_client_and_are_recorded_as_context(
    assistant: Assistant, rollout: Rollout, own: ModelServer
):
    team = RoundRobinGroupChat([assistant(name) for name in ("writer", "rewriter", "critic")], max_turns=3)

    async def agent(llm: agl.LLM) -> None:
        await wrap(team, llm, optimize=["*writer"]).run(task="hi")

    played = await rollout(agent, optimize=("writer", "critic"))
    played.expect("writer")
    assert len(own.exchanges) == 2
    assert [(step.agent, step.name) for step in played.steps("model_end")] == [
        ("writer", "policy"),
        ("rewriter", "gpt-4o-mini-2024-07-18"),
        ("critic", "gpt-4o-mini-2024-07-18"),
    ]


async def test_an_agent_that_is_not_selected_may_be_given_the_policys_client(
    assistant: Assistant, rollout: Rollout, own: ModelServer
):
    async def agent(llm: agl.LLM) -> None:
        team = RoundRobinGroupChat([assistant("writer"), assistant("critic", model_client(llm))], max_turns=2)
        await wrap(team, llm).run(task="hi")

    played = await rollout(agent, optimize=("writer",), unselected="frozen")
    assert {call.agent: call.model for call in played.rollout.calls} == {"writer": "policy", "critic": "frozen"}
    assert not own.exchanges


def test_a_name_that_no_agent_has_is_an_error(team: Any):
    llm = agl.LLM("http://127.0.0.1:9/v1", "none")
    with pytest.raises(SelectionError, match=r"'wirter'.*'SelectorGroupChat', 'critic', 'solver', 'writer'"):
        wrap(team, llm, optimize=["wirter"])
    with pytest.raises(SelectionError, match=r"optimize=\['writer'\]"):
        wrap(team, llm, optimize="writer")


def test_what_cannot_be_wrapped_is_an_error():
    llm = agl.LLM("http://127.0.0.1:9/v1", "none")
    with pytest.raises(UsageError, match="an agent or a team of AutoGen, not str"):
        wrap("a team", llm)  # pyright: ignore
    with pytest.raises(
        UsageError, match="no agent of the RoundRobinGroupChat 'RoundRobinGroupChat' has a model client"
    ):
        wrap(RoundRobinGroupChat([UserProxyAgent("user")]), llm)


async def test_one_team_for_several_rollouts_at_once_is_an_error(
    assistant: Assistant, lightning: Any, server: ModelServer
):
    writer = assistant()
    server.engine = ScriptedEngine(["one", "two"], latency=0.3)

    async def agent(task: Any, llm: agl.LLM) -> None:
        await wrap(writer, llm).run(task="hi")

    outcomes = [played.rollout for played in await play(agent, lightning, server, rollouts=2, expect=None)]
    assert sorted(outcome.outcome or "" for outcome in outcomes) == ["agent_error", "ok"]
    (error,) = [outcome.error or "" for outcome in outcomes if outcome.outcome != "ok"]
    assert "'writer' is at work for another rollout" in error and "inside the agent function" in error
    assert type(writer._model_client).__name__ == "OpenAIChatCompletionClient"


async def test_an_agent_that_is_wrapped_twice_is_told_once(assistant: Assistant, rollout: Rollout):
    writer = assistant("writer", tools=[add])

    async def agent(llm: agl.LLM) -> None:
        async with wrap(writer, llm):
            await wrap(RoundRobinGroupChat([writer], max_turns=1), llm).run(task="hi")

    played = await rollout(agent)
    played.expect("writer")
    assert len(played.rollout.steps) == 2


# ------------------------------------------------------------------------------------------ the authors' own clients


async def test_the_settings_of_the_authors_client_hold(assistant: Assistant, gpt: Any, rollout: Rollout):
    client = gpt(temperature=0.3, max_tokens=7, stop=["STOP"], extra_body={"top_k": 5}, add_name_prefixes=True)
    played = await rollout(lambda llm: wrap(assistant("writer", client), llm).run(task="hi"))
    played.expect("writer")
    body = played.exchanges[0].body
    assert (body["temperature"], body["max_tokens"], body["stop"], body["top_k"]) == (0.3, 7, ["STOP"], 5)
    assert body["messages"][-1]["content"] == "user said:\nhi"
    assert len(played.transitions[0].response_ids) == 7
    assert client.total_usage().completion_tokens == 0


class Prefixed(ChatCompletionClient):
    """A client of the author's own around another."""

    def __init__(self, inner: ChatCompletionClient):
        self.inner = inner
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    async def create(self, messages: Any, **arguments: Any) -> CreateResult:
        result = await self.inner.create(messages, **arguments)
        return result.model_copy(update={"content": f"prefix {result.content}"})

    async def create_stream(self, messages: Any, **arguments: Any) -> AsyncGenerator[Any, None]:
        async for piece in self.inner.create_stream(messages, **arguments):
            yield piece

    async def close(self) -> None: ...
    def actual_usage(self) -> Any: ...
    def total_usage(self) -> Any: ...
    def count_tokens(self, messages: Any, **_: Any) -> int:
        return 0

    def remaining_tokens(self, messages: Any, **_: Any) -> int:
        return 0

    @property
    def capabilities(self) -> Any: ...

    @property
    def model_info(self) -> Any:
        return self.inner.model_info


async def test_clients_around_clients_stay(assistant: Assistant, gpt: Any, rollout: Rollout, own: ModelServer):
    async def agent(llm: agl.LLM) -> None:
        cached = ChatCompletionCache(Prefixed(gpt()))
        for _ in range(2):
            result = await wrap(assistant("writer", cached), llm).run(task="hi")
            assert result.messages[-1].to_text() == "prefix a word of writer"  # pyright: ignore
        assert cached.client.inner is not None  # pyright: ignore

    (await rollout(agent)).expect("writer")
    assert not own.exchanges


class Settings(BaseModel):
    """Of another provider's client."""

    temperature: float = 0.25
    stop: list[str] | None = None
    of_its_own: int = 3


class Elsewhere(ReplayChatCompletionClient):
    """A client of another provider."""

    def _to_config(self) -> Any:
        return Settings()


class Silent(ReplayChatCompletionClient):
    """A client that tells no settings."""

    def _to_config(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Elsewhere, Silent])
async def test_a_client_of_another_provider_is_replaced_by_one_that_can_the_same(
    kind: type[ReplayChatCompletionClient], assistant: Assistant, rollout: Rollout
):
    theirs = kind(["from a script"], model_info={**MODEL_INFO, "json_output": False})

    async def agent(llm: agl.LLM) -> None:
        wrapped = wrap(assistant("writer", theirs), llm)
        result = await wrapped.run(task="hi")
        assert result.messages[-1].to_text() == "a word of writer"  # pyright: ignore
        async with wrapped:
            writer: Any = wrapped.team
            with pytest.raises(ValueError, match="does not support JSON"):
                await writer._model_client.create([UserMessage(content="hi", source="me")], json_output=True)

    played = await rollout(agent)
    played.expect("writer")
    assert played.exchanges[0].body.get("temperature") == (0.25 if kind is Elsewhere else 1.0)  # 1: the gateway's
    assert "of_its_own" not in played.exchanges[0].body
    assert not theirs.create_calls
    assert len(played.steps("model_error")) == 1


async def test_a_context_that_counts_tokens_counts_as_before(assistant: Assistant, rollout: Rollout):
    counted: list[int] = []

    class Counting(ReplayChatCompletionClient):
        def count_tokens(self, messages: Any, **_: Any) -> int:
            counted.append(len(messages))
            return 3

        def remaining_tokens(self, messages: Any, **_: Any) -> int:
            return 100

    context = TokenLimitedChatCompletionContext(Counting(["no"]), token_limit=10)
    (await rollout(lambda llm: wrap(assistant(model_context=context), llm).run(task="hi"))).expect("writer")
    assert counted


# --------------------------------------------------------------------------------------------- calls that do not count


async def test_a_stream_that_breaks_is_no_transition(assistant: Assistant, rollout: Rollout, server: ModelServer):
    server.faults.append(Fault(break_after=5))
    played = await rollout(lambda llm: wrap(assistant(model_client_stream=True), llm).run(task="hi"), expect=None)
    played.expect()
    assert [step.kind for step in played.rollout.steps] == ["model_start", "model_error"]
    assert played.rollout.outcome == "infra_error", "nothing that the agent did: it is tried again, and never scored"


async def test_a_raw_call_in_a_tool_carries_no_label(rollout: Rollout, assistant: Assistant, server: ModelServer):
    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        first = labels["agent"] == "writer" and "<|im_start|>tool\n" not in prompt
        return tool_call("look_up", word="agl") if first else f"said by {labels['agent']}"

    server.engine = ScriptedEngine(reply)

    async def agent(llm: agl.LLM) -> None:
        async def look_up(word: str) -> str:
            """Look a word up."""
            async with llm.async_client() as client:
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": word}])
            return "found"

        writer = assistant("writer", tools=[look_up], max_tool_iterations=2)
        await wrap(RoundRobinGroupChat([writer], max_turns=1), llm).run(task="hi")

    played = await rollout(agent)
    played.expect("writer", "main", "writer")
    assert sum(call.call_id is None for call in played.rollout.calls) == 1


# ------------------------------------------------------------------------------------------------- logging, reporting


async def test_switching_the_event_log_off_does_not_blind_us(assistant: Assistant, rollout: Rollout):
    logging.disable(logging.CRITICAL)
    try:
        (await rollout(lambda llm: wrap(assistant(), llm).run(task="hi"))).expect("writer")
    finally:
        logging.disable(logging.NOTSET)


async def test_the_authors_event_log_goes_on(
    assistant: Assistant, rollout: Rollout, caplog: pytest.LogCaptureFixture, server: ModelServer
):
    server.engine = ScriptedEngine([tool_call("add", a=1, b=2), "3"])
    team = RoundRobinGroupChat([assistant(tools=[add], max_tool_iterations=2)], max_turns=1)
    with caplog.at_level(logging.INFO, logger=EVENT_LOGGER_NAME):
        (await rollout(lambda llm: wrap(team, llm).run(task="hi"))).expect("writer", "writer")
    events: list[Any] = [record.msg for record in caplog.records if record.name == EVENT_LOGGER_NAME]
    told = [event.kwargs["type"] for event in events if type(event).__name__ in ("LLMCallEvent", "ToolCallEvent")]
    assert told == ["LLMCall", "ToolCall", "LLMCall"]
    assert all(str(event.kwargs["agent_id"]).startswith("writer_") for event in events if "agent_id" in event.kwargs)


async def test_an_error_of_ours_is_kept_and_logged_once_and_never_reaches_the_agent(
    assistant: Assistant, server: ModelServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(scope.RolloutScope, "emit", broken)
    llm = agl.LLM(f"{server.url}/v1", "none")
    with scope.rollout(scope.RolloutScope("r", 1, Selection(None))):
        wrapped = wrap(assistant(), llm)
    await wrapped.run(task="hi")
    run: Run = wrapped._run
    assert [str(error) for error in run.failures] == ["ours", "ours"]
    assert [record.name for record in caplog.records if record.levelname == "ERROR"] == ["agl_autogen"]
    await llm.close()


async def test_outside_of_a_rollout_calls_go_to_the_model_without_an_id(assistant: Assistant, server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "none")
    result = await wrap(assistant(), llm).run(task="hi")
    assert result.messages[-1].to_text() == "a word of writer"  # pyright: ignore
    (exchange,) = server.exchanges
    assert exchange.headers["x-agl-agent"] == "writer" and "x-agl-call" not in exchange.headers
    assert scope.current_call() is None
    await llm.close()


async def test_a_runtime_that_was_started_outside_of_the_rollout_loses_nothing(
    assistant: Assistant, rollout: Rollout, gpt: Any, server: ModelServer
):
    from autogen_core import SingleThreadedAgentRuntime

    server.engine = ScriptedEngine(picks_writer)
    runtime = SingleThreadedAgentRuntime()
    runtime.start()  # its tasks know of no rollout
    participants: Any = [assistant("writer"), assistant("critic")]
    team = SelectorGroupChat(participants, gpt(), max_turns=1, runtime=runtime)
    (await rollout(lambda llm: wrap(team, llm).run(task="hi"))).expect("SelectorGroupChat", "writer")
    await runtime.stop_when_idle()

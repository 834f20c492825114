"""The traps of LangChain and LangGraph, each with the calls that must count and the names they must have."""

import asyncio
import contextlib
import copy
import inspect
import json
import operator
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import CallbackManager
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel

import agl
from agl import scope
from agl.selection import Selection
from agl.testing import Fault, ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import Lightning, Played, play, say, start_lightning
from agl_langchain import AglCallbackHandler, install
from agl_langchain.naming import name_agent

WRITER = {"metadata": {"agl_agent": "writer"}}
HELLO: Any = {"messages": [("user", "hi")]}
Agent = Callable[[ChatOpenAI], Any]


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lightning]:
    yield from start_lightning(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def running() -> Generator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def server(running: ModelServer) -> ModelServer:
    running.engine = ScriptedEngine(say)
    running.exchanges.clear()
    return running


@pytest.fixture
def rollout(lightning: Lightning, server: ModelServer) -> Callable[..., Any]:
    """Runs ``agent(chat)`` for one rollout; the whole stack is real but for the model. What it returns is no reward."""

    async def run(agent: Agent, **options: Any) -> Played:
        def with_chat(task: Mapping[str, Any], llm: agl.LLM) -> Any:
            value = agent(ChatOpenAI(**llm.openai(), max_retries=1))
            return drop(value) if inspect.isawaitable(value) else None

        (played,) = await play(with_chat, lightning, server, **options)
        return played

    return run


@pytest.fixture
def rollout_with_llm(lightning: Lightning, server: ModelServer) -> Callable[..., Any]:
    """Runs ``agent(task, llm)``."""

    async def run(agent: Any, **options: Any) -> Played:
        return (await play(agent, lightning, server, **options))[0]

    return run


async def raw(llm: agl.LLM) -> None:
    """A call without LangChain."""
    async with llm.async_client() as client:
        await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "raw"}])


async def drop(work: Any) -> None:
    await work


class State(TypedDict):
    """The state of the little graphs here."""

    texts: Annotated[list[str], operator.add]


def writer_and_critic(chat: ChatOpenAI) -> Any:
    def write(state: State) -> State:
        return {"texts": [chat.invoke("write").text]}

    async def criticise(state: State) -> State:
        return {"texts": [(await chat.ainvoke("criticise")).text]}

    graph = StateGraph(State)
    graph.add_node("writer", write)
    graph.add_node("critic", criticise)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "critic")
    graph.add_edge("critic", END)
    return graph.compile()


# -------------------------------------------------------------------------------------- every way to call a model


async def astream(chat: ChatOpenAI) -> None:
    assert [chunk async for chunk in chat.astream("hi", WRITER)]


async def events(chat: ChatOpenAI) -> None:
    assert [event async for event in chat.astream_events("hi", WRITER, version="v2")]


async def graph_messages(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, name="writer")
    assert [part async for part in agent.astream(HELLO, stream_mode="messages")]


async def graph_events(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, name="writer")
    assert [event async for event in agent.astream_events(HELLO, version="v2")]


async def gather(chat: ChatOpenAI) -> None:
    await asyncio.gather(*(chat.ainvoke("hi", WRITER) for _ in range(8)))


WAYS: dict[str, tuple[Agent, int]] = {
    "invoke": (lambda chat: chat.invoke("hi", WRITER), 1),
    "ainvoke": (lambda chat: chat.ainvoke("hi", WRITER), 1),
    "batch": (lambda chat: chat.batch(["a", "b", "c"], WRITER), 3),
    "abatch": (lambda chat: chat.abatch(["a", "b", "c"], WRITER), 3),
    "stream": (lambda chat: list(chat.stream("hi", WRITER)), 1),
    "astream": (astream, 1),
    "astream_events": (events, 1),
    "graph.stream": (lambda chat: list(create_agent(chat, name="writer").stream(HELLO, stream_mode="messages")), 1),
    "graph.astream": (graph_messages, 1),
    "graph.astream_events": (graph_events, 1),
    "gather": (gather, 8),
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_to_call_a_model_is_captured_with_its_exact_tokens(way: str, rollout: Any):
    agent, count = WAYS[way]
    played = await rollout(agent)
    played.expect(*["writer"] * count)
    assert len(played.steps("model_start")) == len(played.steps("model_end")) == count
    assert all(call.call_id for call in played.rollout.calls)


class Answer(BaseModel):
    """What a structured answer looks like."""

    text: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain-openai's own, for its parsed answers
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_structured_output_is_captured(method: str, streaming: bool, rollout: Any, server: ModelServer):
    reply = tool_call("Answer", text="four") if method == "function_calling" else '{"text": "four"}'
    server.engine = ScriptedEngine([reply])

    async def agent(chat: ChatOpenAI) -> None:
        structured = chat.with_structured_output(Answer, method=method).with_config(WRITER)
        answers = [one async for one in structured.astream("hi")] if streaming else [await structured.ainvoke("hi")]
        assert answers[-1] == Answer(text="four")

    (await rollout(agent)).expect("writer")


async def test_an_agent_with_a_tool_strategy_is_captured(rollout: Any, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("Answer", text="four")])

    async def agent(chat: ChatOpenAI) -> None:
        solver = create_agent(chat, name="solver", response_format=ToolStrategy(Answer))
        assert (await solver.ainvoke(HELLO))["structured_response"] == Answer(text="four")

    (await rollout(agent)).expect("solver")


# ------------------------------------------------------------------------------------------------- who it was


@pytest.mark.parametrize(
    ("metadata", "run_name", "name"),
    [
        ({"agl_agent": "me", "lc_agent_name": "agent", "langgraph_node": "node"}, "run", "me"),
        ({"lc_agent_name": "agent", "langgraph_checkpoint_ns": "node:1-2", "langgraph_node": "node"}, "run", "agent"),
        ({"langgraph_checkpoint_ns": "outer:1-2|inner:3-4", "langgraph_node": "inner"}, "run", "outer/inner"),
        ({"langgraph_checkpoint_ns": "outer:1-2|1|inner:3-4"}, None, "outer/inner"),
        ({"langgraph_checkpoint_ns": "writer:1-2", "langgraph_node": "writer"}, None, "writer"),
        ({"langgraph_checkpoint_ns": "", "langgraph_node": "node"}, "run", "node"),
        ({}, "run", "run"),
        ({}, None, None),
        ({"agl_agent": "  "}, "run", "run"),
        ({"agl_agent": 5}, None, None),
        ({"agl_agent": "SQL writer"}, None, "SQL writer"),
        ({"agl_agent": "schön*[a]\n2"}, None, "sch_n__a__2"),
        ({"agl_agent": "x" * 200}, None, "x" * 128),
    ],
)
def test_an_agent_is_named_by_the_most_explicit_name(metadata: dict[str, Any], run_name: str | None, name: str | None):
    assert name_agent(metadata, run_name) == name


async def test_the_nodes_of_a_graph_are_its_agents(rollout: Any):
    played = await rollout(lambda chat: writer_and_critic(chat).ainvoke({"texts": []}))
    played.expect("writer", "critic")
    assert all(step.parent for step in played.steps("model_start"))


async def test_a_graph_inside_a_graph_is_named_by_its_path(rollout: Any):
    async def agent(chat: ChatOpenAI) -> None:
        graph = StateGraph(State)
        graph.add_node("team", writer_and_critic(chat))
        graph.add_edge(START, "team")
        await graph.compile().ainvoke({"texts": []})

    (await rollout(agent)).expect("team/writer", "team/critic")


async def test_send_branches_are_calls_of_one_agent_with_parents_of_their_own(rollout: Any):
    async def agent(chat: ChatOpenAI) -> None:
        async def work(state: State) -> State:
            return {"texts": [(await chat.ainvoke("the same")).text]}

        graph = StateGraph(State)
        graph.add_node("worker", work)
        graph.add_conditional_edges(START, lambda _: [Send("worker", {"texts": []}) for _ in range(3)], ["worker"])
        assert len((await graph.compile().ainvoke({"texts": []}))["texts"]) == 3

    played = await rollout(agent)
    played.expect("worker", "worker", "worker")
    assert len({step.parent for step in played.steps("model_start")}) == 3


async def test_a_run_name_names_an_agent_and_without_any_name_it_is_main(rollout: Any):
    async def agent(chat: ChatOpenAI) -> None:
        await chat.ainvoke("hi", {"run_name": "solver"})
        await chat.ainvoke("hi")
        with agl.agent("judge"):
            await chat.ainvoke("hi")

    (await rollout(agent)).expect("solver", "main", "judge")


async def test_a_thread_that_was_not_wrapped_is_still_captured_but_nobody_knows_whose_it_is(rollout: Any):
    def agent(chat: ChatOpenAI) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(chat.invoke, "hi", WRITER).result()  # pyright: ignore
            pool.submit(agl.wrap(chat.invoke), "hi", WRITER).result()  # pyright: ignore

    played = await rollout(agent)
    played.expect("main", "writer")
    assert len(played.steps("model_end")) == 1


# ------------------------------------------------------------------------------------- retries, fallbacks, failures


async def test_with_retry_counts_the_attempt_that_succeeded(rollout: Any, server: ModelServer):
    server.faults.append(Fault(status=400))

    async def agent(chat: ChatOpenAI) -> None:
        await chat.with_retry(stop_after_attempt=2, wait_exponential_jitter=False).ainvoke("hi", WRITER)

    played = await rollout(agent)
    played.expect("writer")
    assert len(played.steps("model_start")) == 2
    assert "400" in played.steps("model_error")[0].data["error"]


@pytest.mark.parametrize("synchronous", [False, True])
async def test_with_fallbacks_counts_the_model_that_answered(synchronous: bool, rollout: Any, server: ModelServer):
    server.faults.append(Fault(status=400))

    def agent(chat: ChatOpenAI) -> Any:
        chain = chat.with_fallbacks([chat.bind(temperature=0.5)]).with_config(WRITER)
        return chain.invoke("hi") if synchronous else chain.ainvoke("hi")

    played = await rollout(agent)
    played.expect("writer")
    assert [step.kind for step in played.steps("model_error", "model_end")] == ["model_error", "model_end"]


async def test_a_stream_that_breaks_is_no_transition(rollout: Any, server: ModelServer):
    server.faults.append(Fault(break_after=5))

    async def agent(chat: ChatOpenAI) -> None:
        with pytest.raises(openai.APIError):
            await astream(chat)

    played = await rollout(agent)
    played.expect()
    assert len(played.steps("model_error")) == 1


async def test_a_call_that_is_cancelled_in_its_own_task_leaves_no_label_behind(
    rollout_with_llm: Any, server: ModelServer
):
    server.faults.append(Fault(delay=1.0))

    async def agent(task: Any, llm: agl.LLM) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await ChatOpenAI(**llm.openai()).ainvoke("hi", WRITER)
        await raw(llm)

    played = await rollout_with_llm(agent)
    played.expect("main")
    assert [call.call_id for call in played.rollout.calls if call.state == "done"] == [None]


# ------------------------------------------------------------------------------------------- labels that are stale


async def test_a_raw_call_in_a_tool_does_not_carry_the_finished_calls_label(rollout_with_llm: Any, server: ModelServer):
    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        first = labels["agent"] == "writer" and "<|im_start|>tool\n" not in prompt
        return tool_call("look_up", word="agl") if first else f"said by {labels['agent']}"

    server.engine = ScriptedEngine(reply)

    async def agent(task: Any, llm: agl.LLM) -> None:
        @tool
        async def look_up(word: str) -> str:
            """Look a word up."""
            await raw(llm)
            return "found"

        await create_agent(ChatOpenAI(**llm.openai()), [look_up], name="writer").ainvoke(HELLO)

    played = await rollout_with_llm(agent)
    played.expect("writer", "main", "writer")
    assert sum(call.call_id is None for call in played.rollout.calls) == 1


async def test_a_raw_call_after_a_cached_answer_does_not_carry_its_label(rollout_with_llm: Any):
    async def agent(task: Any, llm: agl.LLM) -> None:
        chat = ChatOpenAI(**llm.openai(), cache=InMemoryCache())
        await chat.ainvoke("hi", WRITER)
        await chat.ainvoke("hi", WRITER)
        await raw(llm)

    (await rollout_with_llm(agent)).expect("writer", "main")


async def test_a_raw_call_in_the_middle_of_a_stream_is_a_call_of_its_own(rollout_with_llm: Any):
    async def agent(task: Any, llm: agl.LLM) -> None:
        asked = False
        async for _ in ChatOpenAI(**llm.openai()).astream("hi", WRITER):
            if not asked:
                asked = True
                await raw(llm)

    (await rollout_with_llm(agent)).expect("writer", "main")


async def test_several_prompts_in_one_generate_are_all_kept(rollout: Any):
    async def agent(chat: ChatOpenAI) -> None:
        prompts = [[HumanMessage("one")], [HumanMessage("two")]]
        await chat.agenerate(prompts, metadata={"agl_agent": "writer"})

    (await rollout(agent)).expect("writer", "writer")


# --------------------------------------------------------------------------------------------------------- routing


async def test_agents_that_are_not_selected_go_to_the_frozen_model(rollout: Any):
    played = await rollout(
        lambda chat: writer_and_critic(chat).ainvoke({"texts": []}), optimize=("writer",), unselected="frozen"
    )
    assert {call.agent: call.model for call in played.rollout.calls} == {"writer": "policy", "critic": "frozen"}


async def test_an_agent_with_a_model_of_its_own_is_left_alone(rollout: Any):
    with ModelServer(["from elsewhere"], model="gpt") as own:
        other = ChatOpenAI(model="gpt", base_url=f"{own.url}/v1", api_key="sk-own")  # pyright: ignore

        async def agent(chat: ChatOpenAI) -> None:
            await chat.ainvoke("hi", WRITER)
            assert (await other.ainvoke("hi", {"metadata": {"agl_agent": "judge"}})).text == "from elsewhere"

        played = await rollout(agent)
        played.expect("writer")
        (exchange,) = own.exchanges
        assert not [name for name in exchange.headers if name.startswith("x-agl")]
        assert exchange.headers["authorization"] == "Bearer sk-own"
        assert [step.agent for step in played.steps("model_end")] == ["writer", "judge"]


# ------------------------------------------------------------------------------------------------- installation


async def test_a_handler_that_is_given_and_installed_reports_once(rollout: Any):
    async def agent(chat: ChatOpenAI) -> None:
        handlers = {"callbacks": [AglCallbackHandler(), AglCallbackHandler()], **WRITER}
        await chat.ainvoke("hi", handlers)
        chat.callbacks = [AglCallbackHandler()]
        await chat.ainvoke("hi", WRITER)

    played = await rollout(agent)
    played.expect("writer", "writer")
    assert len(played.steps("model_start")) == len(played.steps("model_end")) == 2


@pytest.fixture
async def chat(server: ModelServer) -> AsyncGenerator[ChatOpenAI]:
    """A model with a handler of its own, and no rollout around it."""
    llm = agl.LLM(f"{server.url}/v1", "none")
    yield ChatOpenAI(**llm.openai(), callbacks=[AglCallbackHandler()])
    await llm.close()


def handlers_of_a_run() -> list[Any]:
    return [one for one in CallbackManager.configure().handlers if isinstance(one, AglCallbackHandler)]


def test_the_plugin_is_loaded_without_langchain():
    code = "import sys, agl.plugins; agl.plugins.manager(); sys.exit('langchain_core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_install_can_be_undone():
    assert not handlers_of_a_run()
    undo = install()
    assert len(handlers_of_a_run()) == 1
    undo_again = install()
    assert len(handlers_of_a_run()) == 1
    undo_again()
    assert len(handlers_of_a_run()) == 1
    undo()
    assert not handlers_of_a_run()


async def test_outside_of_a_rollout_nothing_happens(chat: Any):
    assert (await chat.ainvoke("hi")).text == "a word of None"
    assert scope.current_call() is None
    assert not chat.callbacks[0].failures


async def test_messages_are_never_changed(rollout: Any):
    messages = [HumanMessage([{"type": "text", "text": "hi"}])]
    before = copy.deepcopy(messages)

    async def agent(chat: ChatOpenAI) -> None:
        await chat.ainvoke(messages, WRITER)

    (await rollout(agent)).expect("writer")
    assert messages == before


async def test_an_error_of_ours_is_kept_and_logged_once_and_never_reaches_the_agent(
    chat: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(scope.RolloutScope, "emit", broken)
    with scope.rollout(scope.RolloutScope("r", 1, Selection(None))):
        assert (await chat.ainvoke("hi")).text
    assert [str(error) for error in chat.callbacks[0].failures] == ["ours", "ours"]
    assert [record.name for record in caplog.records if record.levelname == "ERROR"] == ["agl_langchain"]


async def test_steps_go_to_the_rollout_in_which_the_call_started(chat: Any):
    here = scope.RolloutScope("r", 1, Selection(None))
    with scope.rollout(here):
        stream = chat.astream("hi")
        await anext(stream)
    await stream.aclose()  # pyright: ignore
    assert [step.kind for step in here.steps] == ["model_start", "model_error"]


async def test_a_tool_call_is_reported_with_its_id(rollout: Any, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=1, b="x"), tool_call("add", a=1, b=2), "3"])

    async def agent(chat: ChatOpenAI) -> None:
        @tool
        def add(a: int, b: int) -> int:
            """Add."""
            return a + b

        await create_agent(chat, [add], name="solver").ainvoke({"messages": [("user", "1 + 2")]})

    played = await rollout(agent)
    played.expect("solver", "solver", "solver")
    wrong, right = played.steps("tool_start")
    assert wrong.data["tool_call_id"] and right.data["tool_call_id"]
    assert {(step.kind, step.call_id) for step in played.steps("tool_end", "tool_error")} == {
        ("tool_error", wrong.call_id),
        ("tool_end", right.call_id),
    }
    json.dumps([dict(step.data) for step in played.rollout.steps])

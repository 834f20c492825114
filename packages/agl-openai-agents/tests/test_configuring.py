"""What is the author's stays the author's: models, settings, keys, filters, traces, the runner."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    ModelProvider,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIProvider,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    TracingProcessor,
    add_trace_processor,
    function_tool,
    set_trace_processors,
)
from agents.run import CallModelData, ModelInputData, get_default_agent_runner
from agents.tracing.processors import BackendSpanExporter, BatchTraceProcessor, default_processor
from openai.types.shared import Reasoning

import agl
from agl import scope
from agl.errors import SelectionError
from agl.selection import Selection
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl_openai_agents import agl_instrument, install, reporting, run_config
from agl_openai_agents.tracing import watcher

Rollout = Callable[..., Any]


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# --------------------------------------------------------------------------------------------------- keys, selection


async def test_keys_and_headers_stay_with_their_servers(rollout: Rollout, own: ModelServer, gpt: Any):
    settings = ModelSettings(extra_headers={"x-author-too": "secret"}, extra_query={"token": "secret"})
    agents = [Agent(name, model=gpt, model_settings=settings) for name in ("writer", "critic")]

    async def agent(llm: agl.LLM) -> None:
        for one in agents:
            result = await Runner.run(one, "hi", run_config=run_config(llm, optimize=["writer"]))
        assert result.final_output == "from elsewhere"  # pyright: ignore

    played = await rollout(agent)
    played.expect("writer")
    (theirs,), (ours,) = own.exchanges, played.exchanges
    assert theirs.headers["authorization"] == "Bearer sk-author" and theirs.headers["x-author-too"] == "secret"
    assert not [name for name in theirs.headers if name.startswith("x-agl")]
    assert theirs.body["model"] == "gpt-4o-mini"
    assert "secret" not in str(ours.headers) and "sk-author" not in str(ours.headers)
    assert [(step.agent, step.name) for step in played.steps("model_end")] == [
        ("writer", "policy"),
        ("critic", "gpt-4o-mini"),
    ]


async def test_what_the_trainer_selects_is_narrowed_and_never_widened(rollout: Rollout, own: ModelServer, gpt: Any):
    async def agent(llm: agl.LLM) -> None:
        for name in ("writer", "rewriter", "critic"):
            await Runner.run(Agent(name, model=gpt), "hi", run_config=run_config(llm, optimize=["*writer"]))

    played = await rollout(agent, optimize=("writer", "critic"))
    played.expect("writer")
    assert len(own.exchanges) == 2


def test_optimize_must_be_a_list():
    with pytest.raises(SelectionError, match=r"optimize=\['writer'\]"):
        run_config(agl.LLM("http://127.0.0.1:9/v1", "none"), optimize="writer")


# ---------------------------------------------------------------------------------------------------- models, settings


async def test_the_settings_of_the_agent_hold_and_those_of_the_models_name_go_with_the_name(rollout: Rollout):
    settings = ModelSettings(temperature=0.3, max_tokens=7, extra_body={"top_k": 5})
    named = Agent("named", model="gpt-5.1", model_settings=settings)
    unset = Agent("unset", model="gpt-5.1")

    async def agent(llm: agl.LLM) -> None:
        await Runner.run(named, "hi", run_config=run_config(llm, config=RunConfig(model_settings={"top_p": 0.5})))
        await Runner.run(unset, "hi", run_config=run_config(llm))

    played = await rollout(agent)
    played.expect("named", "unset")
    one, other = (exchange.body for exchange in played.exchanges)
    assert (one["temperature"], one["top_p"], one["max_tokens"], one["top_k"]) == (0.3, 0.5, 7, 5)
    assert not {"reasoning_effort", "verbosity"} & other.keys()


class Provider(ModelProvider):
    """Of the author's own: its models answer what they were asked with."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def get_model(self, model_name: str | None) -> Model:
        return OpenAIChatCompletionsModel(f"{model_name}-of-mine", self.client)


async def test_agents_that_are_not_selected_get_what_they_would_get_without_us(
    rollout: Rollout, own: ModelServer, client: Any
):
    given: list[tuple[Agent[Any], RunConfig]] = [
        (Agent("a", model="gpt-5.1"), RunConfig()),
        (Agent("b", model="gpt-5.1", model_settings=ModelSettings(temperature=0.5)), RunConfig()),
        (Agent("c"), RunConfig(model="gpt-5.1", model_settings=ModelSettings(max_tokens=9))),
        (Agent("d"), RunConfig(model=OpenAIChatCompletionsModel("other", client))),
        (Agent("e", model="gpt-5.1", model_settings=ModelSettings(reasoning=Reasoning(effort="high"))), RunConfig()),
    ]
    bodies: list[list[Any]] = []

    async def agent(llm: agl.LLM) -> None:
        for ours in (False, True):
            own.exchanges.clear()
            for one, config in given:
                config.model_provider = Provider(client)
                routed = run_config(llm, optimize=["nobody"], config=config) if ours else config
                try:
                    await Runner.run(one, "hi", run_config=routed)
                except Exception as error:
                    assert "no model is named" in str(error)
            bodies.append([exchange.body for exchange in own.exchanges])

    (await rollout(agent)).expect()
    assert len(bodies[0]) == len(given) and bodies[0] == bodies[1]


async def test_a_model_object_keeps_its_api_and_what_its_author_made_of_it(rollout: Rollout, client: Any):
    class Prefixed(OpenAIChatCompletionsModel):
        """A model of the author's own making."""

        async def get_response(self, *args: Any, **more: Any) -> Any:
            response = await super().get_response(*args, **more)
            response.output[0].content[0].text = f"prefix {response.output[0].content[0].text}"  # pyright: ignore
            return response

    own = Prefixed("gpt-4o-mini", client)

    async def agent(llm: agl.LLM) -> None:
        config = run_config(llm)
        result = await Runner.run(Agent("writer", model=own), "hi", run_config=config)
        assert result.final_output == "prefix a word of writer"
        assert (own.model, own._client.api_key) == ("gpt-4o-mini", "sk-author")
        result = await Runner.run(
            Agent("speaker", model=OpenAIResponsesModel("gpt-5", client)), "hi", run_config=config
        )
        assert (result.last_response_id or "").startswith("resp_")
        result = await Runner.run(Agent("critic", model="gpt-5"), "hi", run_config=config)
        assert result.last_response_id is None

    played = await rollout(agent)
    played.expect("writer", "speaker", "critic")


async def test_a_filter_of_the_authors_holds(rollout: Rollout):
    async def shorten(data: CallModelData[Any]) -> ModelInputData:
        return ModelInputData(input=data.model_data.input[-1:], instructions=f"You are {data.agent.name}.")

    def loud(data: CallModelData[Any]) -> ModelInputData:
        return ModelInputData(input=[{"role": "user", "content": "HI"}], instructions=None)

    async def agent(llm: agl.LLM) -> None:
        for theirs in (shorten, loud):
            config = run_config(llm, config=RunConfig(call_model_input_filter=theirs))
            await Runner.run(
                Agent("writer", instructions="x"), [{"role": "user", "content": "a"}] * 2, run_config=config
            )

    played = await rollout(agent)
    played.expect("writer", "writer")
    assert [[m["content"] for m in exchange.body["messages"]] for exchange in played.exchanges] == [
        ["You are writer.", "a"],
        ["HI"],
    ]


async def test_an_agent_that_learns_needs_no_key(rollout: Rollout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (await rollout(lambda llm: Runner.run(Agent("writer"), "hi", run_config=run_config(llm)))).expect("writer")


async def test_outside_of_a_rollout_calls_go_to_the_model_without_an_id(server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "none")
    result = await Runner.run(Agent("writer"), "hi", run_config=run_config(llm))
    assert result.final_output == "a word of writer"
    (exchange,) = server.exchanges
    assert exchange.headers["x-agl-agent"] == "writer" and "x-agl-call" not in exchange.headers
    assert scope.current_call() is None
    await llm.close()


def test_run_sync_may_be_called_in_one_loop_after_another(server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "none")
    config = run_config(llm)
    for _ in range(3):
        result = asyncio.run(Runner.run(Agent("writer"), "hi", run_config=config))
        assert result.final_output == "a word of writer"
    asyncio.run(llm.close())


# --------------------------------------------------------------------------------------------------------------- traces


class Seen(TracingProcessor):
    """A tracing service that the author chose."""

    def __init__(self) -> None:
        self.spans: list[str] = []

    def on_span_end(self, span: Any) -> None:
        self.spans.append(span.span_data.type)

    def on_span_start(self, span: Any) -> None: ...
    def on_trace_start(self, trace: Any) -> None: ...
    def on_trace_end(self, trace: Any) -> None: ...
    def shutdown(self) -> None: ...
    def force_flush(self) -> None: ...


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Any]]:
    """What leaves for OpenAI, with the key that everybody sets who has a server of their own."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    sent: list[Any] = []
    monkeypatch.setattr(BackendSpanExporter, "export", lambda self, items: sent.extend(items))
    default_processor().force_flush()
    sent.clear()
    set_trace_processors([default_processor()])
    yield sent
    default_processor().force_flush()
    set_trace_processors([])


async def test_no_prompt_leaves_for_openai_while_rollouts_run_and_its_exporter_is_back_after(
    exported: list[Any], rollout: Rollout, server: ModelServer
):
    theirs, later = Seen(), Seen()
    add_trace_processor(theirs)

    async def agent(llm: agl.LLM) -> None:
        add_trace_processor(later)
        await Runner.run(Agent("writer"), "a secret", run_config=run_config(llm))

    (await rollout(agent)).expect("writer")
    default_processor().force_flush()
    assert not exported
    assert "generation" in theirs.spans and "generation" in later.spans
    llm = agl.LLM(f"{server.url}/v1", "none")
    await Runner.run(Agent("writer"), "hi", run_config=run_config(llm))
    await llm.close()
    default_processor().force_flush()
    assert exported and later.spans.count("generation") == 2


def test_instrumenting_twice_is_undone_when_both_are(exported: list[Any]):
    from agl_openai_agents.tracing import _processors

    before = _processors()
    assert isinstance(before[0], BatchTraceProcessor)
    first, second = agl_instrument(), agl_instrument()
    first()
    first()
    assert _processors() == (watcher,)
    second()
    assert _processors() == before


async def test_without_traces_calls_count_and_tools_are_told_by_their_results(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=2, b=3), "5"])
    config = RunConfig(tracing_disabled=True)
    writer = Agent("writer", tools=[add])
    played = await rollout(lambda llm: Runner.run(writer, "hi", run_config=run_config(llm, config=config)))
    played.expect("writer", "writer")
    (tool,) = played.steps("tool_end")
    assert (tool.name, tool.agent, tool.data["result_length"]) == ("add", "writer", 1)
    assert len({step.parent for step in played.rollout.steps}) == 1


async def test_without_sensitive_data_in_traces_no_length_is_told(rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("add", a=2, b=3), "5"])
    config = RunConfig(trace_include_sensitive_data=False)
    writer = Agent("writer", tools=[add])
    played = await rollout(lambda llm: Runner.run(writer, "hi", run_config=run_config(llm, config=config)))
    played.expect("writer", "writer")
    assert [step.data.keys() & {"tool_call_id", "result_length"} for step in played.steps("tool_end")] == [
        {"tool_call_id"}
    ]


async def test_an_error_of_ours_is_logged_once_and_never_reaches_the_agent(
    server: ModelServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(scope.RolloutScope, "emit", broken)
    monkeypatch.setattr(reporting, "_failed", False)
    llm = agl.LLM(f"{server.url}/v1", "none")
    with scope.rollout(scope.RolloutScope("r", 1, Selection(None))):
        result = await Runner.run(Agent("writer"), "hi", run_config=run_config(llm))
    assert result.final_output == "a word of writer"
    assert [record.name for record in caplog.records if record.levelno >= logging.ERROR] == ["agl_openai_agents"]
    await llm.close()


# ------------------------------------------------------------------------------------------- programs that nobody edits


def test_the_plugin_is_loaded_without_the_sdk():
    code = "import sys, agl.plugins; agl.plugins.current_call(); sys.exit('agents' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


LAZY = """
import asyncio, sys, agl
from agl import plugins, scope
from agl.selection import Selection

stop = plugins.instrument()
assert "agents" not in sys.modules
here = scope.RolloutScope("r", 1, Selection(None))

async def main():
    import agl_openai_agents
    from agents import Agent, Runner
    from agents.tracing.processors import default_processor
    llm = agl.LLM(sys.argv[1], "none")
    with scope.rollout(here):
        await Runner.run(Agent("writer"), "hi", run_config=agl_openai_agents.run_config(llm))
    from agl_openai_agents.tracing import _processors, watcher
    assert _processors() == (watcher,)
    stop()
    assert _processors() == (default_processor(),)
    await llm.close()

asyncio.run(main())
print([step.kind for step in here.steps])
"""


def test_the_sdk_is_watched_from_when_a_program_imports_it(server: ModelServer):
    done = subprocess.run([sys.executable, "-c", LAZY, f"{server.url}/v1"], capture_output=True, text=True)
    assert done.stdout == "['model_start', 'model_end']\n", done.stderr


async def somebodys_program(question: str) -> str:
    """It knows nothing of us: no run configuration, runs inside of tools, models by name."""
    solver = Agent("solver", model="gpt-4o-mini")

    @function_tool
    async def ask_solver(question: str) -> str:
        """Ask the solver."""
        return (await Runner.run(solver, question)).final_output

    manager = Agent("manager", model="gpt-4o", tools=[ask_solver])
    streamed = Runner.run_streamed(manager, question, run_config={"workflow_name": "theirs"})  # pyright: ignore
    assert [event async for event in streamed.stream_events()]
    return streamed.final_output


def asks_the_solver(prompt: str, labels: Mapping[str, str]) -> str:
    first = labels["agent"] == "manager" and "<|im_start|>tool\n" not in prompt
    return tool_call("ask_solver", question="6 x 7") if first else f"by {labels['agent']}"


@pytest.mark.parametrize("use_responses", [None, True])
async def test_a_program_that_nobody_edits(use_responses: bool | None, rollout: Rollout, server: ModelServer):
    server.engine = ScriptedEngine(asks_the_solver)
    before = get_default_agent_runner()

    async def agent(llm: agl.LLM) -> None:
        undo = install(llm, use_responses=use_responses)
        assert await somebodys_program("hi") == "by manager"
        undo()
        undo()
        assert get_default_agent_runner() is before

    played = await rollout(agent)
    played.expect("manager", "solver", "manager")
    assert played.steps("model_start")[1].parent == played.steps("tool_start")[0].call_id


async def test_programs_that_nobody_edits_run_at_once_each_for_its_own_rollout(lightning: Any, server: ModelServer):
    from agl.testing.contract import play

    server.engine = ScriptedEngine(asks_the_solver)

    async def agent(task: Any, llm: agl.LLM) -> None:
        install(llm)
        await somebodys_program(f"task {task['number']}")

    before = get_default_agent_runner()
    for played in await play(agent, lightning, server, rollouts=8):
        played.expect("manager", "solver", "manager")
        assert f"task {played.rollout.task.data['number']}" in str(played.exchanges[0].body)
    runner: Any = get_default_agent_runner()
    assert runner is before or runner.before is before


async def test_a_configuration_of_ours_holds_where_we_are_installed(rollout: Rollout, own: ModelServer, gpt: Any):
    async def agent(llm: agl.LLM) -> None:
        undo = install(llm)
        await Runner.run(Agent("writer", model=gpt), "hi", run_config=run_config(llm, optimize=["nobody"]))
        undo()

    (await rollout(agent)).expect()
    assert len(own.exchanges) == 1


async def test_a_run_that_nobody_configured_is_named_by_its_traces(rollout: Rollout, server: ModelServer):
    async def agent(llm: agl.LLM) -> None:
        async with llm.async_client() as client:
            provider = OpenAIProvider(openai_client=client, use_responses=False)
            for name in ("writer", "critic"):
                await Runner.run(Agent(name), "hi", run_config=RunConfig(model_provider=provider))
            with agl.agent("judge"):
                await Runner.run(Agent("writer"), "hi", run_config=RunConfig(model_provider=provider))

    played = await rollout(agent)
    played.expect("writer", "critic", "judge")
    assert not played.steps("model_start")

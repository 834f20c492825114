"""What the tests of the Agents SDK's adapter share: a rollout in which everything is real but for the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, set_trace_processors
from openai import AsyncOpenAI

import agl
from agl.testing import ModelServer, ScriptedEngine
from agl.testing.contract import Lightning, Played, play, say, start_lightning

MODEL = "gpt-4o-mini"


@pytest.fixture(scope="session", autouse=True)
def no_export() -> None:
    """Outside of rollouts the SDK sends its traces to OpenAI; no test may."""
    set_trace_processors([])


@pytest.fixture(scope="session")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lightning]:
    yield from start_lightning(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="session")
def running() -> Generator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def server(running: ModelServer) -> ModelServer:
    """The policy's model server; a test gives it another script through ``server.engine``."""
    running.engine = ScriptedEngine(say)
    running.exchanges.clear()
    return running


@pytest.fixture(scope="session")
def own_server() -> Generator[ModelServer]:
    """Where the authors of the agents have their own model."""
    with ModelServer(model=MODEL) as server:
        yield server


@pytest.fixture
def own(own_server: ModelServer) -> ModelServer:
    """The author's model server, with no exchange yet."""
    own_server.engine = ScriptedEngine(lambda prompt, labels: "from elsewhere")
    own_server.exchanges.clear()
    return own_server


@pytest.fixture
async def client(own: ModelServer) -> AsyncGenerator[AsyncOpenAI]:
    """A client as an author makes it, with a key and headers of the author's own."""
    async with AsyncOpenAI(
        api_key="sk-author", base_url=f"{own.url}/v1", max_retries=1, default_headers={"x-author": "secret"}
    ) as client:
        yield client


@pytest.fixture
def gpt(client: AsyncOpenAI) -> OpenAIChatCompletionsModel:
    """A model as an author makes it."""
    return OpenAIChatCompletionsModel(MODEL, client)


@pytest.fixture
def gpt_responses(client: AsyncOpenAI) -> OpenAIResponsesModel:
    """The same, through the Responses API."""
    return OpenAIResponsesModel(MODEL, client)


@pytest.fixture
def rollout(lightning: Lightning, server: ModelServer) -> Callable[..., Any]:
    """Runs ``await agent(llm)`` for one rollout; what it returns is no reward."""

    async def run(agent: Callable[[agl.LLM], Any], **options: Any) -> Played:
        async def as_function(task: Any, llm: agl.LLM) -> None:
            await agent(llm)

        (played,) = await play(as_function, lightning, server, **options)
        return played

    return run

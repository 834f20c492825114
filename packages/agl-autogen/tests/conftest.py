"""What the tests of AutoGen's adapter share: a rollout in which everything is real but for the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

import agl
from agl.testing import ModelServer, ScriptedEngine
from agl.testing.contract import Lightning, Played, play, say, start_lightning

MODEL = "gpt-4o-mini-2024-07-18"
"""With its date: AutoGen warns of a server that answers with another name than the one it thinks of."""


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
    with ModelServer(lambda prompt, labels: "from elsewhere", model=MODEL) as server:
        yield server


@pytest.fixture
def own(own_server: ModelServer) -> ModelServer:
    """The author's model server, with no exchange yet."""
    own_server.exchanges.clear()
    return own_server


@pytest.fixture
async def gpt(own: ModelServer) -> AsyncGenerator[Callable[..., OpenAIChatCompletionClient]]:
    """A client as an author makes it, with a key and headers of the author's own."""
    made: list[OpenAIChatCompletionClient] = []

    def make(**settings: Any) -> OpenAIChatCompletionClient:
        options = {"model": MODEL, "api_key": "sk-author", "base_url": f"{own.url}/v1", "max_retries": 1}
        made.append(OpenAIChatCompletionClient(**{**options, "default_headers": {"x-author": "secret"}, **settings}))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
def assistant(gpt: Callable[..., Any]) -> Callable[..., AssistantAgent]:
    """An agent as one writes it in AutoGen."""

    def make(name: str = "writer", client: Any = None, **settings: Any) -> AssistantAgent:
        return AssistantAgent(name, client or gpt(), **{"system_message": f"You are {name}.", **settings})

    return make


@pytest.fixture
def rollout(lightning: Lightning, server: ModelServer) -> Callable[..., Any]:
    """Runs ``await agent(llm)`` for one rollout; what it returns is no reward."""

    async def run(agent: Callable[[agl.LLM], Any], **options: Any) -> Played:
        async def as_function(task: Any, llm: agl.LLM) -> None:
            await agent(llm)

        (played,) = await play(as_function, lightning, server, **options)
        return played

    return run

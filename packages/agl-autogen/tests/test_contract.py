"""AutoGen keeps the adapter contract."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient

import agl
from agl.testing.contract import AdapterContract
from agl_autogen import wrap


def gpt(**settings: Any) -> OpenAIChatCompletionClient:
    """The client that the agents' author gave them; nobody answers there."""
    return OpenAIChatCompletionClient(
        model="gpt-4o-mini-2024-07-18",
        api_key="sk-author",
        base_url="http://127.0.0.1:9/v1",
        **{"max_retries": 1, **settings},
    )


AUTHORS = gpt()
"""One for all agents, as authors do: making it takes 50 ms."""


def assistant(name: str = "writer", client: Any = None, **settings: Any) -> AssistantAgent:
    """An agent as one writes it in AutoGen."""
    return AssistantAgent(name, client or AUTHORS, system_message=None, **settings)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail() -> str:
    """Fail."""
    raise ValueError("it never works")


class TestAutoGen(AdapterContract):
    """Every situation, in AutoGen's own way."""

    async def run(self, situation: str, llm: agl.LLM) -> Any:
        await getattr(self, situation)(llm)

    async def plain_call(self, llm: agl.LLM) -> None:
        result = await wrap(assistant(), llm).run(task="hello")
        assert result.messages[-1].to_text() == "a word of writer"  # pyright: ignore

    async def stream(self, llm: agl.LLM) -> None:
        agent = assistant(model_client_stream=True)
        pieces = [m.content async for m in wrap(agent, llm).run_stream(task="hello") if type(m).__name__[:5] == "Model"]
        assert "".join(pieces) == "a word of writer" and len(pieces) > 1

    async def two_agents(self, llm: agl.LLM) -> None:
        team = RoundRobinGroupChat([assistant("writer"), assistant("critic")], max_turns=2)
        await wrap(team, llm).run(task="hello")

    async def parent(self, llm: agl.LLM) -> None:
        await wrap(RoundRobinGroupChat([assistant()], max_turns=1), llm).run(task="hello")

    async def tool_results(self, llm: agl.LLM) -> None:
        result = await wrap(assistant(tools=[add], max_tool_iterations=2), llm).run(task="2 + 3")
        assert [m.to_text() for m in result.messages][-1] == "writer is done"  # pyright: ignore

    async def tool_error(self, llm: agl.LLM) -> None:
        await wrap(assistant(tools=[fail], reflect_on_tool_use=True), llm).run(task="hello")

    async def model_error(self, llm: agl.LLM) -> None:
        await self.plain_call(llm)

    async def http_retry(self, llm: agl.LLM) -> None:
        await self.plain_call(llm)

    async def timeout_then_retry(self, llm: agl.LLM) -> None:
        await wrap(assistant(client=gpt(timeout=0.5)), llm).run(task="hello")

    async def cancel(self, llm: agl.LLM) -> None:
        agent = wrap(assistant(), llm)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(agent.run(task="hello"), 0.5)
        await agent.run(task="hello")

    async def abandoned_stream(self, llm: agl.LLM) -> None:
        stream = wrap(assistant(model_client_stream=True), llm).run_stream(task="hello")
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                if type(message).__name__ == "ModelClientStreamingChunkEvent":
                    break

    async def cache_hit(self, llm: agl.LLM) -> None:
        cached = ChatCompletionCache(gpt())
        for _ in range(2):
            await wrap(assistant(client=cached), llm).run(task="hello")

    async def parallel_same_prompt(self, llm: agl.LLM) -> None:
        await asyncio.gather(*(wrap(assistant(), llm).run(task="hello") for _ in range(5)))

    async def choices(self, llm: agl.LLM) -> None:  # AutoGen refuses n, and reads the first answer of as many as come
        await wrap(assistant(client=gpt(extra_body={"n": 2})), llm).run(task="hello")

    async def nested_agents(self, llm: agl.LLM) -> None:
        solver = assistant("solver")

        async def ask_solver(question: str) -> str:
            """Ask the solver."""
            return (await wrap(solver, llm).run(task=question)).messages[-1].to_text()  # pyright: ignore

        manager = assistant("manager", tools=[ask_solver], reflect_on_tool_use=True)
        await wrap(manager, llm).run(task="hello")

    async def threads(self, llm: agl.LLM) -> None:
        def ask() -> None:
            asyncio.run(wrap(assistant(), llm).run(task="hello"))

        with ThreadPoolExecutor() as pool:
            for asked in [pool.submit(agl.wrap(ask)), pool.submit(agl.wrap(ask))]:
                await asyncio.wrap_future(asked)

    async def rollouts(self, llm: agl.LLM) -> None:
        await self.two_agents(llm)

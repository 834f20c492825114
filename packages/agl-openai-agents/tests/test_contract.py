"""The OpenAI Agents SDK keeps the adapter contract, through both of its model classes."""

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

import agl
from agl.testing.contract import AdapterContract
from agl_openai_agents import run_config


def gpt(**settings: Any) -> OpenAIChatCompletionsModel:
    """The model that the agents' author gave them; nobody answers there."""
    client = AsyncOpenAI(api_key="sk-author", base_url="http://127.0.0.1:9/v1", **{"max_retries": 1, **settings})
    return OpenAIChatCompletionsModel("gpt-4o-mini", client)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def fail() -> str:
    """Fail."""
    raise ValueError("it never works")


class TestChatCompletions(AdapterContract):
    """Every situation, in the SDK's own way."""

    use_responses: ClassVar[bool] = False
    impossible: ClassVar[Mapping[str, str]] = {"cache_hit": "the SDK has no cache of answers"}

    async def run(self, situation: str, llm: agl.LLM) -> Any:
        config = run_config(llm, use_responses=self.use_responses)
        await getattr(self, situation)(config)

    async def plain_call(self, config: Any, **settings: Any) -> None:
        result = await Runner.run(Agent("writer", **settings), "hello", run_config=config)
        assert result.final_output == "a word of writer"

    async def stream(self, config: Any) -> None:
        result = Runner.run_streamed(Agent("writer"), "hello", run_config=config)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == "a word of writer" and len(pieces) > 1

    async def two_agents(self, config: Any) -> None:
        for name in ("writer", "critic"):
            await Runner.run(Agent(name), "hello", run_config=config)

    async def parent(self, config: Any) -> None:
        await self.plain_call(config)

    async def tool_results(self, config: Any) -> None:
        result = await Runner.run(Agent("writer", tools=[add]), "2 + 3", run_config=config)
        assert result.final_output == "writer is done"

    async def tool_error(self, config: Any) -> None:
        await Runner.run(Agent("writer", tools=[fail]), "hello", run_config=config)

    async def model_error(self, config: Any) -> None:
        await self.plain_call(config)

    async def http_retry(self, config: Any) -> None:
        await self.plain_call(config)

    async def timeout_then_retry(self, config: Any) -> None:
        await self.plain_call(config, model=gpt(timeout=0.5))

    async def cancel(self, config: Any) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.plain_call(config), 0.5)
        await self.plain_call(config)

    async def abandoned_stream(self, config: Any) -> None:
        result = Runner.run_streamed(Agent("writer"), "hello", run_config=config)
        async with contextlib.aclosing(result.stream_events()) as events:  # pyright: ignore
            async for event in events:
                if event.type == "raw_response_event":
                    result.cancel()  # to stop reading does not stop the run
                    break

    async def parallel_same_prompt(self, config: Any) -> None:
        await asyncio.gather(*(Runner.run(Agent("writer"), "hello", run_config=config) for _ in range(5)))

    async def choices(self, config: Any) -> None:  # the SDK reads the first answer of as many as come
        settings = ModelSettings(extra_args={"n": 2})
        await Runner.run(Agent("writer", model_settings=settings), "hello", run_config=config)

    async def nested_agents(self, config: Any) -> None:
        solver = Agent("solver")

        @function_tool
        async def ask_solver(question: str) -> str:
            """Ask the solver."""
            return (await Runner.run(solver, question, run_config=config)).final_output

        await Runner.run(Agent("manager", tools=[ask_solver]), "hello", run_config=config)

    async def threads(self, config: Any) -> None:
        def ask() -> None:
            asyncio.run(self.plain_call(config))

        with ThreadPoolExecutor() as pool:
            for asked in [pool.submit(agl.wrap(ask)), pool.submit(agl.wrap(ask))]:
                await asyncio.wrap_future(asked)

    async def rollouts(self, config: Any) -> None:
        await self.two_agents(config)


class TestResponses(TestChatCompletions):
    """The same situations, asked through the Responses API."""

    use_responses: ClassVar[bool] = True
    impossible: ClassVar[Mapping[str, str]] = {**TestChatCompletions.impossible, "choices": "a response is one answer"}

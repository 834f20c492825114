"""The adapter contract, kept by the plainest of programs: the OpenAI client and `agl.agent`, no framework at all."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import agl
from agl.testing.contract import AdapterContract

HELLO: Any = [{"role": "user", "content": "hello"}]


class TestNoFramework(AdapterContract):
    """Calls have no id here: those that the gateway finished count."""

    impossible = dict.fromkeys(
        ("parent", "tool_results", "tool_error", "nested_agents", "cache_hit"), "there is no framework to report it"
    )

    async def run(self, situation: str, llm: agl.LLM) -> None:
        """Each situation is a method."""
        await getattr(self, situation)(llm)

    async def ask(self, llm: agl.LLM, agent: str = "writer", **options: Any) -> Any:
        with agl.agent(agent):
            client = llm.async_client().with_options(max_retries=1)
            return await client.chat.completions.create(model=llm.model, messages=HELLO, **options)

    async def plain_call(self, llm: agl.LLM) -> None:
        await self.ask(llm)

    async def stream(self, llm: agl.LLM) -> None:
        async for _ in await self.ask(llm, stream=True):
            pass

    async def two_agents(self, llm: agl.LLM) -> None:
        await self.ask(llm)
        await self.ask(llm, "critic")

    rollouts = two_agents
    model_error = plain_call
    http_retry = plain_call

    async def timeout_then_retry(self, llm: agl.LLM) -> None:
        await self.ask(llm, timeout=0.5)

    async def cancel(self, llm: agl.LLM) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ask(llm), 0.5)
        await self.ask(llm)

    async def abandoned_stream(self, llm: agl.LLM) -> None:
        async with await self.ask(llm, stream=True) as chunks:
            await anext(aiter(chunks))

    async def parallel_same_prompt(self, llm: agl.LLM) -> None:
        await asyncio.gather(*(self.ask(llm) for _ in range(5)))

    async def choices(self, llm: agl.LLM) -> None:
        await self.ask(llm, n=2)

    async def threads(self, llm: agl.LLM) -> None:
        def ask() -> None:
            with agl.agent("writer"):
                llm.client().chat.completions.create(model=llm.model, messages=HELLO)

        with ThreadPoolExecutor() as pool:
            for asked in [pool.submit(agl.wrap(ask)), pool.submit(agl.wrap(ask))]:
                await asyncio.wrap_future(asked)

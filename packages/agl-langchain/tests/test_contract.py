"""LangChain and LangGraph keep the adapter contract."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import agl
from agl.testing.contract import AdapterContract

WRITER = {"metadata": {"agl_agent": "writer"}}
CRITIC = {"metadata": {"agl_agent": "critic"}}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def fail() -> str:
    """Fail."""
    raise ValueError("it never works")


fail.handle_tool_error = True
HELLO = {"messages": [("user", "hello")]}


class TestLangChain(AdapterContract):
    """Every situation, in LangChain's own way."""

    async def run(self, situation: str, llm: agl.LLM) -> Any:
        chat = ChatOpenAI(**llm.openai(), max_retries=1)
        await getattr(self, situation)(chat)

    async def plain_call(self, chat: ChatOpenAI) -> None:
        await chat.ainvoke("hello", WRITER)

    async def stream(self, chat: ChatOpenAI) -> None:
        assert "".join([chunk.text async for chunk in chat.astream("hello", WRITER)]) == "a word of writer"

    async def two_agents(self, chat: ChatOpenAI) -> None:
        await chat.ainvoke("hello", WRITER)
        await chat.ainvoke("hello", CRITIC)

    async def parent(self, chat: ChatOpenAI) -> None:
        await create_agent(chat, name="writer").ainvoke(HELLO)

    async def tool_results(self, chat: ChatOpenAI) -> None:
        answer = await create_agent(chat, [add], name="writer").ainvoke(HELLO)
        assert [message.text for message in answer["messages"]][2:] == ["5", "writer is done"]

    async def tool_error(self, chat: ChatOpenAI) -> None:
        from langchain.agents.middleware import wrap_tool_call
        from langchain_core.messages import ToolMessage

        @wrap_tool_call
        async def tell(request: Any, handler: Any) -> Any:
            try:
                return await handler(request)
            except ValueError as error:
                return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")

        await create_agent(chat, [fail], name="writer", middleware=[tell]).ainvoke(HELLO)

    async def model_error(self, chat: ChatOpenAI) -> None:
        await self.plain_call(chat)

    async def http_retry(self, chat: ChatOpenAI) -> None:
        await self.plain_call(chat)

    async def timeout_then_retry(self, chat: ChatOpenAI) -> None:
        await chat.ainvoke("hello", WRITER, timeout=0.5)

    async def cancel(self, chat: ChatOpenAI) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.plain_call(chat), 0.5)
        await self.plain_call(chat)

    async def abandoned_stream(self, chat: ChatOpenAI) -> None:
        async with contextlib.aclosing(chat.astream("hello", WRITER)) as chunks:  # pyright: ignore
            async for _ in chunks:
                break

    async def cache_hit(self, chat: ChatOpenAI) -> None:
        chat.cache = InMemoryCache()
        await self.plain_call(chat)
        await self.plain_call(chat)

    async def parallel_same_prompt(self, chat: ChatOpenAI) -> None:
        await chat.abatch(["hello"] * 5, WRITER)

    async def choices(self, chat: ChatOpenAI) -> None:
        chat.n = 2
        await self.plain_call(chat)

    async def nested_agents(self, chat: ChatOpenAI) -> None:
        solver = create_agent(chat, name="solver")

        @tool
        async def ask_solver(question: str) -> str:
            """Ask the solver."""
            return (await solver.ainvoke({"messages": [("user", question)]}))["messages"][-1].content

        await create_agent(chat, [ask_solver], name="manager").ainvoke(HELLO)

    async def threads(self, chat: ChatOpenAI) -> None:
        def ask() -> None:
            chat.invoke("hello", WRITER)

        with ThreadPoolExecutor() as pool:
            for asked in [pool.submit(agl.wrap(ask)), pool.submit(agl.wrap(ask))]:
                await asyncio.wrap_future(asked)

    async def rollouts(self, chat: ChatOpenAI) -> None:
        await self.two_agents(chat)

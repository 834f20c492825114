"""What LangChain tells on the way, as named signals on the very call that caused them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.tools import ToolException, tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import Lightning, play, start_lightning

WRITER = {"metadata": {"agl_agent": "writer"}}
ASK: Any = {"messages": [("user", "hi")]}


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lightning]:
    yield from start_lightning(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def server() -> Generator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def signals(lightning: Lightning, server: ModelServer) -> Callable[..., Any]:
    """Plays an agent by a script; for each call that counts, in order, the signals it caused that are not 0."""

    async def run(agent: Callable[[ChatOpenAI], Any], script: Any) -> list[dict[str, float]]:
        server.engine = ScriptedEngine(script)

        async def with_chat(task: Mapping[str, Any], llm: agl.LLM) -> None:
            await agent(ChatOpenAI(**llm.openai(), max_retries=0))

        (played,) = await play(with_chat, lightning, server)
        return played.signals()

    return run


@tool
def look_up(word: str) -> list[str]:
    """Look a word up."""
    return [word] if word == "agl" else []


async def solver(chat: ChatOpenAI) -> None:
    await create_agent(chat, [look_up], name="solver").ainvoke(ASK)


async def test_a_tool_that_finds_something_and_one_that_finds_nothing(signals: Any):
    script = [tool_call("look_up", word="agl"), tool_call("look_up", word="?"), "done"]
    assert await signals(solver, script) == [{"tool_success": 1.0}, {"tool_success": 1.0, "empty_result": 1.0}, {}]


async def test_arguments_that_do_not_fit_are_an_error_of_the_call_that_wrote_them(signals: Any):
    script = [tool_call("look_up", wrod="agl"), tool_call("look_up", word="agl"), "done"]
    assert await signals(solver, script) == [{"tool_error": 1.0}, {"tool_success": 1.0}, {}]


async def test_two_tools_of_one_answer_are_both_its(signals: Any):
    both = tool_call("look_up", word="agl") + tool_call("look_up", word="?")
    assert await signals(solver, [both, "done"]) == [{"tool_success": 2.0, "empty_result": 1.0}, {}]


async def test_a_tool_call_that_is_no_json_is_a_parse_failure(signals: Any):
    assert await signals(solver, ['<tool_call>{"name": "look_up", "arg</tool_call>']) == [{"parse_failure": 1.0}]


async def test_arguments_that_are_no_json_are_a_parse_failure(signals: Any):
    """The server hands them on as text; LangChain keeps them as an invalid tool call."""
    broken = '<tool_call>{"name": "look_up", "arguments": "{word"}</tool_call>'
    assert await signals(solver, [broken]) == [{"parse_failure": 1.0}]


async def test_an_output_parser_that_fails_is_told_once_and_of_the_call_before_it(signals: Any):
    async def agent(chat: ChatOpenAI) -> None:
        chain = chat | JsonOutputParser()
        assert await chain.ainvoke("hi", WRITER) == {"a": 1}
        with pytest.raises(OutputParserException):
            await chain.ainvoke("hi", WRITER)

    assert await signals(agent, ['{"a": 1}', "no json"]) == [{}, {"parse_failure": 1.0}]


async def test_chains_at_once_do_not_mix_up_their_parsers(signals: Any):
    async def agent(chat: ChatOpenAI) -> None:
        chain = chat | JsonOutputParser()
        answers = await asyncio.gather(
            *(chain.ainvoke(text, WRITER) for text in ("good", "bad", "good")), return_exceptions=True
        )
        assert [isinstance(answer, OutputParserException) for answer in answers] == [False, True, False]

    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        return "no json" if "bad" in prompt else "{}"

    assert sorted(await signals(agent, reply), key=len) == [{}, {}, {"parse_failure": 1.0}]


class Answer(BaseModel):
    """What a structured answer looks like."""

    number: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_a_structured_answer_of_the_wrong_form_is_a_parse_failure(signals: Any):
    async def agent(chat: ChatOpenAI) -> None:
        structured = chat.with_structured_output(Answer, method="function_calling").with_config(WRITER)
        with pytest.raises(ValueError, match="number"):
            await structured.ainvoke("hi")

    assert await signals(agent, [tool_call("Answer", number="four")]) == [{"parse_failure": 1.0}]


async def test_a_stream_of_a_parser_that_is_left_early_is_no_failure(signals: Any):
    async def agent(chat: ChatOpenAI) -> None:
        await chat.ainvoke("hi", WRITER)
        stream = (chat | JsonOutputParser()).astream("hi", WRITER)
        await anext(stream)
        await stream.aclose()  # pyright: ignore

    found = await signals(agent, ['{"a": 1}', '{"a": 1, "b": [1, 2, 3]}'])
    assert found[0] == {} and not any("parse_failure" in one for one in found)


async def test_a_tool_that_returns_its_error_is_an_error(signals: Any):
    @tool
    def refuse() -> str:
        """Refuse."""
        raise ToolException("not today")

    refuse.handle_tool_error = True

    async def agent(chat: ChatOpenAI) -> None:
        await create_agent(chat, [refuse], name="solver").ainvoke(ASK)

    assert await signals(agent, [tool_call("refuse"), "done"]) == [{"tool_error": 1.0}, {}]


async def test_the_content_of_a_tools_result_is_not_reported(lightning: Lightning, server: ModelServer):
    server.engine = ScriptedEngine([tool_call("look_up", word="agl"), "done"])

    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> None:
        await solver(ChatOpenAI(**llm.openai()))

    (played,) = await play(agent, lightning, server)
    (end,) = played.steps("tool_end")
    assert end.data["result_length"] == len('["agl"]')
    assert all(not isinstance(value, str) or "agl" not in value for value in end.data.values())

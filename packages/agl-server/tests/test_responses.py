"""The Responses API: what OpenAI's own client parses, made of a chat completion whose tokens are kept."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from agl.testing import ByteTokenizer, Fault, ModelServer, tool_call

from .conftest import House, chat_path, good_answer, plain

SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}, "strict": None}
QUESTION: dict[str, Any] = {"role": "user", "content": "what is agl?"}


@asynccontextmanager
async def asking(house: House, reply: Any = None) -> AsyncIterator[tuple[Any, Any, ModelServer]]:
    """OpenAI's client for one rollout, its lease, and the model behind the gateway."""
    lease = await house.lease()
    base = f"{house.url}{chat_path(lease).removesuffix('/chat/completions')}"
    async with (
        ModelServer(reply or (lambda prompt, labels: "four")) as model,
        openai.AsyncOpenAI(base_url=base, api_key=lease.key, max_retries=0) as client,
    ):
        await house.serve_policy(upstream=model.url)
        yield client, lease, model


async def read(stream: Any) -> tuple[list[Any], Response]:
    """The events of a stream, and the response at its end. Each is checked against OpenAI's own types."""
    events = [event async for event in stream]
    for event in events:
        type(event).model_validate(event.model_dump(by_alias=True, warnings=False))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def valid(response: Response) -> Response:
    return Response.model_validate(response.model_dump(by_alias=True, warnings=False))


def check(call: Any, model: ModelServer) -> None:
    """What was kept is what was sampled."""
    (exchange,) = [one for one in model.exchanges if one.headers["x-request-id"] == call.id]
    (kept,), (sampled,) = call.choices, exchange.choices
    assert (call.state, call.prompt_ids) == ("done", exchange.prompt_ids)
    assert (kept.response_ids, kept.logprobs) == (sampled.response_ids, sampled.logprobs)


@pytest.mark.parametrize("streaming", [False, True])
async def test_text_is_answered_and_kept_as_that_of_a_chat_call(house: House, streaming: bool):
    async with asking(house) as (client, lease, model):
        ask = {"model": "gpt-5", "instructions": "Be short.", "input": "2 + 2?", "max_output_tokens": 9}
        if streaming:
            events, response = await read(await client.responses.create(**ask, stream=True))
            assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "four"
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
            assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        else:
            response = await client.responses.create(**ask)
        assert valid(response).output_text == "four"
        assert (response.status, response.model, response.instructions) == ("completed", "gpt-5", "Be short.")
        assert response.usage is not None and response.usage.output_tokens == 5
        chat = await client.chat.completions.create(
            model="gpt-5",
            messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}],
            max_completion_tokens=9,
        )
        assert chat.choices[0].message.content == "four"
        mine, theirs = await house.calls(lease)
        check(mine, model)
        assert (mine.prompt_ids, mine.choices) == (theirs.prompt_ids, theirs.choices)


@pytest.mark.parametrize("streaming", [False, True])
async def test_tool_calls_keep_their_logprobs_and_the_next_call_extends_the_first(house: House, streaming: bool):
    first = "Let me see." + tool_call("search", query="agl") + tool_call("search", query="rl")

    def reply(prompt: str, labels: Any) -> str:
        return "It learns." if "<|im_start|>tool\n" in prompt else first

    async with asking(house, reply) as (client, lease, model):
        ask: dict[str, Any] = {"model": "policy", "input": [QUESTION], "tools": [SEARCH], "tool_choice": "auto"}
        if streaming:
            events, response = await read(await client.responses.create(**ask, stream=True))
            done = [event for event in events if event.type == "response.function_call_arguments.done"]
            assert [json.loads(event.arguments) for event in done] == [{"query": "agl"}, {"query": "rl"}]
            items = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.to_dict() for item in items] == [item.to_dict() for item in response.output]
        else:
            response = await client.responses.create(**ask)
        message, *calls = valid(response).output
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        assert message.content[0].text == "Let me see."
        assert all(item.status == "completed" and item.call_id.startswith("call_") for item in calls)
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "a word"} for call in calls]
        ask["input"] = [QUESTION, *(item.to_dict() for item in response.output), *results]
        assert (await client.responses.create(**ask)).output_text == "It learns."
        one, two = await house.calls(lease)
        check(one, model)
        check(two, model)
        assert ByteTokenizer().decode(one.choices[0].response_ids, True) == first
        start = one.prompt_ids + one.choices[0].response_ids
        assert two.prompt_ids[: len(start)] == start


async def test_the_request_is_translated_field_by_field(house: House):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    named = {"name": "N", "schema": schema, "strict": True}
    image = {"type": "input_image", "image_url": "data:,x", "detail": "low"}
    entries = [{"token": t, "logprob": p, "bytes": [], "top_logprobs": []} for t, p in (("a", -0.5), ("b", -0.25))]
    async with plain(house, good_answer(choice={"logprobs": {"content": entries}})) as upstream:
        lease = await house.lease()
        body = {
            "model": "policy",
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "Look:"}, image]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "found"}]},
            ],
            "tools": [SEARCH],
            "tool_choice": {"type": "function", "name": "search"},
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "reasoning": {"effort": "low", "summary": None},
            "text": {
                "format": {"type": "json_schema", "name": "N", "schema": schema, "strict": True},
                "verbosity": "low",
            },
            "include": ["message.output_text.logprobs"],
            "metadata": {"task": "7"},
            "store": True,
            "previous_response_id": None,
            "background": False,
            "n": 1,
            "agl_call_id": "run-7",
        }
        path = chat_path(lease, "writer").replace("chat/completions", "responses")
        answer = await house.http.post(path, json=body, headers={"authorization": f"Bearer {lease.key}"})
        assert answer.status_code == 200, answer.text
        ((_, _, sent),) = upstream.requests
    for name in ("logprobs", "return_token_ids", "include_reasoning"):
        assert sent.pop(name) is True
    assert sent == {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "found"},
        ],
        "tools": [{"type": "function", "function": {"name": "search", "parameters": SEARCH["parameters"]}}],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    response = valid(Response.model_validate(answer.json()))
    assert response.metadata == {"task": "7"} and response.tools[0].type == "function"
    (message,) = response.output
    assert [entry["logprob"] for entry in message.to_dict()["content"][0]["logprobs"]] == [-0.5, -0.25]  # pyright: ignore
    call = await house.call(lease)
    assert (call.call_id, call.agent, call.choices[0].response_ids) == ("run-7", "writer", (1, 2))


async def test_an_answer_that_is_cut_is_incomplete(house: House):
    async with asking(house) as (client, lease, _):
        response = await client.responses.create(model="policy", input="hi", max_output_tokens=2)
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        stream = await client.responses.create(model="policy", input="hi", max_output_tokens=2, stream=True)
        events, last = await read(stream)
        assert events[-1].type == "response.incomplete" and last.output_text == "fo"
        assert [call.state for call in await house.calls(lease)] == ["done", "done"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_reasoning_is_an_item_of_its_own(house: House, streaming: bool):
    said = {"role": "assistant", "reasoning": "two and two", "content": "four"}
    answer = good_answer(choice={"message": said})
    content = json.dumps(answer).encode()
    if streaming:
        choice = answer["choices"][0]
        said = choice.pop("message")
        pieces = [{"reasoning": "two and"}, {"reasoning": " two"}, {"content": "four"}]
        events = [{**answer, "choices": [{**choice, "delta": piece, "finish_reason": None}]} for piece in pieces]
        for event in events[:-1]:
            event["choices"][0] |= {"token_ids": [], "logprobs": None}
        events[-1]["choices"][0]["finish_reason"] = "stop"
        content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    lease = await house.lease()
    base = f"{house.url}{chat_path(lease).removesuffix('/chat/completions')}"
    async with plain(house, content), openai.AsyncOpenAI(base_url=base, api_key=lease.key) as client:
        if streaming:
            _, response = await read(await client.responses.create(model="policy", input="2 + 2?", stream=True))
        else:
            response = await client.responses.create(model="policy", input="2 + 2?")
    thought, message = valid(response).output
    assert (thought.type, thought.content[0].text) == ("reasoning", "two and two")  # pyright: ignore
    assert message.content[0].text == "four"  # pyright: ignore


GOOD = {"model": "policy", "input": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**GOOD, "previous_response_id": "resp_1"}, "previous_response_id"),
    ({**GOOD, "conversation": "conv_1"}, "conversation"),
    ({**GOOD, "background": True}, "background"),
    ({**GOOD, "prompt": {"id": "p"}}, "prompt"),
    ({**GOOD, "context_management": [{"type": "compaction"}]}, "context_management"),
    ({**GOOD, "truncation": "auto"}, "truncation"),
    ({**GOOD, "n": 2}, "n"),
    ({**GOOD, "include": ["reasoning.encrypted_content"]}, "include"),
    ({**GOOD, "include": "all"}, "include"),
    ({**GOOD, "tools": [SEARCH, {"type": "web_search"}]}, "tools[1].type"),
    ({**GOOD, "tools": [{**SEARCH, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({**GOOD, "tools": [{"type": "function"}]}, "tools[0].name"),
    ({**GOOD, "tools": {}}, "tools"),
    ({**GOOD, "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({**GOOD, "text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({**GOOD, "text": "plain"}, "text"),
    ({**GOOD, "text": {"format": "plain"}}, "text.format"),
    ({**GOOD, "reasoning": "high"}, "reasoning"),
    ({**GOOD, "instructions": ["x"]}, "instructions"),
    ({**GOOD, "max_output_tokens": 0}, "max_output_tokens"),
    ({**GOOD, "max_output_tokens": True}, "max_output_tokens"),
    ({**GOOD, "temperature": 9}, "temperature"),
    ({"model": "policy"}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
    ({"input": [QUESTION, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_cannot_be_served_is_refused_by_name(house: House, body: dict[str, Any], field: str):
    answer = await house.http.post(
        "/v1/responses", json=body, headers={"authorization": "Bearer admin-key-of-the-tests"}
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not house.model.exchanges


async def test_an_upstream_that_refuses_and_one_that_breaks_off(house: House):
    async with asking(house) as (client, lease, model):
        model.faults.append(Fault(status=400))
        with pytest.raises(openai.BadRequestError, match="the script refuses"):
            await client.responses.create(model="policy", input="hi")
        model.faults.append(Fault(break_after=3))
        *events, last = [
            event async for event in await client.responses.create(model="policy", input="hi", stream=True)
        ]
        assert (events[0].type == "response.created" and "broke off" in str(last)) or "cannot be reached" in str(last)
        assert (last.type, last.code) == ("error", "upstream_unavailable")
        assert [call.state for call in await house.calls(lease)] == ["error", "error"]


async def test_the_key_of_an_attempt_opens_its_own_responses_only(house: House):
    lease, other = await house.lease(), await house.lease()
    path = chat_path(other).replace("chat/completions", "responses")
    answer = await house.http.post(path, json=GOOD, headers={"authorization": f"Bearer {lease.key}"})
    assert answer.status_code in (401, 403)

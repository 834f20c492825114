"""What the gateway refuses, what it makes of an upstream that fails, and what it does with a stale attempt."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agl.testing import ByteTokenizer, ModelServer, ScriptedEngine

from .conftest import ADMIN, HELLO, House, chat_path, good_answer, plain

encode = ByteTokenizer().encode
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


# -------------------------------------------------------------------------------------------------- bad requests

GOOD = {"messages": HELLO}
BAD_REQUESTS: list[tuple[Any, str | None]] = [
    (b"", None),
    (b"null", None),
    (b"[1]", None),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', None),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', None),
    (b'{"messages":' + b"[" * 100_000, None),
    (b'{"x":' + b"[" * 70 + b"]" * 70 + b"}", None),
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [*HELLO, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls"),
    ({**GOOD, "model": 3}, "model"),
    ({**GOOD, "model": ""}, "model"),
    ({**GOOD, "temperature": "hot"}, "temperature"),
    ({**GOOD, "temperature": -0.1}, "temperature"),
    ({**GOOD, "temperature": True}, "temperature"),
    ({**GOOD, "top_p": 0}, "top_p"),
    ({**GOOD, "top_p": 1.5}, "top_p"),
    ({**GOOD, "n": 0}, "n"),
    ({**GOOD, "n": 65}, "n"),
    ({**GOOD, "n": 1.5}, "n"),
    ({**GOOD, "stop": 3}, "stop"),
    ({**GOOD, "stop": ["a", 3]}, "stop"),
    ({**GOOD, "seed": "x"}, "seed"),
    ({**GOOD, "seed": 2**70}, "seed"),
    ({**GOOD, "max_tokens": 0}, "max_tokens"),
    ({**GOOD, "max_tokens": 1e9}, "max_tokens"),
    ({**GOOD, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({**GOOD, "stream": "yes"}, "stream"),
    ({**GOOD, "stream_options": 1}, "stream_options"),
    ({**GOOD, "tools": {}}, "tools"),
    ({**GOOD, "tools": [{"type": "function"}]}, "tools"),
    ({**GOOD, "logprobs": 1}, "logprobs"),
    ({**GOOD, "top_logprobs": 21}, "top_logprobs"),
    ({**GOOD, "agl_agent": 7}, "agl_agent"),
    ({**GOOD, "agl_agent": "re*"}, "agl_agent"),
    ({**GOOD, "agl_call_id": "x" * 129}, "agl_call_id"),
    ({**GOOD, "agl_parent": "a\nb"}, "agl_parent"),
]


async def test_malformed_requests_are_refused_by_the_name_of_the_field_and_reach_nobody(house: House):
    lease = await house.lease()
    for body, param in BAD_REQUESTS:
        response = await house.post(lease, body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param), (body, error)
        assert len(error["message"]) < 400
    assert house.model.exchanges == [] and await house.calls(lease) == ()


async def test_labels_in_headers_are_checked_too(house: House):
    lease = await house.lease()
    for name, value in (
        (b"x-agl-agent", b""),
        (b"x-agl-agent", b"\xff\xfe"),
        (b"x-agl-call", b"x" * 129),
        (b"x-agl-parent", b"a*"),
    ):
        headers = [(b"authorization", f"Bearer {lease.key}".encode()), (name, value)]
        response = await house.http.post(chat_path(lease), json=GOOD, headers=headers)
        assert response.status_code == 400, (name, value)
    response = await house.post(lease, GOOD, agent="a*b")
    assert response.status_code == 400


async def test_a_body_over_the_limit_is_refused(house: House):
    lease = await house.lease()
    large = json.dumps({"messages": [{"role": "user", "content": "x" * (17 * 2**20)}]}).encode()

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 2**20):
            yield large[start : start + 2**20]

    headers = {"authorization": f"Bearer {lease.key}"}
    for content in (large, in_pieces()):
        response = await house.http.post(chat_path(lease), content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert (await house.post(lease, GOOD)).status_code == 200


async def test_a_large_prompt_within_the_limit_is_served(house: House):
    lease = await house.lease()
    async with ModelServer(engine=ScriptedEngine(["ok"], max_length=4_000_000)) as model:
        await house.serve_policy(upstream=model.url)
        messages = [{"role": "user", "content": "x" * 1_000_000}]
        await house.chat(lease, messages=messages)
    call = await house.call(lease)
    assert len(call.prompt_ids) > 1_000_000


# --------------------------------------------------------------------------------------------- upstreams that fail


async def test_an_upstreams_refusal_is_passed_on_in_openais_form(house: House):
    lease = await house.lease()
    refusals = [
        (
            400,
            {"error": {"message": "too long", "type": "x", "param": "messages", "code": 400}},
            "too long",
            "messages",
        ),
        (400, {"object": "error", "message": "old form", "code": 400}, "old form", None),
        (429, b"slow down", "status 429", None),
        (500, b"\xff", "status 500", None),
    ]
    for status, answer, message, param in refusals:
        async with plain(house, answer, status=status, headers={"retry-after": "7"}):
            for stream in (False, True):
                response = await house.post(lease, {"messages": HELLO, "stream": stream})
                assert response.status_code == status
                assert response.headers["retry-after"] == "7"
                error = response.json()["error"]
                assert message in error["message"] and error["param"] == param
                call = (await house.calls(lease))[-1]
                assert call.state == "error" and call.error == error["message"]
                assert response.headers["x-agl-record"] == call.id
    assert len(await house.calls(lease)) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_is_away_is_told_as_such_and_may_come_back(house: House, stream: bool):
    lease = await house.lease()
    await house.serve_policy(upstream="http://127.0.0.1:1")
    response = await house.post(lease, {"messages": HELLO, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "upstream_unavailable"
    assert (await house.call(lease)).state == "error"
    await house.serve_policy()
    await house.chat(lease)


async def test_a_redirect_is_not_followed(house: House):
    lease = await house.lease()
    async with plain(house, b"", status=307, headers={"location": f"{house.model.url}/v1/chat/completions"}):
        assert (await house.post(lease, GOOD)).status_code == 502
    assert house.model.exchanges == []


ENTRY = {"token": "a", "logprob": -0.5}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (good_answer(prompt_token_ids=None), "return_token_ids"),
        (good_answer(choice={"token_ids": None}), "return_token_ids"),
        (good_answer(choice={"logprobs": None}), "--max-logprobs"),
        (good_answer(choice={"logprobs": {"content": [ENTRY]}}), "--logprobs-mode"),
        (good_answer(choice={"logprobs": {"content": [ENTRY, {"logprob": None}]}}), "not a finite number"),
        (good_answer(choice={"token_ids": [1, "x"]}), "32-bit"),
        (good_answer(choice={"token_ids": [1, 2**31]}), "32-bit"),
        (good_answer(choice={"token_ids": [1, -4]}), "negative"),
        (good_answer(choices=[3]), "unknown shape"),
        (b"<html>", "not JSON"),
        (b"[]", "no JSON object"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error_that_names_the_setting(
    house: House, answer: Any, named: str
):
    lease = await house.lease()
    async with plain(house, answer):
        response = await house.post(lease, GOOD)
    assert response.status_code == 502
    assert named in response.json()["error"]["message"]
    call = await house.call(lease)
    assert call.state == "error" and call.error is not None and named in call.error
    assert call.choices == ()


def sse(*messages: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages) + b"data: [DONE]\n\n"


async def test_a_stream_without_its_prompts_tokens_is_refused_before_it_begins(house: House):
    lease = await house.lease()
    async with plain(house, sse({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]})):
        response = await house.post(lease, {**GOOD, "stream": True})
    assert response.status_code == 502 and "return_token_ids" in response.json()["error"]["message"]
    assert (await house.call(lease)).state == "error"


async def test_a_stream_without_logprobs_never_ends_well(house: House):
    lease = await house.lease()
    chunk = {"index": 0, "delta": {"content": "x"}, "token_ids": [1], "finish_reason": None}
    end = {"index": 0, "delta": {"content": "y"}, "token_ids": [2], "finish_reason": "stop"}
    async with plain(house, sse({"prompt_token_ids": [7], "choices": [chunk]}, {"choices": [end]})):
        response = await house.post(lease, {**GOOD, "stream": True})
    assert response.status_code == 200 and "[DONE]" not in response.text
    assert "--logprobs-mode" in response.text and '"y"' not in response.text
    assert (await house.call(lease)).state == "error"


async def test_an_error_inside_a_stream_is_passed_on_and_kept(house: House):
    lease = await house.lease()
    chunk = {"index": 0, "delta": {"content": "x"}, "token_ids": [1], "logprobs": {"content": [ENTRY]}}
    async with plain(
        house, sse({"prompt_token_ids": [7], "choices": [chunk]}, {"error": {"message": "out of memory"}})
    ):
        response = await house.post(lease, {**GOOD, "stream": True})
    assert "out of memory" in response.text and "[DONE]" not in response.text
    call = await house.call(lease)
    assert call.state == "error" and "out of memory" in str(call.error) and call.choices[0].response_ids == (1,)


# --------------------------------------------------------------------------------------------------- stale attempts


async def test_a_stale_attempt_is_refused_and_told_not_to_try_again(house: House):
    lease = await house.lease()
    house.clock.now += 61
    (again,) = await house.client.lease("second", 1, 60, wait=5)
    response = await house.post(lease, GOOD)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "stale_attempt")
    assert response.headers["x-should-retry"] == "false"
    assert house.model.exchanges == []
    await house.chat(again)
    assert len(await house.calls(again)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_attempt_that_goes_stale_while_it_samples_is_not_counted(house: House, stream: bool):
    lease = await house.lease()
    async with ModelServer(engine=ScriptedEngine(["abc"], latency=0.2)) as model:
        await house.serve_policy(upstream=model.url)
        asking = asyncio.create_task(house.post(lease, {**GOOD, "stream": stream}))
        await asyncio.to_thread(model.wait, lambda: bool(model.exchanges))
        await house.client.finish(lease.rollout.id, 1, "ok")
        response = await asking
    if stream:
        assert '"stale_attempt"' in response.text and "[DONE]" not in response.text
    else:
        assert response.status_code == 409
    assert await house.calls(lease) == ()


async def test_an_unknown_rollout_is_not_found(house: House):
    path = "/r/nobody/1/v1/chat/completions"
    response = await house.http.post(path, json=GOOD, headers={"authorization": f"Bearer {ADMIN}"})
    assert response.status_code == 404


async def test_too_many_calls_at_once_are_told_to_come_back(house: House, monkeypatch: pytest.MonkeyPatch):
    from agl_server.gateway import handler

    monkeypatch.setattr(handler, "MOST_IN_FLIGHT", 2)
    lease = await house.lease()
    await house.serve_policy(state="updating")
    held = [asyncio.create_task(house.chat(lease)) for _ in range(2)]
    await asyncio.sleep(0.1)
    response = await house.post(lease, GOOD)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    await house.serve_policy()
    await asyncio.gather(*held)

"""The gateway keeps the exact tokens of every call, and the client sees plain OpenAI."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from agl.records import Call, Choice
from agl.testing import ByteTokenizer, Fault, ModelServer, ScriptedEngine, tool_call
from agl.wire import Upstream

from .conftest import ADMIN, HELLO, House, Plain, chat_path, chunks, good_answer, plain, serve

encode = ByteTokenizer().encode
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def sampled(choices: Sequence[Choice]) -> list[tuple[Any, Any]]:
    return [(choice.response_ids, choice.logprobs) for choice in choices]


# ------------------------------------------------------------------------------------------------- whole answers


async def test_a_call_is_kept_with_its_exact_tokens(house: House):
    lease = await house.lease()
    house.model.engine.version = 0
    response = await house.post(
        lease,
        {"model": "gpt-4o", "messages": HELLO, "temperature": 0.5},
        headers={
            "x-agl-call": "run-7",
            "x-agl-agent": "writer",
            "x-agl-parent": "graph",
            "x-stainless-retry-count": "2",
        },
    )
    call = await house.call(lease)
    (exchange,) = house.model.exchanges
    assert (call.prompt_ids, call.choices) == (exchange.prompt_ids, exchange.choices)
    assert call.choices[0].response_ids == (*encode("four"), 2)
    assert (call.call_id, call.agent, call.parent, call.retry) == ("run-7", "writer", "graph", 2)
    assert (call.state, call.model, call.temperature, call.error) == ("done", "policy", 0.5, None)
    assert call.started < call.ended
    assert response.headers["x-agl-record"] == call.id


async def test_the_client_sees_plain_openai(house: House):
    lease = await house.lease()
    answer = await house.chat(lease, model="gpt-4o")
    assert answer["model"] == "gpt-4o"
    assert answer["choices"][0]["message"]["content"] == "four"
    assert answer["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "weight_version"} & answer.keys()
    assert "token_ids" not in answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 5


async def test_the_client_gets_what_it_asks_for(house: House):
    lease = await house.lease()
    answer = await house.chat(lease, logprobs=True, return_token_ids=True)
    (exchange,) = house.model.exchanges
    assert tuple(answer["prompt_token_ids"]) == exchange.prompt_ids
    choice = answer["choices"][0]
    assert tuple(choice["token_ids"]) == exchange.choices[0].response_ids
    assert tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) == exchange.choices[0].logprobs


async def test_the_openai_sdk_is_served(house: House):
    lease = await house.lease()
    base = f"{house.url}{chat_path(lease).removesuffix('/chat/completions')}"
    async with openai.AsyncOpenAI(base_url=base, api_key=lease.key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        answer = await client.chat.completions.create(model="policy", messages=HELLO, n=2)
        assert [choice.message.content for choice in answer.choices] == ["four", "four"]
        text = ""
        async for chunk in await client.chat.completions.create(model="policy", messages=HELLO, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == "four"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="policy", messages=HELLO, temperature=9)
    assert len(await house.calls(lease)) == 2


async def test_every_choice_is_kept(house: House):
    lease = await house.lease()
    texts = iter(["one", "two", "three"])
    async with ModelServer(lambda prompt, labels: next(texts)) as model:
        await house.serve_policy(upstream=model.url)
        answer = await house.chat(lease, n=3)
        assert len(answer["choices"]) == 3
        call = await house.call(lease)
        assert call.choices == model.exchanges[0].choices
    said = [choice["message"]["content"] for choice in answer["choices"]]
    assert [ByteTokenizer().decode(choice.response_ids, True) for choice in call.choices] == said


async def test_what_the_backend_needs_is_forced_and_our_labels_stay_here(house: House):
    lease = await house.lease()
    body = {
        "agl_call_id": "c",
        "agl_agent": "solver",
        "agl_parent": "p",
        "logprobs": False,
        "return_token_ids": False,
        "include_reasoning": False,
        "top_k": 5,
    }
    await house.chat(lease, **body)
    (exchange,) = house.model.exchanges
    assert not [key for key in exchange.body if key.startswith("agl_")]
    assert exchange.body["logprobs"] is exchange.body["return_token_ids"] is exchange.body["include_reasoning"] is True
    assert (exchange.body["model"], exchange.body["top_k"], exchange.body["temperature"]) == ("policy", 5, 1.0)
    assert (exchange.headers["x-agl-rollout"], exchange.headers["x-agl-agent"]) == (lease.rollout.id, "solver")
    assert "authorization" not in exchange.headers
    call = await house.call(lease)
    assert exchange.headers["x-request-id"] == call.id
    assert (call.call_id, call.agent, call.parent) == ("c", "solver", "p")


async def test_two_calls_with_the_same_prompt_and_id_stay_two(house: House):
    lease = await house.lease()
    headers = {"x-agl-call": "same", "x-request-id": "same"}
    await asyncio.gather(*(house.post(lease, {"messages": HELLO}, headers=headers) for _ in range(2)))
    calls = await house.calls(lease)
    assert len({call.id for call in calls}) == 2
    assert len({exchange.headers["x-request-id"] for exchange in house.model.exchanges}) == 2


async def test_reasoning_is_hidden_where_the_client_asked_for_that(house: House):
    lease = await house.lease()
    message = {"role": "assistant", "content": "ab", "reasoning": "hm", "reasoning_content": "hm"}
    async with plain(house, good_answer(choice={"message": message})):
        shown = await house.chat(lease)
        hidden = await house.chat(lease, include_reasoning=False)
    assert shown["choices"][0]["message"] == message
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "ab"}


async def test_people_reach_the_policy_with_the_servers_key_and_nothing_is_kept(house: House):
    headers = {"authorization": f"Bearer {ADMIN}"}
    models = await house.http.get("/v1/models", headers=headers)
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    answer = await house.http.post("/v1/chat/completions", headers=headers, json={"messages": HELLO})
    assert answer.json()["choices"][0]["message"]["content"] == "four"
    assert "x-agl-record" not in answer.headers
    streamed = await house.http.post("/v1/chat/completions", headers=headers, json={"messages": HELLO, "stream": True})
    assert len(chunks(streamed.text)) > 3


# ------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"n": 3}, {"stream_options": {"include_usage": True}}])
async def test_the_tokens_of_a_stream_are_the_tokens_sampled(house: House, options: dict[str, Any]):
    lease = await house.lease()
    async with ModelServer(lambda prompt, labels: f"naïve {tool_call('search', q='x')} done") as model:
        await house.serve_policy(upstream=model.url)
        events = await house.stream(lease, model="gpt-4o", **options)
        call = await house.call(lease)
        (exchange,) = model.exchanges
        whole = await house.chat(lease, **options) if "stream_options" not in options else None
    assert (call.state, call.prompt_ids) == ("done", exchange.prompt_ids)
    assert sampled(call.choices) == sampled(exchange.choices)
    assert {event["model"] for event in events} == {"gpt-4o"}
    assert not [event for event in events if "prompt_token_ids" in event or "weight_version" in event]
    choices = [choice for event in events for choice in event["choices"]]
    assert not [choice for choice in choices if "token_ids" in choice or choice.get("logprobs")]
    assert all(choice["delta"] or choice["finish_reason"] for choice in choices)
    for index in range(options.get("n", 1)):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        if whole is not None:
            message = whole["choices"][index]["message"]
            assert text == (message["content"] or "")
            assert [call["function"]["name"] for call in calls] == [
                call["function"]["name"] for call in message.get("tool_calls", ())
            ]
    if "stream_options" in options:
        assert events[-1]["usage"]["completion_tokens"] == len(call.choices[0].response_ids)


async def test_chunks_arrive_while_the_model_still_samples(house: House):
    lease = await house.lease()
    async with ModelServer(engine=ScriptedEngine(["abcdef"], token_delay=0.05)) as model:
        await house.serve_policy(upstream=model.url)
        body = {"messages": HELLO, "stream": True}
        headers = {"authorization": f"Bearer {lease.key}"}
        seen_early = False
        async with house.http.stream("POST", chat_path(lease), json=body, headers=headers) as response:
            record = response.headers["x-agl-record"]
            async for line in response.aiter_lines():
                seen_early = seen_early or ("content" in line and not model.exchanges[0].complete)
        assert seen_early
    assert (await house.call(lease)).id == record


async def test_the_end_of_a_stream_is_told_only_after_its_call_is_kept(house: House, monkeypatch: pytest.MonkeyPatch):
    lease = await house.lease()
    keep, release = house.store.add_call, asyncio.Event()

    async def slowly(call: Call) -> None:
        await release.wait()
        await keep(call)

    monkeypatch.setattr(house.store, "add_call", slowly)
    text = ""
    headers = {"authorization": f"Bearer {lease.key}"}
    body = {"messages": HELLO, "stream": True}
    async with house.http.stream("POST", chat_path(lease), json=body, headers=headers) as response:
        async for part in response.aiter_text():
            text += part
            if '"r"' in text and not release.is_set():
                await asyncio.sleep(0.1)
                assert "finish_reason" in text and '"stop"' not in text and "[DONE]" not in text
                assert await house.calls(lease) == ()
                release.set()
    assert '"finish_reason":"stop"' in text and text.endswith("data: [DONE]\n\n")
    assert (await house.call(lease)).state == "done"


async def test_a_stream_that_breaks_off_ends_with_an_error_and_keeps_what_there_was(house: House):
    lease = await house.lease()
    async with ModelServer(["abcdef"], faults=[Fault(break_after=4)]) as model:
        await house.serve_policy(upstream=model.url)
        response = await house.post(lease, {"messages": HELLO, "stream": True})
        assert "[DONE]" not in response.text
        assert json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == (
            "upstream_unavailable"
        )
        call = await house.call(lease)
        sampled = model.exchanges[0].choices[0].response_ids
    assert call.state == "error" and call.error
    kept = call.choices[0].response_ids
    assert 0 < len(kept) <= len(sampled) and kept == sampled[: len(kept)]


# --------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_sampling(house: House, stream: bool):
    lease = await house.lease()
    async with ModelServer(engine=ScriptedEngine(["a" * 500], token_delay=0.01)) as model:
        await house.serve_policy(upstream=model.url)
        headers = {"authorization": f"Bearer {lease.key}"}
        body = {"messages": HELLO, "stream": stream}

        async def ask() -> None:
            async with house.http.stream("POST", chat_path(lease), json=body, headers=headers) as response:
                async for _ in response.aiter_lines():
                    pass

        asking = asyncio.create_task(ask())
        await asyncio.to_thread(
            model.wait, lambda: any(exchange.tokens and exchange.tokens[0][3:] for exchange in model.exchanges)
        )
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(model.wait)
        assert model.engine.aborted == 1
        while not await house.calls(lease):
            await asyncio.sleep(0.01)
        call = await house.call(lease)
        sampled = model.exchanges[0].choices[0].response_ids
    assert call.state == "client_gone"
    if stream:
        kept = call.choices[0].response_ids
        assert 0 < len(kept) <= len(sampled) < 500 and kept == sampled[: len(kept)]
        assert call.prompt_ids


async def test_a_client_that_leaves_while_it_is_held_reaches_no_upstream(house: House):
    lease = await house.lease()
    await house.serve_policy(state="updating")
    asking = asyncio.create_task(house.chat(lease))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while not await house.calls(lease):
        await asyncio.sleep(0.01)
    await house.serve_policy()
    assert (await house.call(lease)).state == "client_gone"
    assert house.model.exchanges == []


# ----------------------------------------------------------------------------------------------- policy versions


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_held_while_weights_are_updated_and_never_refused(house: House, stream: bool):
    lease = await house.lease()
    await house.serve_policy(state="updating", version=4)
    ask = house.stream if stream else house.chat
    asking = [asyncio.create_task(ask(lease)) for _ in range(3)]
    await asyncio.sleep(0.15)
    assert not any(task.done() for task in asking) and house.model.exchanges == []
    house.model.engine.version = 5
    await house.serve_policy(state="serving", version=5)
    await asyncio.gather(*asking)
    house.model.engine.version = 0
    assert [call.policy_version for call in await house.calls(lease)] == [5, 5, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_how_the_prompt_was_made_is_kept_and_not_shown_to_the_agent(house: House, stream: bool):
    lease = await house.lease()
    answer = await (house.stream if stream else house.chat)(lease)
    assert "'context'" not in repr(answer)
    assert [call.context for call in await house.calls(lease)] == ["rendered"]


async def test_the_version_that_the_backend_tells_wins(house: House):
    lease = await house.lease()
    await house.serve_policy(version=4)
    house.model.engine.version = 6
    await house.chat(lease)
    await house.stream(lease)
    house.model.engine.version = 0
    async with plain(house, good_answer()):
        await house.serve_policy(upstream=(await house.client.policy()).upstream, version=9)  # pyright: ignore
        await house.chat(lease)
    assert [call.policy_version for call in await house.calls(lease)] == [6, 6, 9]


async def test_a_server_that_stops_sends_those_away_whom_it_holds(house: House):
    lease = await house.lease()
    await house.serve_policy(state="updating")
    asking = asyncio.create_task(house.post(lease, {"messages": HELLO}))
    await asyncio.sleep(0.1)
    house.app.state.stop_waiting()
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")


# ------------------------------------------------------------------------------------------------------- routing


async def test_sampling_is_forced_on_calls_to_the_policy(house: House):
    lease = await house.lease(sampling={"temperature": 1.0, "max_tokens": 3, "top_p": 1.0})
    await house.chat(lease, temperature=0.0, max_completion_tokens=900, top_p=0.1)
    (exchange,) = house.model.exchanges
    assert (exchange.body["temperature"], exchange.body["max_tokens"], exchange.body["top_p"]) == (1.0, 3, 1.0)
    assert "max_completion_tokens" not in exchange.body
    call = await house.call(lease)
    assert (call.temperature, len(call.choices[0].response_ids)) == (1.0, 3)


@pytest.mark.parametrize(
    ("agent", "unselected", "answered_by", "forced"),
    [
        ("writer", "frozen", "policy", True),
        ("rewriter", "frozen", "policy", True),
        ("judge", "frozen", "frozen", False),
        ("judge", "policy", "policy", True),
        (None, "frozen", "frozen", False),
    ],
)
async def test_agents_are_routed_by_what_is_optimised(
    house: House, agent: str | None, unselected: Any, answered_by: str, forced: bool
):
    await house.serve_policy(version=3, unselected=unselected)
    lease = await house.lease(optimize=("writer", "re*"), sampling={"temperature": 0.25})
    await house.chat(lease, agent=agent, temperature=0.75)
    (exchange,) = house.model.exchanges
    assert (exchange.body["model"], exchange.body["temperature"]) == (answered_by, 0.25 if forced else 0.75)
    call = await house.call(lease)
    assert (call.agent, call.model) == (agent or "main", answered_by)
    assert call.choices == exchange.choices
    assert (call.policy_version is None) == (answered_by == "frozen")


async def test_agents_that_are_not_optimised_can_use_the_users_own_endpoint(house: House):
    lease = await house.lease(optimize=("writer",), sampling={"temperature": 0.25})
    app = Plain({"id": "x", "model": "big-1", "choices": [{"index": 0, "message": {"content": "hi"}}]})
    async with serve(app) as url:
        own = Upstream(base_url=f"{url}/openai/v1", model="big-1", api_key="sk-theirs")
        await house.serve_policy(unselected=own)
        answer = await house.chat(lease, agent="judge", model="gpt-4o", temperature=0.75, logprobs=True)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("gpt-4o", "hi")
    ((path, headers, body),) = app.requests
    assert (path, headers["authorization"]) == ("/openai/v1/chat/completions", "Bearer sk-theirs")
    assert body == {"model": "big-1", "messages": HELLO, "temperature": 0.75, "logprobs": True}
    assert not [name for name in headers if name.startswith("x-agl")]
    call = await house.call(lease)
    assert (call.agent, call.model, call.state, call.policy_version) == ("judge", "big-1", "done", None)
    assert (call.prompt_ids, call.choices) == ((), ())


async def test_tokens_that_the_users_own_endpoint_tells_are_kept(house: House):
    lease = await house.lease(optimize=("writer",))
    async with serve(Plain(good_answer())) as url:
        await house.serve_policy(unselected=Upstream(base_url=f"{url}/v1", model="m"))
        await house.chat(lease, agent="judge")
    call = await house.call(lease)
    assert (call.prompt_ids, call.choices[0].response_ids) == ((7,), (1, 2))


async def test_the_agent_in_the_url_goes_before_the_header(house: House):
    lease = await house.lease()
    for agent, headers, expected in (
        ("Größter Löser", {"x-agl-agent": "other"}, "Größter Löser"),
        (None, {"x-agl-agent": "writer|model"}, "writer|model"),
        (None, {}, "main"),
    ):
        assert (await house.post(lease, {"messages": HELLO}, agent=agent, headers=headers)).status_code == 200
        assert (await house.calls(lease))[-1].agent == expected

"""The endpoint answers as vLLM does, and keeps every token."""

import asyncio
import json
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import openai
import pytest

from agl.detokenizer import Detokenizer
from agl.endpoint import create_app, serve, serve_engine
from agl.errors import UsageError
from agl.testing import ByteTokenizer, ModelServer, ScriptedEngine, tool_call

encode = ByteTokenizer().encode
shared = ModelServer()
HELLO = [{"role": "user", "content": "hi"}]
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
ALL = {"return_token_ids": True, "logprobs": True}


@pytest.fixture(scope="module", autouse=True)
def running() -> Generator[None]:
    with shared:
        yield


@contextmanager
def serving(reply: Sequence[str] | None = None, *, engine: ScriptedEngine | None = None) -> Generator[ModelServer]:
    """The one server of these tests, with a script of its own."""
    shared.engine = engine or ScriptedEngine(reply or ["ok"])
    shared.exchanges.clear()
    yield shared


def post(server: ModelServer, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
    body = {"messages": HELLO, **body}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=5)


def stream(server: ModelServer, **body: Any) -> list[dict[str, Any]]:
    lines = post(server, stream=True, **body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def deltas(events: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def text_of(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in deltas(events, index))


def ids_of(events: Sequence[dict[str, Any]], index: int = 0) -> list[int]:
    return [token for choice in deltas(events, index) for token in choice.get("token_ids") or ()]


# ------------------------------------------------------------------------------------------------------ answers


def test_an_answer_carries_its_exact_tokens_their_logprobs_and_the_policy_version():
    with serving(["four"]) as server:
        server.engine.version = 7
        answer = post(server, **ALL).json()
        choice = answer["choices"][0]
        sampled = [*encode("four"), 2]
        assert choice["message"]["content"] == "four"
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == sampled
        assert answer["prompt_token_ids"] == server.engine.render(HELLO, None)
        entries = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == [
            server.engine.logprob(position, token) for position, token in enumerate(sampled)
        ]
        assert [entry["token"] for entry in entries] == ["f", "o", "u", "r", "<|im_end|>"]
        assert bytes(entries[0]["bytes"]) == b"f" and entries[0]["top_logprobs"] == []
        assert answer["weight_version"] == 7
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["usage"]["total_tokens"] == 5 + len(answer["prompt_token_ids"])


def test_a_stream_carries_the_same_tokens_as_a_whole_answer():
    with serving(["Grüße, 世界 🎈!"] * 2) as server:
        whole = post(server, **ALL).json()
        events = stream(server, **ALL, stream_options={"include_usage": True})
    choice = whole["choices"][0]
    assert text_of(events) == choice["message"]["content"] == "Grüße, 世界 🎈!"
    assert ids_of(events) == choice["token_ids"]
    assert [e for c in deltas(events) for e in (c["logprobs"] or {"content": []})["content"]] == choice["logprobs"][
        "content"
    ]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert deltas(events)[-1]["finish_reason"] == "stop"
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert events[-1]["weight_version"] == 0
    assert "\ufffd" not in "".join(choice["delta"].get("content", "") for choice in deltas(events))


def test_nothing_that_was_not_asked_for_is_sent():
    with serving(["äö"] * 2) as server:
        whole = post(server).json()
        events = stream(server)
    assert "prompt_token_ids" not in whole and "token_ids" not in whole["choices"][0]
    assert whole["choices"][0]["logprobs"] is None
    assert [choice["delta"] for choice in deltas(events)] == [
        {"role": "assistant", "content": ""},
        {"content": "ä"},
        {"content": "ö"},
        {},
    ]
    assert "usage" not in events[-1]
    assert events[-1]["weight_version"] == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_every_choice_keeps_its_own_tokens_and_a_seed_of_its_own(streaming: bool):
    seeds: list[int | None] = []

    class Engine(ScriptedEngine):
        def generate(self, prompt_ids: Any, sampling: Any) -> Any:
            seeds.append(sampling.seed)
            return super().generate(prompt_ids, sampling)

    texts = ["one", "two two", "three"]
    with serving(engine=Engine(texts)) as server:
        if streaming:
            events = stream(server, n=3, seed=10, **ALL)
            answers = [(text_of(events, index), ids_of(events, index)) for index in range(3)]
        else:
            choices = post(server, n=3, seed=10, **ALL).json()["choices"]
            answers = [(choice["message"]["content"], choice["token_ids"]) for choice in choices]
    assert answers == [(text, [*encode(text), 2]) for text in texts]
    assert seeds == [10, 11, 12]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("stop", "content"), [("END", "say EN"), (["xx", "EN"], "say "), ("never", "say ENENDING"), ("", "say ENENDING")]
)
def test_a_stop_string_cuts_the_content_but_not_the_tokens(streaming: bool, stop: Any, content: str):
    with serving(["say ENENDING"]) as server:
        if streaming:
            events = stream(server, stop=stop, **ALL)
            text, tokens, last = text_of(events), ids_of(events), deltas(events)[-1]
        else:
            last = post(server, stop=stop, **ALL).json()["choices"][0]
            text, tokens = last["message"]["content"], last["token_ids"]
        assert text == content
        assert last["finish_reason"] == "stop"
        stopped_by = {"say EN": "END", "say ": "EN"}.get(content)
        assert last["stop_reason"] == stopped_by
        assert tokens == ([*encode(content + stopped_by)] if stopped_by else [*encode(content), 2])
        assert server.engine.aborted == (1 if stopped_by else 0)


def test_max_tokens_cuts_the_answer_and_says_so():
    with serving(["äöü"] * 2) as server:
        choice = post(server, max_tokens=3, **ALL).json()["choices"][0]
        events = stream(server, max_completion_tokens=3, **ALL)
    assert choice["finish_reason"] == deltas(events)[-1]["finish_reason"] == "length"
    assert choice["token_ids"] == ids_of(events) == encode("äöü")[:3]
    assert choice["message"]["content"] == text_of(events) == "ä\ufffd"


@pytest.mark.parametrize("streaming", [False, True])
def test_tool_calls_are_parsed_and_keep_their_tokens(streaming: bool):
    text = "Let me look." + tool_call("search", query="größe") + tool_call("search", query="b")
    with serving([text]) as server:
        if streaming:
            events = stream(server, tools=[SEARCH], **ALL)
            last = deltas(events)[-1]
            content, calls, tokens = text_of(events), last["delta"]["tool_calls"], ids_of(events)
            assert all(choice["delta"] == {} for choice in deltas(events)[1:-1])
            assert [call["index"] for call in calls] == [0, 1]
        else:
            last = post(server, tools=[SEARCH], **ALL).json()["choices"][0]
            content, calls, tokens = last["message"]["content"], last["message"]["tool_calls"], last["token_ids"]
    assert content == "Let me look."
    assert [json.loads(call["function"]["arguments"])["query"] for call in calls] == ["größe", "b"]
    assert len({call["id"] for call in calls}) == 2
    assert last["finish_reason"] == "tool_calls"
    assert tokens == [*encode(text), 2]


def test_without_tools_or_with_tool_choice_none_the_text_is_left_alone():
    text = tool_call("search", query="a")
    with serving([text] * 2) as server:
        assert post(server).json()["choices"][0]["message"]["content"] == text
        answer = post(server, tools=[SEARCH], tool_choice="none", return_token_ids=True).json()
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["prompt_token_ids"] == server.engine.render(HELLO, None)


def test_a_named_tool_is_the_only_one_that_the_model_sees():
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "function", "function": {"name": "search"}}
    with serving([tool_call("search")]) as server:
        answer = post(server, tools=[other, SEARCH], tool_choice=choice, return_token_ids=True).json()
        assert answer["prompt_token_ids"] == server.engine.render(HELLO, [SEARCH])
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_messages_reach_the_template_in_its_own_form():
    seen: list[Any] = []

    class Engine(ScriptedEngine):
        def render(self, messages: Any, tools: Any) -> list[int]:
            seen.extend(messages)
            return super().render(messages, tools)

    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": '{"q": '}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    with serving(engine=Engine()) as server:
        assert post(server, messages=messages).status_code == 200
    assert seen[0] == {"role": "system", "content": "be brief"}
    assert seen[1] == {"role": "user", "content": "a\nb"}
    assert [one["function"]["arguments"] for one in seen[2]["tool_calls"]] == [{"q": 1}, '{"q": ']
    assert seen[2]["content"] == "" and seen[2]["reasoning_content"] == "hm"
    assert seen[3] == {"role": "tool", "tool_call_id": "c1", "content": "found"}


def test_a_second_turn_extends_the_first_token_by_token():
    text = "look: " + tool_call("search", query="x")
    with serving([text, "done"]) as server:
        first = post(server, tools=[SEARCH], **ALL).json()
        choice = first["choices"][0]
        messages = [*HELLO, choice["message"], {"role": "tool", "tool_call_id": "1", "content": "42"}]
        second = post(server, messages=messages, tools=[SEARCH], **ALL).json()
    before = first["prompt_token_ids"] + choice["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_the_caller_is_passed_to_the_engine_and_frozen_means_frozen():
    seen: list[Any] = []

    class Engine(ScriptedEngine):
        def generate(self, prompt_ids: Any, sampling: Any) -> Any:
            seen.append(sampling)
            return super().generate(prompt_ids, sampling)

    with serving(engine=Engine(max_length=500)) as server:
        headers = {"x-agl-rollout": "r1", "x-agl-agent": "%C3%A4 writer", "x-request-id": "abc"}
        answer = post(server, headers, model="frozen", temperature=0.5, top_p=0.9, top_k=-1, stop=["."]).json()
        post(server, model="policy", top_k=5)
    assert answer["model"] == "frozen" and answer["id"] == "chatcmpl-abc"
    assert seen[0].labels == {"rollout": "r1", "agent": "ä writer"}
    assert seen[0].frozen and not seen[1].frozen
    assert (seen[0].temperature, seen[0].top_p, seen[0].top_k, seen[0].stop) == (0.5, 0.9, 0, (".",))
    assert (seen[1].temperature, seen[1].top_p, seen[1].top_k, seen[1].seed) == (1.0, 1.0, 5, None)
    assert seen[1].max_tokens == 500 - len(ScriptedEngine().render(HELLO, None))


def test_models_and_health_answer():
    with serving() as server:
        models = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["policy", "frozen"]
        assert httpx2.get(f"{server.url}/health").status_code == 200


def test_the_openai_client_is_content_with_it():
    with serving(["hello", tool_call("search", q=1)]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert client.chat.completions.create(model="policy", messages=HELLO).choices[0].message.content == "hello"
        with client.chat.completions.stream(model="policy", messages=HELLO, tools=[SEARCH]) as events:  # pyright: ignore
            for _ in events:
                pass
            call = events.get_final_completion().choices[0].message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("search", {"q": 1})
        client.close()


# ---------------------------------------------------------------------------------------------------- bad bodies


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hi"}),
        ("messages.0.role", {"messages": [{"role": "wizard", "content": "hi"}]}),
        ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("n", {"n": 0}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 0}),
        ("max_tokens", {"max_tokens": 0}),
        ("stop", {"stop": 5}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "nope"}}}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"5": 100}}),
    ],
)
def test_a_bad_body_is_refused_and_the_field_is_named(field: str, body: dict[str, Any]):
    with serving() as server:
        answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field in error["message"]


def test_what_changes_nothing_is_accepted():
    with serving() as server:
        body = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": None, "user": "me", "metadata": {}}
        assert post(server, **body, response_format={"type": "json_object"}).status_code == 200


def test_text_that_is_no_json_is_refused():
    with serving() as server:
        answer = httpx2.post(f"{server.url}/v1/chat/completions", content=b"{nope")
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers():
    with serving(engine=ScriptedEngine(max_length=100)) as server:
        prompt = len(server.engine.render(HELLO, None))
        error = post(server, max_tokens=90).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
        assert str(prompt) in error["message"] and "100" in error["message"]
        error = post(server, messages=[{"role": "user", "content": "x" * 200}]).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


def test_an_unknown_model_and_an_unknown_path_are_404_in_openai_form():
    with serving() as server:
        answer = post(server, model="gpt-4o")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        assert "'policy'" in answer.json()["error"]["message"]
        assert httpx2.get(f"{server.url}/nowhere").json()["error"]["type"] == "invalid_request_error"
        assert httpx2.get(f"{server.url}/v1/chat/completions").status_code == 405


def test_messages_that_the_template_refuses_are_the_callers_fault():
    class Engine(ScriptedEngine):
        def render(self, messages: Any, tools: Any) -> list[int]:
            raise UsageError("roles must alternate")

    with serving(engine=Engine()) as server:
        answer = post(server)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "roles must alternate"


# ------------------------------------------------------------------------------------------- failures, disconnects


class FailingEngine(ScriptedEngine):
    """Fails before its token number ``good``."""

    good = 0

    async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
        async for token in super().generate(prompt_ids, sampling):
            if self.good == 0:
                raise ValueError("the weights are gone")
            self.good -= 1
            yield token


@pytest.mark.parametrize("streaming", [False, True])
def test_an_engine_that_fails_at_once_is_a_500_with_the_reason(streaming: bool):
    with serving(engine=FailingEngine()) as server:
        answer = post(server, stream=streaming)
    assert answer.status_code == 500
    assert "the weights are gone" in answer.json()["error"]["message"]


def test_an_engine_that_fails_in_mid_stream_says_so_in_the_stream():
    engine = FailingEngine(["abcdef"])
    engine.good = 3
    with serving(engine=engine) as server:
        events = stream(server)
    assert text_of(events[:-1]) == "abc"
    assert events[-1]["error"]["type"] == "server_error"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_logprob_that_is_no_number_is_an_error_and_never_broken_json(streaming: bool):
    class Engine(ScriptedEngine):
        def logprob(self, position: int, token_id: int) -> float:
            return float("nan") if position else -1.0

    with serving(engine=Engine(["abc"])) as server:
        if streaming:
            assert "JSON" in stream(server, **ALL)[-1]["error"]["message"]
        else:
            assert post(server, **ALL).status_code == 500


def test_one_choice_that_fails_ends_the_others():
    class Engine(ScriptedEngine):
        def generate(self, prompt_ids: Any, sampling: Any) -> Any:
            return (FailingEngine() if sampling.seed == 1 else super()).generate(prompt_ids, sampling)

    with serving(engine=Engine(["x" * 1000] * 3, token_delay=0.01)) as server:
        assert post(server, n=3, seed=0).status_code == 500
        assert server.engine.running == 0 and server.engine.aborted == 2


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_ends_the_generation_at_once(streaming: bool):
    with serving(engine=ScriptedEngine(["x" * 1000] * 2, token_delay=0.5)) as server:
        body = {"messages": HELLO, "stream": streaming, "n": 2}
        async with httpx2.AsyncClient(timeout=None) as client:
            asking = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=body))
            await asyncio.to_thread(server.wait, lambda: server.engine.running == 2)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await asyncio.to_thread(server.wait, lambda: server.engine.running == 0, 0.4)
        assert server.engine.aborted == 2
        assert not server.exchanges[0].complete


async def test_serve_runs_in_the_present_loop_and_frees_its_port():
    async with serve(create_app(ScriptedEngine())) as url, httpx2.AsyncClient() as client:
        assert (await client.get(f"{url}/health")).status_code == 200
    port = int(url.rpartition(":")[2])
    async with serve(create_app(ScriptedEngine()), port=port) as again:
        assert again == url


async def test_an_engine_is_served_at_a_secret_path():
    async with serve_engine(ScriptedEngine()) as url, httpx2.AsyncClient() as client:
        assert (await client.get(f"{url}/health")).status_code == 200
        bare, _, _ = url.rpartition("/")
        for path in ("/health", "/v1/models", "/x/health", "//health", f"/{url.rpartition('/')[2]}x/health"):
            assert (await client.get(bare + path)).status_code == 404
    async with serve_engine(ScriptedEngine()) as again:
        assert again.rpartition("/")[2] != url.rpartition("/")[2]


async def test_a_server_that_stops_cuts_open_streams():
    async with ModelServer(engine=ScriptedEngine(["x" * 1000], token_delay=0.2)) as server:
        client = httpx2.AsyncClient(timeout=None)
        body = {"messages": HELLO, "stream": True}
        asking = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=body))
        await asyncio.to_thread(server.wait, lambda: server.engine.running == 1)
    with pytest.raises(httpx2.TransportError):
        await asking
    await client.aclose()
    assert server.engine.running == 0


# ----------------------------------------------------------------------------------------------------- detokenizer


def test_text_that_comes_in_pieces_is_the_whole_text():
    random.seed(1)
    alphabet = "aé世🎈 \n\ufffd"
    for _ in range(200):
        text = "".join(random.choices(alphabet, k=random.randrange(12)))
        detokenizer = Detokenizer(ByteTokenizer())
        pieces = [detokenizer.feed(token) for token in [*encode(text), 2]] + [detokenizer.flush()]
        assert "".join(pieces) == text == detokenizer.text


def test_broken_bytes_are_shown_as_replacements_and_never_lost():
    detokenizer = Detokenizer(ByteTokenizer())
    raw = b"a\xe4\xb8b\xf0\x9f\x8e\x88\xff\xff\xff\xff\xff\xffz\xe4"
    pieces = [detokenizer.feed(byte + 3) for byte in raw]
    assert "".join(pieces) + detokenizer.flush() == raw.decode(errors="replace")


def test_nothing_of_a_stop_string_is_given_out_while_it_may_still_come():
    random.seed(2)
    for _ in range(300):
        text = "".join(random.choices("ab", k=random.randrange(15)))
        stops = ["".join(random.choices("ab", k=random.randrange(1, 4))) for _ in range(2)]
        detokenizer = Detokenizer(ByteTokenizer(), stops)
        given = ""
        for token in encode(text):
            given += detokenizer.feed(token)
            if detokenizer.stopped_by is not None:
                break
        given += detokenizer.flush()
        # The stop string that is complete first wins, as the tokens come one character at a time.
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
        assert given == expected

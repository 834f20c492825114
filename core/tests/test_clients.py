"""Clients of openai that exist already: rerouted when asked, told of when they pass a rollout by, else untouched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import openai
import pytest
from openai import _base_client

import agl
from agl import clients, scope
from agl.errors import UsageError
from agl.selection import Selection
from agl.testing import Fault, ModelServer

ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def own() -> Generator[ModelServer]:
    with ModelServer(lambda prompt, labels: "from elsewhere") as server:
        yield server


@pytest.fixture
def policy() -> Generator[ModelServer]:
    with ModelServer(lambda prompt, labels: "from the policy") as server:
        yield server


@pytest.fixture
async def client(own: ModelServer) -> AsyncGenerator[openai.AsyncOpenAI]:
    """Built once, with a key and headers of its owner's."""
    async with openai.AsyncOpenAI(
        api_key="sk-own",
        base_url=f"{own.url}/v1",
        organization="org-own",
        default_headers={"x-own": "secret"},
        default_query={"token": "secret"},
        max_retries=1,
    ) as client:
        yield client


@pytest.fixture
def llm(policy: ModelServer) -> agl.LLM:
    return agl.LLM(f"{policy.url}/v1", key="sk-gateway")


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_told", False)


async def said(client: Any, **more: Any) -> str:
    return (await client.chat.completions.create(**ASK, **more)).choices[0].message.content


def rollout(*optimize: str) -> Any:
    return scope.rollout(scope.RolloutScope("r", 1, Selection(optimize or None)))


# ------------------------------------------------------------------------------------------------------- rerouting


async def test_inside_the_block_the_policy_answers_and_nothing_of_the_owner_leaves(
    client: Any, llm: agl.LLM, own: ModelServer, policy: ModelServer
):
    before = (_base_client.SyncAPIClient._prepare_options, _base_client.AsyncAPIClient._prepare_options)
    with llm.reroute(), agl.agent("solver"):
        assert await said(client, extra_headers={"Authorization": "Bearer sk-own"}) == "from the policy"
    assert await said(client) == "from elsewhere"
    (ours,), (theirs,) = policy.exchanges, own.exchanges
    assert ours.headers["authorization"] == "Bearer sk-gateway" and ours.headers["x-agl-agent"] == "solver"
    assert "own" not in str(ours.headers) and "secret" not in str(ours.headers)
    assert theirs.headers["authorization"] == "Bearer sk-own" and theirs.headers["x-own"] == "secret"
    assert "x-agl-agent" not in theirs.headers
    assert before == (_base_client.SyncAPIClient._prepare_options, _base_client.AsyncAPIClient._prepare_options)


async def test_only_selected_agents_are_rerouted(client: Any, llm: agl.LLM, own: ModelServer, policy: ModelServer):
    with rollout("solver"), llm.reroute():
        with agl.agent("solver"):
            assert await said(client) == "from the policy"
        with agl.agent("judge"):
            assert await said(client) == "from elsewhere"
        assert await said(client) == "from elsewhere"


async def test_contexts_keep_apart(client: Any, own: ModelServer, policy: ModelServer):
    async def one(number: int) -> str:
        if number % 2:
            with agl.LLM(f"{policy.url}/v1", key=f"key-{number}").reroute():
                return await said(client)
        return await said(client)

    answers = await asyncio.gather(*(one(number) for number in range(8)))
    assert answers == ["from elsewhere", "from the policy"] * 4
    assert {e.headers["authorization"] for e in policy.exchanges} == {f"Bearer key-{n}" for n in (1, 3, 5, 7)}


async def test_streams_and_the_synchronous_client_are_rerouted(llm: agl.LLM, own: ModelServer, policy: ModelServer):
    def ask() -> str:
        with openai.OpenAI(api_key="sk-own", base_url=f"{own.url}/v1") as client, llm.reroute():
            chunks = client.chat.completions.create(**ASK, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(ask) == "from the policy"
    assert not own.exchanges


async def test_a_label_goes_with_all_attempts_at_its_request_and_with_no_other(
    client: Any, llm: agl.LLM, policy: ModelServer
):
    policy.faults.append(Fault(status=500))
    with llm.reroute():
        scope.set_call(scope.CallInfo("call-1", "writer"))
        await said(client)
        await said(client)
    assert [exchange.headers.get("x-agl-call") for exchange in policy.exchanges] == ["call-1", "call-1", None]


def test_what_was_switched_off_or_fails_its_test_is_an_error(llm: agl.LLM, monkeypatch: pytest.MonkeyPatch):
    before = _base_client.SyncAPIClient._prepare_options
    monkeypatch.setenv("AGL_WIRE_HOOK", "0")
    with pytest.raises(UsageError, match="AGL_WIRE_HOOK=0 forbids"), llm.reroute():
        pass
    monkeypatch.delenv("AGL_WIRE_HOOK")
    monkeypatch.setattr(clients, "MODEL_CALLS", ("/another/path",))  # as if the SDK had changed
    clients._complaint.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"the installed openai [\d.]+ cannot be rerouted"), llm.reroute():
            pass
    finally:
        clients._complaint.cache_clear()
    assert _base_client.SyncAPIClient._prepare_options is before


# --------------------------------------------------------------------------------------------------------- warnings


@pytest.fixture
def watched() -> Generator[Callable[[], None] | None]:
    stop = clients.agl_instrument()
    yield stop
    if stop is not None:
        stop()
        stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "agl"]


async def test_a_call_that_passes_a_rollout_by_is_told_once(
    watched: Any, client: Any, own: ModelServer, caplog: pytest.LogCaptureFixture
):
    assert await said(client) == "from elsewhere"
    assert not warnings(caplog)
    with rollout():
        with agl.agent("judge"):
            await said(client)
        assert not warnings(caplog)
        for _ in range(2):
            assert await said(client) == "from elsewhere"
    (warning,) = warnings(caplog)
    assert "left for 127.0.0.1 while a rollout runs" in warning and "llm.reroute()" in warning


async def test_a_call_in_a_thread_that_knows_of_no_rollout_is_told(
    watched: Any, own: ModelServer, caplog: pytest.LogCaptureFixture
):
    def ask() -> None:
        with openai.OpenAI(api_key="sk-own", base_url=f"{own.url}/v1") as client:
            client.chat.completions.create(**ASK)

    with rollout():
        thread = threading.Thread(target=ask)
        thread.start()
        await asyncio.to_thread(thread.join)
    (warning,) = warnings(caplog)
    assert "agl.wrap(function)" in warning


async def test_clients_of_the_rollout_are_not_told_of(watched: Any, caplog: pytest.LogCaptureFixture):
    async with openai.AsyncOpenAI(api_key="any", base_url="http://127.0.0.1:9/r/r/1/v1", max_retries=0) as client:
        with rollout(), pytest.raises(openai.APIConnectionError):
            await said(client)
    assert not warnings(caplog)


def test_an_sdk_that_fails_the_test_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    before = _base_client.SyncAPIClient._prepare_options
    monkeypatch.setattr(clients, "_complaint", lambda: "clients of the installed openai 99 cannot be rerouted (x)")
    assert clients.agl_instrument() is None
    assert "will not be told" in warnings(caplog)[0]
    monkeypatch.setenv("AGL_WIRE_HOOK", "0")
    assert clients.agl_instrument() is None
    assert len(warnings(caplog)) == 1
    assert _base_client.SyncAPIClient._prepare_options is before


async def test_instrumenting_starts_and_stops_it(monkeypatch: pytest.MonkeyPatch):
    from agl import plugins

    before = _base_client.AsyncAPIClient._prepare_options
    stop = plugins.instrument()
    assert _base_client.AsyncAPIClient._prepare_options is not before
    stop()
    assert _base_client.AsyncAPIClient._prepare_options is before

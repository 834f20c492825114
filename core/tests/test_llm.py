"""What an agent receives to reach its model: good for any SDK, any program, and for one rollout only."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agl import LLM, llm
from agl.errors import UsageError
from agl.testing import ModelServer


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(lambda prompt, labels: "four") as server:
        yield server


def reach(server: ModelServer) -> LLM:
    return LLM(base_url=f"{server.url}/v1", key="secret")


HELLO = [{"role": "user", "content": "2 + 2?"}]


async def test_both_clients_reach_the_model_with_the_key(server: ModelServer):
    model = reach(server)
    server.exchanges.clear()
    with model.client() as client:
        answer = client.chat.completions.create(model=model.model, messages=HELLO)
    async with model.async_client() as client:
        later = await client.chat.completions.create(model=model.model, messages=HELLO)
    assert answer.choices[0].message.content == later.choices[0].message.content == "four"
    assert [one.headers["authorization"] for one in server.exchanges] == ["Bearer secret"] * 2
    assert [one.body["model"] for one in server.exchanges] == ["policy"] * 2
    await model.close()


def test_the_arguments_are_those_of_openai_and_langchain(server: ModelServer):
    given = reach(server).openai()
    assert given["base_url"].endswith("/v1") and given["api_key"] == "secret" and given["model"] == "policy"
    assert set(given) == {"base_url", "api_key", "model", "http_client", "http_async_client"}
    given["http_client"].close()


def test_no_proxy_of_the_environment_stands_between(server: ModelServer, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with reach(server).client() as client:
        assert client.chat.completions.create(model="policy", messages=HELLO).choices[0].message.content == "four"


def test_another_program_finds_its_model_in_the_environment(server: ModelServer):
    program = (
        "from openai import OpenAI; import os\n"
        "print(OpenAI().chat.completions.create(model=os.environ['OPENAI_MODEL'],"
        "messages=[{'role': 'user', 'content': '2 + 2?'}]).choices[0].message.content)"
    )
    environment = reach(server).environment()
    assert set(environment) == {"OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout == "four\n", done.stderr


async def test_closing_twice_is_closing_once(server: ModelServer):
    model = reach(server)
    model.openai()
    await model.close()
    await model.close()


@pytest.mark.parametrize(("version", "library"), [("3.57.0", "httpx2"), ("2.9.1", "httpx"), ("1.0.0", "httpx")])
def test_the_http_library_is_the_one_that_the_installed_openai_speaks(
    monkeypatch: pytest.MonkeyPatch, version: str, library: str
):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    try:
        assert llm.http_library.__wrapped__().__name__ == library  # without its cache
    except ModuleNotFoundError as error:
        assert error.name == library  # an environment with openai 3 alone has no httpx


def test_without_openai_its_client_is_told_and_the_url_still_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UsageError, match=r"needs the openai package.*llm\.base_url"):
        LLM(base_url="http://127.0.0.1:1/v1", key="k").client()

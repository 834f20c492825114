"""A Lightning server in this process, over a real socket, in front of a model server that keeps the truth."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from agl.client import LightningClient
from agl.records import Call, Lease, Rollout, Task
from agl.testing import ModelServer
from agl.wire import PolicyState
from agl_server.app import create_app
from agl_server.store.sqlite import SqliteStore

ADMIN = "admin-key-of-the-tests"
HELLO = [{"role": "user", "content": "hi"}]


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class House:
    """The server under test and everybody who talks to it."""

    def __init__(self, url: str, app: Any, model: ModelServer, store: SqliteStore, clock: Clock) -> None:
        self.url = url
        self.app = app
        self.model = model
        self.store = store
        self.clock = clock
        self.client = LightningClient(url, ADMIN, patience=5)
        self.http = httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False)
        self.rollouts = 0

    async def serve_policy(self, **policy: Any) -> None:
        await self.client.set_policy(PolicyState(**{"upstream": self.model.url, **policy}))

    async def lease(self, seconds: float = 60, **rollout: Any) -> Lease:
        """Enqueue one rollout and lease it."""
        self.rollouts += 1
        name = rollout.pop("id", f"rollout-{self.rollouts}")
        await self.client.enqueue([new_rollout(name, **rollout)])
        (lease,) = await self.client.lease("tester", 1, seconds)
        return lease

    async def post(
        self,
        lease: Lease,
        body: Any,
        *,
        agent: str | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> httpx2.Response:
        """Send a chat request as the agent would."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {lease.key}", **(headers or {})}
        return await self.http.post(chat_path(lease, agent), content=content, headers=headers)

    async def chat(self, lease: Lease, agent: str | None = None, **body: Any) -> dict[str, Any]:
        """The answer to a good chat request."""
        response = await self.post(lease, {"model": "policy", "messages": HELLO, **body}, agent=agent)
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, lease: Lease, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a good streamed answer."""
        response = await self.post(lease, {"model": "policy", "messages": HELLO, "stream": True, **body})
        assert response.status_code == 200, response.text
        return chunks(response.text)

    async def calls(self, lease: Lease) -> tuple[Call, ...]:
        """What the server has kept of a rollout."""
        return (await self.client.rollout(lease.rollout.id)).calls

    async def call(self, lease: Lease) -> Call:
        """The one call that the server has kept of a rollout."""
        (call,) = await self.calls(lease)
        return call


class Plain:
    """An upstream that answers what the test gives it."""

    def __init__(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.status = status
        self.headers = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.requests.append((scope["path"], headers, json.loads(body)))
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.answer})


@asynccontextmanager
async def plain(house: House, answer: Any, **options: Any) -> AsyncIterator[Plain]:
    """The policy is this upstream."""
    app = Plain(answer, **options)
    async with serve(app) as url:
        await house.serve_policy(upstream=url)
        yield app


def good_answer(**fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
    }
    return {
        "id": "x",
        "model": "policy",
        "prompt_token_ids": [7],
        "choices": [choice | fields.pop("choice", {})],
        **fields,
    }


def chunks(text: str) -> list[dict[str, Any]]:
    *events, end = text.strip().split("\n\n")
    assert end == "data: [DONE]", text
    return [json.loads(event.removeprefix("data: ")) for event in events]


def chat_path(lease: Lease, agent: str | None = None) -> str:
    segment = "" if agent is None else f"/a/{agent}"
    return f"/r/{lease.rollout.id}/{lease.attempt}{segment}/v1/chat/completions"


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """Serve an application over a real socket, and stop without the pauses of an orderly shutdown."""
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio forgets this for a socket that it did not make itself, and then an answer can wait 40 ms for an ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for connection in list(server.server_state.connections):
            connection.shutdown()
        for open_server in server.servers:
            open_server.close()
        listener.close()
        await asyncio.sleep(0)


def new_rollout(name: str = "r", batch: str = "batch", **fields: Any) -> Rollout:
    return Rollout(id=name, task=Task(id=name, data={"question": name}), batch=batch, **fields)


def new_call(name: str = "c", rollout: str = "r", attempt: int = 1, **fields: Any) -> Call:
    return Call(id=name, rollout=rollout, attempt=attempt, **fields)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.sqlite", clock)
    yield store
    await store.close()


@pytest.fixture(scope="session")
def shared_model() -> Iterator[ModelServer]:
    with ModelServer(lambda prompt, labels: "four") as model:
        yield model


@pytest.fixture
def model(shared_model: ModelServer) -> ModelServer:
    """A model that answers "four"; tests that need another script bring a model server of their own."""
    shared_model.exchanges.clear()
    return shared_model


@pytest.fixture
async def house(tmp_path: Path, clock: Clock, model: ModelServer) -> AsyncIterator[House]:
    store = SqliteStore(tmp_path / "store.sqlite", clock)
    app = create_app(store, ADMIN, sweep_seconds=0.05)
    async with app.router.lifespan_context(app), serve(app) as url:
        house = House(url, app, model, store, clock)
        async with house.client, house.http:
            await house.serve_policy()
            yield house

"""A model server for tests: a real HTTP server over a scripted engine, which keeps the token-exact truth."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

from starlette.types import Message, Receive, Scope, Send

from agl.endpoint import create_app, serve, while_connected
from agl.errors import RunError
from agl.protocols import Engine, Sampling, Token
from agl.records import Choice
from agl.testing.engine import Reply, ScriptedEngine


@dataclass(slots=True)
class Fault:
    """How one chat request goes wrong."""

    status: int | None = None
    """Answer with this HTTP status instead."""
    delay: float = 0.0
    """Wait so many seconds first."""
    break_after: int | None = None
    """Cut the connection after so many pieces of the answer's body."""


@dataclass(slots=True)
class Exchange:
    """One request and what it was answered: the truth that captured data is compared with."""

    path: str
    headers: Mapping[str, str]
    body: Any = None
    status: int | None = None
    """HTTP status of the answer; None when none was sent."""
    complete: bool = False
    """The answer was sent to its end."""
    done: bool = False
    """The server is through with the request, well or not."""
    prompt_ids: tuple[int, ...] = ()
    tokens: list[list[Token]] = field(default_factory=list[list[Token]])
    """What was sampled for each choice."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was sampled, as the records of agl hold it."""
        return tuple(
            Choice(
                response_ids=tuple(token.id for token in tokens),
                logprobs=tuple(token.logprob for token in tokens),
                finish_reason=tokens[-1].finish_reason if tokens else None,
            )
            for tokens in self.tokens
        )


class ModelServer:
    """A model server on a free loopback port, in a thread of its own; use it in ``with`` or ``async with``."""

    def __init__(
        self,
        reply: Reply | Iterable[str] | None = None,
        *,
        engine: Engine | None = None,
        faults: Iterable[Fault] = (),
        model: str = "policy",
    ) -> None:
        """Prepare; nothing runs before the block is entered.

        Args:
            reply: as `ScriptedEngine` takes it.
            engine: another engine than a scripted one.
            faults: what goes wrong with the first chat requests, one each.
            model: name of the policy.
        """
        self.engine: Any = engine or (ScriptedEngine() if reply is None else ScriptedEngine(reply))
        """What generates; put another one here at any time."""
        self.faults = deque(faults)
        """What goes wrong with the next chat requests, one each; append to it at any time."""
        self.exchanges: list[Exchange] = []
        """Every chat request, in the order of arrival."""
        self.url = ""
        """Base URL, without ``/v1``."""
        self._app = create_app(cast(Engine, _Recording(self)), model=model)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        """Start serving."""
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), name="agl-model-server")
        self._thread.start()
        if not started.wait(10):
            raise RunError("the model server did not start within 10 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving; streams that are open are cut."""
        assert self._loop is not None and self._stop is not None and self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def __aenter__(self) -> Self:
        """Start serving."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serve(self._record) as self.url:
            started.set()
            await self._stop.wait()

    def wait(self, condition: Callable[[], bool] | None = None, seconds: float = 5.0) -> None:
        """Wait, in a test, until a condition holds; without one, until no request is in progress.

        Raises:
            RunError: it did not come to hold in time.
        """
        holds = condition or (lambda: all(exchange.done for exchange in self.exchanges))
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise RunError(f"the model server waited {seconds:g} s in vain; exchanges: {self.exchanges!r}")
            time.sleep(0.005)

    @property
    def answered(self) -> list[Exchange]:
        """The exchanges that were answered with success, to the end."""
        return [exchange for exchange in self.exchanges if exchange.status == 200 and exchange.complete]

    async def _record(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(scope["path"], headers)
        self.exchanges.append(exchange)
        fault = self.faults.popleft() if self.faults else Fault()
        try:
            body = await _read(receive)
            exchange.body = _json_or_text(body)
            _exchange.set(exchange)
            await while_connected(receive, asyncio.sleep(fault.delay))
            if fault.status is not None:
                await _refuse(fault.status, _watch(exchange, fault, send))
            else:
                await self._app(scope, _replay(body, receive), _watch(exchange, fault, send))
        finally:
            exchange.done = True


_exchange: contextvars.ContextVar[Exchange] = contextvars.ContextVar("agl_testing_exchange")


class _Recording:
    """The server's engine, with everything that it samples written into the exchange at hand."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    @property
    def tokenizer(self) -> Any:
        return self._server.engine.tokenizer

    @property
    def max_length(self) -> int:
        return self._server.engine.max_length

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, str]]]:
        return self._server.engine.parse(text, tools)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        ids = self._server.engine.render(messages, tools)
        _exchange.get().prompt_ids = tuple(ids)
        return ids

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Token]:
        sampled: list[Token] = []
        _exchange.get().tokens.append(sampled)  # the endpoint starts the choices in their order
        return self._sample(prompt_ids, sampling, sampled)

    async def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, sampled: list[Token]
    ) -> AsyncGenerator[Token]:
        tokens = cast("AsyncGenerator[Token]", self._server.engine.generate(prompt_ids, sampling))
        async with aclosing(tokens):
            async for token in tokens:
                sampled.append(token)
                yield token


def _watch(exchange: Exchange, fault: Fault, send: Send) -> Send:
    pieces = 0

    async def watching(message: Message) -> None:
        nonlocal pieces
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
        else:
            if pieces == fault.break_after:
                raise ConnectionAbortedError("the script cuts the connection here")
            pieces += 1
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            exchange.complete = True

    return watching


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body that was read already, then whatever comes."""
    given = False

    async def replaying() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


async def _refuse(status: int, send: Send) -> None:
    error = {"message": "the script refuses this request", "type": "server_error", "param": None, "code": None}
    # The OpenAI clients wait half a second before they try again, unless they are told otherwise.
    headers = [(b"content-type", b"application/json"), (b"retry-after-ms", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def _json_or_text(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")

"""The life of one model call: who asks, who answers, what was sampled, kept before its answer ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from agl.errors import CaptureError, StaleAttempt
from agl.records import Call, CallState
from agl_server.gateway import events
from agl_server.gateway.forms import ChatForm, Form, ResponseForm
from agl_server.gateway.request import ModelRequest, Translate, read
from agl_server.gateway.responses import as_chat
from agl_server.gateway.sampled import Sampled
from agl_server.gateway.target import Target, choose
from agl_server.http import ClientGone, Headers, Refused, Request, refusal_of, retry_after
from agl_server.policy import PolicyKeeper
from agl_server.queue import LiveAttempt, Queue
from agl_server.store import ServerStore

MOST_IN_FLIGHT = 10_000
"""Calls at once; more are told to come back."""

KEEP_ALIVE = 4.0
"""Seconds for which an idle connection to the upstream is kept: less than uvicorn's 5, so that we close first."""


class Exchange:
    """What is known of one call so far."""

    __slots__ = ("attempt", "form", "id", "request", "sampled", "started", "target")

    def __init__(self, request: ModelRequest, attempt: LiveAttempt | None) -> None:
        self.id = uuid.uuid4().hex
        self.request = request
        self.form: Form = ChatForm() if request.response is None else ResponseForm(request.response, self.id)
        self.attempt = attempt
        self.started = time.time()
        self.target: Target | None = None
        self.sampled: Sampled | None = None

    @property
    def headers(self) -> Headers:
        """How the client learns under which id its call was kept."""
        return [(b"x-agl-record", self.id.encode())] if self.attempt is not None else []


class Gateway:
    """Handlers of the OpenAI-compatible paths."""

    def __init__(self, store: ServerStore, queue: Queue, policy: PolicyKeeper) -> None:
        self._store = store
        self._queue = queue
        self._policy = policy
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0

    async def start(self) -> None:
        """Open the pool of connections to upstreams."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers={"user-agent", "accept-encoding"},
            read_bufsize=2**20,
        )

    async def close(self) -> None:
        """Close it."""
        if self._session is not None:
            await self._session.close()

    async def models(self, request: Request) -> None:
        """``GET .../v1/models``: the one model that there is."""
        policy = self._policy.state
        if policy is None:
            raise Refused(503, "no policy is served yet", code="no_policy", headers=retry_after(1))
        model = {"id": policy.model, "object": "model", "created": 0, "owned_by": "agl"}
        await request.answer(orjson.dumps({"object": "list", "data": [model]}))

    async def chat(self, request: Request) -> None:
        """``POST .../v1/chat/completions``."""
        await self._serve(request, None)

    async def responses(self, request: Request) -> None:
        """``POST .../v1/responses``: a chat completion in another form."""
        await self._serve(request, as_chat)

    async def _serve(self, request: Request, translate: Translate | None) -> None:
        if self._in_flight >= MOST_IN_FLIGHT:
            raise Refused(429, f"{MOST_IN_FLIGHT} calls are under way", code="busy", headers=retry_after(1))
        self._in_flight += 1
        try:
            attempt = None
            if "rollout" in request.params:
                attempt = await self._queue.live(*request.attempt())
            exchange = Exchange(await read(request, translate), attempt)
            await (self._stream if exchange.request.stream else self._whole)(request, exchange)
        finally:
            self._in_flight -= 1

    # ------------------------------------------------------------------------------------------ whole answers

    async def _whole(self, request: Request, exchange: Exchange) -> None:
        async with self._failures_kept(exchange):
            async with request.watch(), self._asked(exchange) as response:
                content = await response.read()
            message = _object(content)
            assert exchange.sampled is not None
            exchange.sampled.take(message)
            await self._keep(exchange)
        await request.answer(orjson.dumps(exchange.form.whole(message)), headers=exchange.headers)

    # --------------------------------------------------------------------------------------------------- streams

    async def _stream(self, request: Request, exchange: Exchange) -> None:
        begun = False
        try:
            async with self._failures_kept(exchange):
                async with request.watch(), self._asked(exchange) as response:
                    assert exchange.sampled is not None
                    held: list[bytes] = []
                    async for batch in events.read_events(response.content):
                        parts = [_chunk(data, exchange, held) for data in batch]
                        if not begun:
                            exchange.sampled.check_prompt()  # while the answer can still be a refusal
                            await request.begin_stream(exchange.headers)
                            begun = True
                        if ready := b"".join(parts):
                            await request.send_part(ready)
                if not exchange.sampled.complete:
                    raise _unavailable("the upstream's stream broke off before its end")
                await self._keep(exchange)
        except Exception as error:
            refusal = refusal_of(error)
            if not begun or refusal is None:
                raise
            await request.send_part(exchange.form.failure(refusal), last=True)
            return
        await request.send_part(b"".join(held) + exchange.form.end(), last=True)

    # ---------------------------------------------------------------------------------------------------- shared

    @asynccontextmanager
    async def _asked(self, exchange: Exchange) -> AsyncIterator[aiohttp.ClientResponse]:
        """The upstream's good answer; held while weights are updated, aborted when the block is left early."""
        policy = await self._policy.serving()
        target = choose(policy, exchange.request, exchange.attempt)
        exchange.target, exchange.sampled = target, Sampled(exchange.request, target)
        assert self._session is not None
        headers = {**target.headers, "x-request-id": exchange.id}
        async with self._session.post(
            target.url, data=orjson.dumps(target.body), headers=headers, allow_redirects=False
        ) as response:
            try:
                if response.status != 200:
                    raise _refused_upstream(response, await response.read())
                yield response
            except BaseException:
                response.close()  # at once: an upstream that nobody listens to must stop to sample
                raise

    @asynccontextmanager
    async def _failures_kept(self, exchange: Exchange) -> AsyncIterator[None]:
        """Keep a call that fails, or whose client goes, before that is told to anybody."""
        try:
            yield
        except ClientGone:
            await self._keep(exchange, "client_gone", "the client closed its connection")
            raise
        except (aiohttp.ClientError, OSError, CaptureError, Refused) as error:
            refusal = _refusal(error)
            await self._keep(exchange, "error", refusal.message)
            refusal.headers = [*refusal.headers, *exchange.headers]
            raise refusal from None

    async def _keep(self, exchange: Exchange, state: CallState = "done", error: str | None = None) -> None:
        """Commit the call; nothing is kept of calls that belong to no rollout.

        Raises:
            StaleAttempt: the attempt has ended meanwhile. A client that is gone need not be told.
            CaptureError: the policy's tokens are not all there.
        """
        if exchange.attempt is None:
            return
        call = _record(exchange, exchange.attempt, state, error)
        try:
            await self._store.add_call(call)
        except StaleAttempt:
            if state != "client_gone":
                raise


def _record(exchange: Exchange, attempt: LiveAttempt, state: CallState, error: str | None) -> Call:
    """The call as it is kept; one that did not end well keeps what tokens it has."""
    target, sampled = exchange.target, exchange.sampled
    prompt_ids, choices = (), ()
    if sampled is not None:
        try:
            prompt_ids, choices = sampled.tokens()
        except CaptureError:
            if state == "done":
                raise
    return Call(
        id=exchange.id,
        rollout=attempt.rollout.id,
        attempt=attempt.attempt,
        call_id=exchange.request.call_id,
        agent=exchange.request.agent,
        parent=exchange.request.parent,
        retry=exchange.request.retry,
        state=state,
        error=error,
        model="" if target is None else target.model,
        temperature=1.0 if target is None else target.temperature,
        policy_version=None if sampled is None else sampled.version,
        context=None if sampled is None else sampled.context,
        prompt_ids=prompt_ids,
        choices=choices,
        started=exchange.started,
        ended=time.time(),
    )


def _refusal(error: Exception) -> Refused:
    """What the client is told when its call failed."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, CaptureError):
        return Refused(502, str(error), code="no_tokens")
    return _unavailable(f"the upstream cannot be reached: {type(error).__name__}: {error}")


def _object(content: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _invalid(f"the upstream's answer is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise _invalid(f"the upstream's answer is no JSON object but {type(message).__name__}")
    return message


def _chunk(data: bytes, exchange: Exchange, held: list[bytes]) -> bytes:
    """What of an event may be passed on now; what ends the answer is held back until the call is kept."""
    if data == events.DONE:
        return b""
    message = _object(data)
    if "error" in message:
        error = message["error"]
        text = error.get("message") if isinstance(error, dict) else error
        raise _unavailable(f"the upstream failed while it answered: {text}")
    assert exchange.sampled is not None
    exchange.sampled.take(message)
    part = exchange.form.part(message)
    if exchange.sampled.complete:
        held.append(part)
        return b""
    return part


def _refused_upstream(response: aiohttp.ClientResponse, content: bytes) -> Refused:
    """The upstream's refusal, in OpenAI's form."""
    status = response.status
    if status < 400:
        return _invalid(f"the upstream answered with status {status}; redirects are not followed")
    message, code, param = f"the upstream refused with status {status}", None, None
    try:
        told = orjson.loads(content)
        told = told.get("error", told)
        message = str(told.get("message") or message)
        code = None if told.get("code") is None else str(told["code"])
        param = told.get("param")
    except (orjson.JSONDecodeError, AttributeError):
        pass
    later = response.headers.get("retry-after")
    headers: Headers = [] if later is None else [(b"retry-after", later.encode())]
    return Refused(status, message, code=code, param=param, headers=headers)


def _unavailable(message: str) -> Refused:
    return Refused(503, message, code="upstream_unavailable", headers=retry_after(1))


def _invalid(message: str) -> Refused:
    return Refused(502, message, code="upstream_invalid")

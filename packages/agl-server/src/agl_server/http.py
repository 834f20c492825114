"""HTTP as the server's endpoints see it: a thin layer over ASGI, because the gateway is on every agent's path.

An `Endpoint` cannot be made without saying which key opens it, and turns every refusal into OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import orjson

from agl.errors import ServerError, UsageError
from agl.wire import FieldError

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

BODY_LIMIT = 16 * 1024 * 1024
"""Bytes of a request's body; more is refused with 413."""

MOST_DISCARDED = 4 * BODY_LIMIT
"""A body that is too large is read on so far, because a client that still sends does not read the refusal."""

MOST_ATTEMPTS = 2**31 - 1

JSON_TYPE = (b"content-type", b"application/json")

log = logging.getLogger("agl.server")


class Refused(Exception):
    """A request that is not served; becomes an answer in OpenAI's error form."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> bytes:
        """The answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def refusal_of(error: Exception) -> Refused | None:
    """How an error of agl is answered; None for anything else, which is a fault of the server."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, FieldError):
        return Refused(422, str(error), code="invalid_field", param=error.path or None)
    if isinstance(error, UsageError):
        return Refused(422, str(error), code="invalid_value")
    if isinstance(error, ServerError):
        status = error.status or 503
        # An SDK would repeat a 409 by itself; nothing that a stale attempt repeats can succeed.
        headers = [(b"x-should-retry", b"false")] if status == 409 else retry_after(1) if status == 503 else []
        return Refused(status, str(error), code={404: "not_found", 409: "stale_attempt"}.get(status), headers=headers)
    return None


def retry_after(seconds: int) -> Headers:
    """The header that tells a client when to come back."""
    return [(b"retry-after", str(seconds).encode())]


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Watch:
    """Inside the block, work is cancelled and `ClientGone` raised when the client closes its connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._watcher.cancel()
        if not self._gone:
            return
        if not isinstance(error, asyncio.CancelledError):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)  # the cancellation has not arrived yet; it must not hit what comes after
        self._task.uncancel()
        if error is None or isinstance(error, asyncio.CancelledError):
            raise ClientGone

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


class Request:
    """One request and the way to answer it."""

    __slots__ = ("_receive", "_send", "headers", "params", "scope")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.params: Mapping[str, Any] = scope["path_params"]
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> str | None:
        """A header's text; header names are lower case."""
        value = self.headers.get(name)
        if value is None:
            return None
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Refused(400, f"header {name.decode()} is not UTF-8", code="invalid_header") from error

    def attempt(self) -> tuple[str, int]:
        """The rollout and the attempt that the path names."""
        number: int = self.params["attempt"]
        if number > MOST_ATTEMPTS:
            raise Refused(404, f"there is no attempt {number}", code="not_found")
        return self.params["rollout"], number

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            Refused: it is larger than `BODY_LIMIT`.
        """
        parts: list[bytes] = []
        size = 0
        more = True
        while more and size <= MOST_DISCARDED:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size <= BODY_LIMIT:
                parts.append(part)
            more = message.get("more_body", False)
        if size > BODY_LIMIT:
            closes = [(b"connection", b"close")] if more else []
            raise Refused(413, f"the body is larger than {BODY_LIMIT} bytes", code="body_too_large", headers=closes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def watch(self) -> Watch:
        """Cancel the block when the client goes away; only after the body was read."""
        return Watch(self._receive)

    async def answer(self, content: bytes, status: int = 200, headers: Headers = ()) -> None:
        """Send a whole JSON answer."""
        length = (b"content-length", str(len(content)).encode())
        await self._send({"type": "http.response.start", "status": status, "headers": [JSON_TYPE, length, *headers]})
        await self._send({"type": "http.response.body", "body": content})

    async def begin_stream(self, headers: Headers) -> None:
        """Begin an answer of server-sent events."""
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": [*kind, *headers]})

    async def send_part(self, content: bytes, last: bool = False) -> None:
        """Send the next part of a stream."""
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})


Guard = Callable[[Request], None]
"""Lets a request pass, or raises `Refused`."""

Handler = Callable[[Request], Awaitable[None]]
"""Answers a request, or raises `Refused` or an error of agl."""


class Endpoint:
    """An ASGI endpoint: a guard, then a handler."""

    def __init__(self, guard: Guard, handler: Handler) -> None:
        self.guard = guard
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope, receive, send)
        try:
            self.guard(request)
            await self.handler(request)
        except ClientGone:
            pass
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is None:
                log.exception("%s %s failed", scope["method"], scope["path"])
                refusal = Refused(500, "the server failed; its log says why", code="internal_error")
            await request.answer(refusal.body(), refusal.status, refusal.headers)

"""The control plane: what trainers and workers ask of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from urllib.parse import parse_qsl

import orjson

from agl import wire
from agl_server.http import Refused, Request, retry_after
from agl_server.policy import PolicyKeeper
from agl_server.queue import Queue
from agl_server.store import ServerStore

T = TypeVar("T")

LONGEST_WAIT = 60.0
LONGEST_LEASE = 24 * 3600.0


class Api:
    """Handlers of ``/api`` and ``/healthz``."""

    def __init__(self, store: ServerStore, queue: Queue, policy: PolicyKeeper) -> None:
        self._store = store
        self._queue = queue
        self._policy = policy

    async def enqueue(self, request: Request) -> None:
        """``POST /api/rollouts``."""
        message = await _read(request, wire.Enqueue)
        await self._queue.enqueue(message.rollouts)
        await request.answer(b"{}", 201)

    async def lease(self, request: Request) -> None:
        """``POST /api/lease``: waits until there is a rollout, or the client goes away."""
        message = await _read(request, wire.LeaseRequest)
        _within("limit", message.limit, 1, 1000)
        _within("seconds", message.seconds, 0.1, LONGEST_LEASE)
        _within("wait", message.wait, 0, LONGEST_WAIT)
        async with request.watch():
            leases = await self._queue.lease(message)
        await request.answer(wire.encode(wire.Leases(leases=tuple(leases))))

    async def withdraw(self, request: Request) -> None:
        """``POST /api/withdraw``."""
        message = await _read(request, wire.Withdraw)
        await self._queue.withdraw(message.prefix)
        await request.answer(b"{}")

    async def heartbeat(self, request: Request) -> None:
        """``POST /api/rollouts/{rollout}/{attempt}/heartbeat``."""
        message = await _read(request, wire.Heartbeat)
        _within("seconds", message.seconds, 0.1, LONGEST_LEASE)
        await self._store.heartbeat(*request.attempt(), message.seconds)
        await request.answer(b"{}")

    async def steps(self, request: Request) -> None:
        """``POST /api/rollouts/{rollout}/{attempt}/steps``."""
        message = await _read(request, wire.Steps)
        await self._store.add_steps(*request.attempt(), message.steps)
        await request.answer(b"{}")

    async def finish(self, request: Request) -> None:
        """``POST /api/rollouts/{rollout}/{attempt}/finish``."""
        message = await _read(request, wire.Finish)
        await self._queue.finish(*request.attempt(), message)
        await request.answer(b"{}")

    async def collect(self, request: Request) -> None:
        """``GET /api/rollouts?batch=&after=&limit=&wait=``: waits until one has ended, or the client goes away."""
        query = dict(parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if "batch" not in query:
            raise Refused(422, "say which batch: ?batch=", code="invalid_field", param="batch")
        after = _number(query, "after", int, 0)
        limit = _number(query, "limit", int, 100)
        wait = _number(query, "wait", float, 0.0)
        _within("after", after, 0, 2**62)
        _within("limit", limit, 1, 1000)
        _within("wait", wait, 0, LONGEST_WAIT)
        async with request.watch():
            collected = await self._queue.collect(query["batch"], after, limit, wait)
        await request.answer(wire.encode(collected))

    async def rollout(self, request: Request) -> None:
        """``GET /api/rollouts/{rollout}``."""
        name = request.params["rollout"]
        found = await self._store.rollout(name)
        if found is None:
            raise Refused(404, f"no rollout is named {name!r}", code="not_found")
        await request.answer(wire.encode(found))

    async def set_policy(self, request: Request) -> None:
        """``PUT /api/policy``."""
        message = await _read(request, wire.PolicyState)
        _within("version", message.version, 0, 2**62)
        await self._policy.set(message)
        await request.answer(b"{}")

    async def policy(self, request: Request) -> None:
        """``GET /api/policy``: without the key of the user's own endpoint."""
        state = self._policy.state
        if state is not None and isinstance(state.unselected, wire.Upstream):
            state = replace(state, unselected=replace(state.unselected, api_key=None))
        await request.answer(b"null" if state is None else wire.encode(state))

    async def health(self, request: Request) -> None:
        """``GET /healthz``: 200 when writes reach the disk, else 503 and the cause."""
        cause = self._store.trouble
        content = orjson.dumps({"ok": cause is None, "cause": cause})
        if cause is None:
            await request.answer(content)
        else:
            await request.answer(content, 503, retry_after(1))


async def _read(request: Request, kind: type[T]) -> T:
    body = await request.body()
    try:
        orjson.loads(body)  # refuses what a lenient reader lets pass: NaN, lone surrogates, bottomless nesting
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error}", code="invalid_json") from error
    return wire.decode(kind, body)


def _number(query: dict[str, str], name: str, kind: Callable[[str], T], default: T) -> T:
    text = query.get(name, "")
    try:
        return kind(text) if text else default
    except ValueError as error:
        raise Refused(422, f"{name}={text!r} is not a number", code="invalid_field", param=name) from error


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is within nothing
        raise Refused(
            422, f"{name} is {value!r}; it must be between {low:g} and {high:g}", code="invalid_field", param=name
        )

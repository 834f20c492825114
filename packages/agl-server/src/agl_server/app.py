"""The server as an ASGI application: every path, the key that opens it, and what happens at start and stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import Route

from agl.errors import AglError
from agl_server.api import Api
from agl_server.auth import HostGuard, Keys, public
from agl_server.gateway.handler import Gateway
from agl_server.http import Endpoint, Guard, Handler, Refused, log
from agl_server.policy import PolicyKeeper
from agl_server.queue import Queue
from agl_server.store import ServerStore


def create_app(store: ServerStore, key: str, host: str = "127.0.0.1", sweep_seconds: float = 1.0) -> Starlette:
    """The Lightning server.

    Args:
        store: closed when the application stops.
        key: opens everything.
        host: the address that is listened on; requests must name it, or a loopback name.
        sweep_seconds: how often leases that ran out are looked for.
    """
    keys = Keys(key)
    policy = PolicyKeeper(store)
    queue = Queue(store, keys)
    gateway = Gateway(store, queue, policy)
    api = Api(store, queue, policy)

    def stop_waiting() -> None:
        queue.close()
        policy.close()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await keys.load(store)
        await policy.load()
        await gateway.start()
        app.state.stop_waiting = stop_waiting
        sweeper = asyncio.create_task(_sweep(queue, sweep_seconds))
        yield
        stop_waiting()
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        await gateway.close()
        await store.close()

    attempt, admin = keys.attempt, keys.admin
    run = "/r/{rollout}/{attempt:int}"
    rollout = "/api/rollouts/{rollout}"
    routes = [
        _route("POST", run + "/v1/chat/completions", attempt, gateway.chat),
        _route("POST", run + "/a/{agent}/v1/chat/completions", attempt, gateway.chat),
        _route("POST", run + "/v1/responses", attempt, gateway.responses),
        _route("POST", run + "/a/{agent}/v1/responses", attempt, gateway.responses),
        _route("GET", run + "/v1/models", attempt, gateway.models),
        _route("GET", run + "/a/{agent}/v1/models", attempt, gateway.models),
        _route("POST", "/v1/chat/completions", admin, gateway.chat),
        _route("POST", "/v1/responses", admin, gateway.responses),
        _route("GET", "/v1/models", admin, gateway.models),
        _route("POST", "/api/lease", admin, api.lease),
        _route("POST", "/api/withdraw", admin, api.withdraw),
        _route("POST", rollout + "/{attempt:int}/heartbeat", admin, api.heartbeat),
        _route("POST", rollout + "/{attempt:int}/steps", attempt, api.steps),
        _route("POST", rollout + "/{attempt:int}/finish", admin, api.finish),
        _route("POST", "/api/rollouts", admin, api.enqueue),
        _route("GET", "/api/rollouts", admin, api.collect),
        _route("GET", rollout, admin, api.rollout),
        _route("PUT", "/api/policy", admin, api.set_policy),
        _route("GET", "/api/policy", admin, api.policy),
        _route("GET", "/healthz", public, api.health),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(HostGuard, host=host)],
        exception_handlers={HTTPException: _refuse},
    )


def _route(method: str, path: str, guard: Guard, handler: Handler) -> Route:
    return Route(path, Endpoint(guard, handler), methods=[method])


async def _refuse(_: StarletteRequest, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    refusal = Refused(error.status_code, error.detail)
    return Response(refusal.body(), error.status_code, error.headers, "application/json")


async def _sweep(queue: Queue, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await queue.sweep()
        except AglError as error:  # a disk that is full may have room again a moment later
            log.error("leases that ran out were not taken back: %s", error)

"""Clients of ``openai`` that somebody else built: sent to the policy when asked, told of when they pass a rollout by.

Prefer `agl.llm.LLM.client`, which needs none of this. Here a private method of the SDK is wrapped, its own point for
changing a request before it is built, because an existing client offers no public one. So what is installed tests
itself first, and is undone when it is no longer needed. ``AGL_WIRE_HOOK=0`` leaves the SDK as it is.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from agl import scope
from agl.errors import UsageError
from agl.hookspecs import hookimpl

if TYPE_CHECKING:
    from agl.llm import LLM

log = logging.getLogger("agl")

MODEL_CALLS = ("/chat/completions", "/completions", "/responses")

_rerouted: ContextVar[LLM | None] = ContextVar("agl_rerouted", default=None)
_lock = threading.Lock()
_installed = 0
_originals: list[tuple[type[Any], Any]] = []
_told = False


@hookimpl
def agl_instrument() -> Callable[[], None] | None:
    """Warn when a model call of a rollout leaves for somewhere else and nobody says whose it is."""
    if os.environ.get("AGL_WIRE_HOOK") == "0" or importlib.util.find_spec("openai") is None:
        return None
    if (complaint := _install()) is not None:
        log.warning("%s; model calls that pass a rollout by will not be told", complaint)
        return None
    return _undo_once()


@contextmanager
def reroute(llm: LLM) -> Generator[None]:
    """Send the calls of selected agents to ``llm`` inside the block, from whatever client of ``openai`` they come.

    Raises:
        UsageError: it was switched off, or the installed ``openai`` cannot be rerouted.
    """
    if os.environ.get("AGL_WIRE_HOOK") == "0":
        raise UsageError("AGL_WIRE_HOOK=0 forbids to reroute clients; use llm.client() instead")
    if (complaint := _install()) is not None:
        raise UsageError(f"{complaint}; use llm.client() instead")
    before = _rerouted.get()
    _rerouted.set(llm)
    try:
        yield
    finally:
        _rerouted.set(before)
        _uninstall()


# ------------------------------------------------------------------------------------------------ one model call


def _prepare(client: Any, options: Any) -> None:
    """Change the options of a request that is about to leave, or tell of it."""
    from agl import plugins

    if options.method.lower() != "post" or options.url not in MODEL_CALLS:
        return
    if any(f"/r/{one.rollout}/{one.attempt}/" in str(client.base_url) for one in scope.active_rollouts()):
        return  # a client of ours, or one that was given our base URL
    info, llm, rollout = plugins.current_call(), _rerouted.get(), scope.current_rollout()
    agent = (info.agent if info is not None else None) or "main"
    if llm is not None:
        if rollout is None or agent in rollout.selection:
            _send_to(llm, client, options)
    elif info is None and scope.active_rollouts():
        _tell(client, in_thread=rollout is None)


def _send_to(llm: LLM, client: Any, options: Any) -> None:
    """To the gateway, under our labels; nothing that the client says of its owner goes along."""
    import openai  # pyright: ignore[reportMissingImports]

    omit: Any = openai.Omit()
    given: dict[str, Any] = dict(options.headers) if options.headers else {}
    kept = {name: value for name, value in given.items() if name.lower() not in ("authorization", "api-key")}
    owners = (*client._custom_headers, "OpenAI-Organization", "OpenAI-Project")
    labels = llm.labels(request=options.idempotency_key)
    options.headers = {**dict.fromkeys(owners, omit), **kept, "Authorization": f"Bearer {llm.key}", **labels}
    options.params = {**dict.fromkeys(client.default_query, omit), **(options.params or {})}
    options.url = f"{llm.base_url}{options.url}"


def _tell(client: Any, in_thread: bool) -> None:
    global _told
    if _told:
        return
    _told = True
    why = (
        "it was made in a thread that knows of no rollout: start it through agl.wrap(function)"
        if in_thread
        else "its client is not the rollout's: use llm.client(), or `with llm.reroute():`. If it is meant to go there, "
        'name its agent: `with agl.agent("judge"):`'
    )
    log.warning(
        "a model call left for %s while a rollout runs, and will not be trained: %s. This is told once",
        client.base_url.host,
        why,
    )


# ---------------------------------------------------------------------------------------------------- installation


def _install() -> str | None:
    """Wrap the SDK's method; what is wrong with it, or None."""
    global _installed
    with _lock:
        if _installed == 0:
            _wrap()
        _installed += 1
    if (complaint := _complaint()) is not None:
        _uninstall()
    return complaint


def _wrap() -> None:
    from openai import _base_client  # pyright: ignore

    base: Any = _base_client
    for kind, wrapped in ((base.SyncAPIClient, _wrapped), (base.AsyncAPIClient, _wrapped_async)):
        _originals.append((kind, kind._prepare_options))
        kind._prepare_options = wrapped(kind._prepare_options)


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def prepare(self: Any, options: Any) -> Any:
        options = original(self, options)
        _prepare(self, options)
        return options

    return prepare


def _wrapped_async(original: Any) -> Any:
    @functools.wraps(original)
    async def prepare(self: Any, options: Any) -> Any:
        options = await original(self, options)
        _prepare(self, options)
        return options

    return prepare


def _uninstall() -> None:
    global _installed
    with _lock:
        _installed -= 1
        if _installed == 0:
            for kind, original in _originals:
                kind._prepare_options = original
            _originals.clear()


def _undo_once() -> Callable[[], None]:
    undone: list[bool] = []

    def undo() -> None:
        if not undone:
            undone.append(True)
            _uninstall()

    return undo


@functools.cache
def _complaint() -> str | None:
    """Try it on clients that reach nobody: what the installed SDK does otherwise than it must, or None."""
    import asyncio

    import openai  # pyright: ignore[reportMissingImports]

    from agl.llm import LLM, http_library

    http, seen = http_library(), list[Any]()

    def answer(request: Any) -> Any:
        seen.append(request)
        return http.Response(200, json={"id": "x", "object": "chat.completion", "choices": []})

    own: dict[str, Any] = {"api_key": "own", "base_url": "http://own.invalid/v1", "default_headers": {"x-own": "own"}}
    ask: dict[str, Any] = {"model": "any", "messages": []}

    async def try_async() -> None:
        async with http.AsyncClient(transport=http.MockTransport(answer)) as transport:
            await openai.AsyncOpenAI(**own, http_client=transport).chat.completions.create(**ask)

    def try_both() -> None:
        _rerouted.set(LLM("http://gateway.invalid/v1", "ours"))
        with http.Client(transport=http.MockTransport(answer)) as transport:
            openai.OpenAI(**own, http_client=transport).chat.completions.create(**ask)
        asyncio.run(try_async())

    failure: list[str] = []

    def run() -> None:
        try:
            try_both()
        except Exception as error:
            failure.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)  # of its own: it has no rollout, and maybe no loop may run here
    thread.start()
    thread.join()
    wanted = ("http://gateway.invalid/v1/chat/completions", "Bearer ours", None)
    went = [(str(one.url), one.headers.get("authorization"), one.headers.get("x-own")) for one in seen]
    if not failure and went == [wanted, wanted]:
        return None
    return f"clients of the installed openai {openai.__version__} cannot be rerouted ({failure or went})"

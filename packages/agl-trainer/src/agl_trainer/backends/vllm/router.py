"""What the gateway sees: one endpoint in front of all replicas, with the same rules as the embedded engine's.

A request is checked as `agl.endpoint` checks it and made anew for vLLM, from known fields only: what would change the
sampling in a way that the trainer cannot follow is refused, never passed on. No other route of vLLM can be reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from agl.chat import BadRequest, ChatRequest
from agl.endpoint import FROZEN, describe, while_connected
from agl.errors import BackendError
from agl_trainer.backends.vllm.fleet import Fleet
from agl_trainer.backends.vllm.replica import Replica
from agl_trainer.chat import ChatFormat

ATTEMPTS = 4
"""How often a call whose engine dies is begun anew, as long as nothing of its answer was passed on."""
FORCED = {"logprobs": True, "return_token_ids": True, "include_reasoning": True}
PASSED = ("n", "max_tokens", "max_completion_tokens", "seed", "stop", "stream", "stream_options", "top_logprobs")
MODELS = ("policy", FROZEN)


def create_app(fleet: Fleet, chat: ChatFormat, serving: Callable[[str, bool], str]) -> ASGIApp:
    """The endpoint: ``GET /v1/models``, ``POST /v1/chat/completions``, ``GET /health``.

    Args:
        fleet: who answers.
        chat: the policy's chat format.
        serving: ``(agent, frozen)`` to the name of the weights in vLLM.
    """

    async def models(_: Request) -> Response:
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in MODELS]
        return JSONResponse({"object": "list", "data": cards})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    chats = ChatCompletions(fleet, chat, serving)
    return Router(
        [Route("/v1/models", models), Route("/v1/chat/completions", chats, methods=["POST"]), Route("/health", health)]
    )


class ChatCompletions:
    """The chat route, as an ASGI application: it must know at once when the client leaves."""

    def __init__(self, fleet: Fleet, chat: ChatFormat, serving: Callable[[str, bool], str]) -> None:
        self._fleet = fleet
        self._chat = chat
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        passing = _Passing(send)
        try:
            http = Request(scope, receive)
            body = self._body(ChatRequest.read(await http.body()), http.headers)
            await while_connected(receive, self._answer(body, http.headers, passing))
        except Exception as error:
            if passing.begun:  # the connection is cut, which the gateway takes for what it is
                raise
            status, problem = describe(error)
            await JSONResponse(problem, 503 if isinstance(error, BackendError) else status)(scope, receive, send)

    def _body(self, request: ChatRequest, headers: Mapping[str, str]) -> dict[str, Any]:
        model = request.model or MODELS[0]
        if model not in MODELS:
            raise BadRequest(
                f"no model is named {model!r}; there are {MODELS}", "model", code="model_not_found", status=404
            )
        tools = request.allowed_tools()
        messages = self._chat.spoken([message.rendered() for message in request.messages], tools)
        body = request.model_dump(include={*PASSED}, exclude_none=True)
        extra = request.model_extra or {}
        if (template := extra.get("chat_template_kwargs")) is not None:
            body["chat_template_kwargs"] = template
        if tools:
            body["tools"] = tools
        agent = unquote(headers.get("x-agl-agent", ""))
        return body | {
            **FORCED,
            "model": self._serving(agent, model == FROZEN),
            "messages": [_with_text_arguments(message) for message in messages],
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "top_k": request.top_k or 0,
        }

    async def _answer(self, body: Mapping[str, Any], headers: Mapping[str, str], passing: _Passing) -> None:
        content = json.dumps(body).encode()
        names = ("content-type", "x-request-id")
        sent = {name: value for name in names if (value := headers.get(name)) is not None}
        for attempt in range(ATTEMPTS):
            async with self._fleet.replica(headers.get("x-agl-rollout", "")) as replica:
                try:
                    if await self._try(replica, content, sent, passing):
                        replica.answered += 1
                        return
                except httpx2.TransportError as error:
                    self._fleet.suspect(replica)
                    if passing.begun or attempt == ATTEMPTS - 1:
                        raise BackendError(f"vLLM at {replica.name} broke off: {type(error).__name__}") from error
        raise BackendError(f"vLLM failed {ATTEMPTS} times on this call")

    async def _try(self, replica: Replica, content: bytes, headers: Mapping[str, str], passing: _Passing) -> bool:
        """Pass an answer on; False when the engine behind it is dead and nothing was passed on."""
        version = replica.version
        async with replica.http.stream(
            "POST", "/v1/chat/completions", content=content, headers=dict(headers)
        ) as response:
            if response.status_code >= 500 and not await replica.alive():
                self._fleet.suspect(replica)
                return False
            kind = response.headers.get("content-type", "application/json")
            if not response.is_success:
                await passing.begin(response.status_code, kind)
                await passing.end(await response.aread())
            elif kind.startswith("text/event-stream"):
                await passing.stream(response, version)
            else:
                whole = await response.aread()  # all of it, before any of it is passed on
                await passing.begin(200, kind)
                await passing.end(_stamped(whole, version))
        return True


class _Passing:
    """Sends on what arrives, with the version of the weights written into it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def begin(self, status: int, kind: str) -> None:
        """Send the status line."""
        self.begun = True
        headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def end(self, content: bytes) -> None:
        """Send the last part."""
        await self._send({"type": "http.response.body", "body": content})

    async def stream(self, response: httpx2.Response, version: int | None) -> None:
        """Pass events on as they come, the first one stamped."""
        first = b""
        async for part in response.aiter_raw():
            if self.begun:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                continue
            first += part
            if b"data: {" in first:
                await self.begin(200, response.headers["content-type"])
                head, mark, rest = first.partition(b"data: ")
                stamped = head + mark + _stamped(rest, version)
                await self._send({"type": "http.response.body", "body": stamped, "more_body": True})
        if not self.begun:
            raise httpx2.RemoteProtocolError("the stream ended before its first event")
        await self.end(b"")


def _stamped(content: bytes, version: int | None) -> bytes:
    """A JSON object that begins with the version that sampled it. vLLM's chats do not tell theirs."""
    return b'{"weight_version":%d,' % version + content[1:] if version is not None else content


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as OpenAI writes it: vLLM parses the arguments of earlier tool calls by itself."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)

    def textual(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        given = function["arguments"]
        return {**call, "function": {**function, "arguments": given if isinstance(given, str) else json.dumps(given)}}

    return {**message, "tool_calls": [textual(call) for call in calls]}

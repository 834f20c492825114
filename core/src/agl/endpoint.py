"""Serves an `Engine` over HTTP as vLLM would: OpenAI's chat completions, plus the exact tokens.

The gateway sees one interface, whether it forwards to vLLM or to the engine inside the trainer. What an engine
cannot enforce is best effort: ``tool_choice`` shows only the allowed tools, ``response_format`` is left to the model.
A request field that would change the sampling and is not supported is refused, never ignored.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agl.chat import BadRequest, ChatRequest
from agl.continuation import Chat, Context, Continuations, Extender, ShownDifferently
from agl.detokenizer import Detokenizer
from agl.errors import UsageError
from agl.protocols import Engine, Sampling, Token

FROZEN = "frozen"
"""Name of the model that answers from the frozen base."""

# -------------------------------------------------------------------------------------------------- the answer


@dataclass(slots=True)
class Answer:
    """One choice while it is sampled."""

    index: int
    text: Detokenizer
    ids: list[int] = field(default_factory=list[int])
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """OpenAI's logprob entries; filled when they were asked for."""
    finish_reason: str | None = None
    version: int | None = None
    """The oldest policy version that sampled a token of it."""

    def add(self, token: Token) -> str:
        """Take a token; return the content that is now certain."""
        self.ids.append(token.id)
        self.version = token.version if self.version is None else min(self.version, token.version)
        content = self.text.feed(token.id)
        self.finish_reason = "stop" if self.text.stopped_by is not None else token.finish_reason
        return content

    def logprobs(self, since: int = 0) -> dict[str, Any] | None:
        """The ``logprobs`` field, or None when it was not asked for."""
        return {"content": self.entries[since:]} if self.entries else None


@dataclass(frozen=True, slots=True)
class Job:
    """One checked request, ready to be sampled."""

    request: ChatRequest
    id: str
    model: str
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    context: Context
    before: Chat | None
    """The chat that the prompt extends."""
    tools: list[dict[str, Any]] | None
    sampling: list[Sampling]
    """One for each choice."""
    created: int
    rollout: str | None

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every answer and every chunk begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": None,
            "system_fingerprint": None,
        }

    def usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Tokens read and sampled."""
        sampled = sum(len(answer.ids) for answer in answers)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(self.prompt_ids) + sampled,
        }


# ------------------------------------------------------------------------------------------------- the endpoint


def create_app(engine: Engine, *, model: str = "policy") -> ASGIApp:
    """The endpoint: ``GET /v1/models``, ``POST /v1/chat/completions``, ``GET /health``.

    Args:
        engine: what generates.
        model: the name under which the policy is asked for; ``frozen`` is the frozen base.
    """

    async def models(_: Request) -> Response:
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "agl", "max_model_len": engine.max_length}
            for name in (model, FROZEN)
        ]
        return JSONResponse({"object": "list", "data": cards})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refuse(_: Request, error: Exception) -> Response:
        status, problem = describe(error)
        return JSONResponse(problem, status_code=status)

    routes = [
        Route("/v1/models", models),
        Route("/v1/chat/completions", ChatCompletions(engine, model), methods=["POST"]),
        Route("/health", health),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse})


class ChatCompletions:
    """The chat route, as an ASGI application: it must know at once when the client leaves."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._token_texts: dict[int, str] = {}
        self._extends = hasattr(engine, "extend")
        self._chats = Continuations()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        events = EventStream(send)
        try:
            http = Request(scope, receive)
            job = self._prepare(ChatRequest.read(await http.body()), http.headers)
            answering = self._stream(job, events) if job.request.stream else self._whole(job)
            response = await while_connected(receive, answering)
        except Exception as error:
            status, problem = describe(error)
            if events.open:  # the status line is gone; vLLM tells the rest in an event, and so do we
                await events.send(problem)
                await events.close()
                return
            response = JSONResponse(problem, status_code=status)
        if response is not None:
            await response(scope, receive, send)

    def _prepare(self, request: ChatRequest, headers: Mapping[str, str]) -> Job:
        model = request.model or self._model
        if model not in (self._model, FROZEN):
            known = f"{self._model!r} and {FROZEN!r}"
            raise BadRequest(
                f"no model is named {model!r}; there are {known}", "model", code="model_not_found", status=404
            )
        tools = request.allowed_tools()
        messages = [message.rendered() for message in request.messages]
        labels = {
            name: unquote(value) for name in ("rollout", "agent") if (value := headers.get(f"x-agl-{name}")) is not None
        }
        rollout = labels.get("rollout")
        prompt_ids, context, before = self._prompt(rollout, messages, tools)
        room = self._engine.max_length - len(prompt_ids)
        asked = request.max_completion_tokens or request.max_tokens
        if room < (asked or 1):
            raise BadRequest(
                f"the prompt has {len(prompt_ids)} tokens and {asked or 1} more are to be sampled, "
                f"but this model's context length is {self._engine.max_length} tokens",
                "messages" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        sampling = [
            Sampling(
                max_tokens=asked or room,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                top_k=max(request.top_k or 0, 0),
                seed=None if request.seed is None else request.seed + index,
                stop=request.stops,
                frozen=model == FROZEN,
                labels=labels,
            )
            for index in range(request.n)
        ]
        return Job(
            request=request,
            id=f"chatcmpl-{headers.get('x-request-id') or uuid.uuid4().hex}",
            model=model,
            messages=messages,
            prompt_ids=prompt_ids,
            context=context,
            before=before,
            tools=tools,
            sampling=sampling,
            created=int(time.time()),
            rollout=rollout,
        )

    def _prompt(
        self, rollout: str | None, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], Context, Chat | None]:
        """The prompt's tokens: sampled ones where the chat goes on from an answer, rendered ones for the rest."""
        chat: Chat | None = None
        context: Context = "rendered"
        if self._extends and rollout is not None:
            chat, context = self._chats.find(rollout, messages, tools)
        if chat is not None:
            engine = cast("Extender", self._engine)
            try:
                return engine.extend(chat.tokens(), chat.place, messages, tools), "extended", chat
            except ShownDifferently:
                context = "template"
        return self._engine.render(messages, tools), context, None

    # ---------------------------------------------------------------------------------------------- one answer

    async def _whole(self, job: Job) -> Response:
        answers = self._answers(job)
        await together([self._sample(job, answer, None) for answer in answers])
        body = job.head("chat.completion")
        body["choices"] = [self._choice(job, answer) for answer in answers]
        body["usage"] = job.usage(answers)
        body["weight_version"] = _oldest(answers)
        body["context"] = job.context
        if job.request.return_token_ids:
            body["prompt_token_ids"] = job.prompt_ids
        return JSONResponse(body)

    def _answers(self, job: Job) -> list[Answer]:
        tokenizer = self._engine.tokenizer
        return [Answer(index, Detokenizer(tokenizer, job.request.stops)) for index in range(job.request.n)]

    async def _sample(self, job: Job, answer: Answer, events: EventStream | None) -> None:
        """Sample one choice to its end; with ``events``, tell every token."""
        content = ""
        generation = self._engine.generate(job.prompt_ids, job.sampling[answer.index])
        async with aclosing(cast("AsyncGenerator[Token]", generation)) as tokens:
            async for token in tokens:
                content = answer.add(token)
                if job.request.logprobs:
                    answer.entries.append(self._entry(token))
                if events is not None and answer.finish_reason is None:
                    await self._send_token(job, answer, content, events)
                if answer.finish_reason is not None:
                    break
        if answer.finish_reason is None:
            raise RuntimeError("the generation ended without a finish reason")
        if events is not None:
            await self._send_end(job, answer, content, events)

    def _entry(self, token: Token) -> dict[str, Any]:
        text = self._token_texts.get(token.id)
        if text is None:
            text = self._token_texts[token.id] = self._engine.tokenizer.decode([token.id])
        return {
            "token": text,
            "logprob": token.logprob,
            "bytes": list(text.encode("utf-8", errors="replace")),
            "top_logprobs": [],
        }

    def _message(self, job: Job, answer: Answer) -> tuple[str, list[dict[str, Any]], str]:
        """Content, tool calls and finish reason of a finished answer."""
        assert answer.finish_reason is not None
        if not job.tools:
            return answer.text.text, [], answer.finish_reason
        content, calls = self._engine.parse(answer.text.text, job.tools)
        tool_calls = [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": dict(call)} for call in calls
        ]
        called = bool(calls) and answer.finish_reason == "stop"
        return content, tool_calls, "tool_calls" if called else answer.finish_reason

    def _choice(self, job: Job, answer: Answer) -> dict[str, Any]:
        answer.text.flush()
        content, tool_calls, finish_reason = self._message(job, answer)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if tool_calls:
            message |= {"content": content or None, "tool_calls": tool_calls}
        self._keep(job, answer, message)
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": message,
            "logprobs": answer.logprobs(),
            "finish_reason": finish_reason,
            "stop_reason": answer.text.stopped_by,
        }
        if job.request.return_token_ids:
            choice["token_ids"] = answer.ids
        return choice

    def _keep(self, job: Job, answer: Answer, message: Mapping[str, Any]) -> None:
        if self._extends and job.rollout is not None:
            tokens = [*job.prompt_ids, *answer.ids]
            self._chats.keep(job.rollout, job.messages, job.tools, message, tokens, job.before)

    # ------------------------------------------------------------------------------------------- streamed answer

    async def _stream(self, job: Job, events: EventStream) -> None:
        answers = self._answers(job)
        await together([self._sample(job, answer, events) for answer in answers])
        options = job.request.stream_options
        if options is not None and options.include_usage:
            end = job.head("chat.completion.chunk")
            await events.send({**end, "choices": [], "usage": job.usage(answers), "weight_version": _oldest(answers)})
        await events.close()

    async def _send_token(self, job: Job, answer: Answer, content: str, events: EventStream) -> None:
        await self._send_role(job, answer, events)
        # A tool call is told from text only at the end, so with tools the content waits for it.
        delta = {"content": content} if content and not job.tools else {}
        if delta or job.request.return_token_ids or job.request.logprobs:
            await events.send(self._chunk(job, answer, delta, last_tokens=1))

    async def _send_role(self, job: Job, answer: Answer, events: EventStream) -> None:
        if len(answer.ids) != 1:
            return
        first = self._chunk(job, answer, {"role": "assistant", "content": ""}, last_tokens=0)
        first["context"] = job.context
        if job.request.return_token_ids:
            first["prompt_token_ids"] = job.prompt_ids
        await events.send(first)

    async def _send_end(self, job: Job, answer: Answer, content: str, events: EventStream) -> None:
        await self._send_role(job, answer, events)
        content += answer.text.flush()
        parsed, tool_calls, finish_reason = self._message(job, answer)
        if job.tools:
            content = parsed
        said = parsed if job.tools else answer.text.text
        self._keep(job, answer, {"role": "assistant", "content": said, "tool_calls": tool_calls})
        delta: dict[str, Any] = {"content": content} if content else {}
        if tool_calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(tool_calls)]
        last = self._chunk(job, answer, delta, last_tokens=1)
        last["choices"][0] |= {"finish_reason": finish_reason, "stop_reason": answer.text.stopped_by}
        last["weight_version"] = answer.version
        await events.send(last)

    def _chunk(self, job: Job, answer: Answer, delta: Mapping[str, Any], last_tokens: int) -> dict[str, Any]:
        since = len(answer.ids) - last_tokens
        choice: dict[str, Any] = {
            "index": answer.index,
            "delta": delta,
            "logprobs": answer.logprobs(since) if last_tokens else None,
            "finish_reason": None,
        }
        if job.request.return_token_ids and last_tokens:
            choice["token_ids"] = answer.ids[since:]
        return {**job.head("chat.completion.chunk"), "choices": [choice]}


def _oldest(answers: Sequence[Answer]) -> int | None:
    return min((answer.version for answer in answers if answer.version is not None), default=None)


# ------------------------------------------------------------------------------------------------------- plumbing


class EventStream:
    """Server-sent events. The status line leaves with the first event, so an early failure can still be a 500."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self.open = False

    async def send(self, data: Mapping[str, Any]) -> None:
        """Send one event."""
        await self._body(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")))

    async def close(self) -> None:
        """Send the end mark and end the response."""
        await self._body("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self, text: str) -> None:
        async with self._turn:  # several choices share the connection
            if not self.open:
                self.open = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            body = f"data: {text}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Response | None]) -> Response | None:
    """Do the work, but give it up the moment the client goes away."""

    async def client_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(client_gone())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; the first failure ends the rest and is raised."""
    if len(work) == 1:
        return await work[0]
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except* Exception as failures:
        raise failures.exceptions[0] from None


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body, in OpenAI's form, of what went wrong."""
    field = code = None
    if isinstance(error, BadRequest):
        status, message, field, code = error.status, str(error), error.field, error.code
    elif isinstance(error, UsageError):
        status, message, field = 400, str(error), "messages"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        status, message = 500, f"the engine failed: {type(error).__name__}: {error}"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": field, "code": code}}


class _QuietServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Any:
        yield  # the program's signals are its own


@asynccontextmanager
async def serve(app: ASGIApp, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve an application on the loopback interface, in the current event loop, inside the block.

    Args:
        app: what `create_app` returned, or any ASGI application.
        port: 0 takes a free one.

    Yields:
        The base URL, such as ``http://127.0.0.1:40001`` (without ``/v1``).
    """
    listener = socket.create_server(("127.0.0.1", port), backlog=2048)
    # Without it every second request of a kept connection waits 40 ms for a delayed acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app,
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="critical",  # what fails is told in the answer
        access_log=False,
        timeout_graceful_shutdown=1,  # streams that are still open then are cut
    )
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


@asynccontextmanager
async def serve_engine(engine: Engine, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve an engine as `serve` does, at a base URL whose path is a secret.

    Who does not know it gets 404: other users of this machine cannot call the engine past the gateway.
    """
    async with serve_hidden(create_app(engine), port=port) as url:
        yield url


@asynccontextmanager
async def serve_hidden(app: ASGIApp, *, port: int = 0) -> AsyncGenerator[str]:
    """Serve an application as `serve` does, at a base URL whose path is a secret."""
    secret = f"/{secrets.token_urlsafe(16)}"
    async with serve(_behind(secret, app), port=port) as url:
        yield url + secret


def _behind(prefix: str, app: ASGIApp) -> ASGIApp:
    """The application under ``prefix``, and nothing anywhere else."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if not path.startswith(f"{prefix}/"):
            await JSONResponse({"error": {"message": "not found"}}, 404)(scope, receive, send)
            return
        await app({**scope, "path": path[len(prefix) :]}, receive, send)

    return inside

"""A model server that answers as vLLM does, at once or after a fixed time: the upstream of the benchmarks.

It prints its port and serves until it is ended. Every answer has the same tokens, so what a gateway adds is all
that differs between runs. ``GET /stats`` tells how many requests it saw and how many at most at once; ``POST
/reset`` starts that count anew and sets the time that an answer takes.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

from aiohttp import web

PROMPT_TOKENS = 256
RESPONSE_TOKENS = 64

PROMPT_IDS = [1000 + position for position in range(PROMPT_TOKENS)]
RESPONSE_IDS = [2000 + position for position in range(RESPONSE_TOKENS)]
USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "completion_tokens": RESPONSE_TOKENS,
    "total_tokens": PROMPT_TOKENS + RESPONSE_TOKENS,
}


def logprob(token_id: int) -> dict[str, Any]:
    """One entry of ``logprobs.content``."""
    return {"token": f"token_id:{token_id}", "logprob": -0.25, "bytes": None, "top_logprobs": []}


def whole() -> bytes:
    """A complete answer; ``@ID@`` stands where its id goes."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * RESPONSE_TOKENS, "tool_calls": []},
        "logprobs": {"content": [logprob(token_id) for token_id in RESPONSE_IDS]},
        "finish_reason": "stop",
        "token_ids": RESPONSE_IDS,
    }
    body = {
        "id": "@ID@",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": USAGE,
        "prompt_token_ids": PROMPT_IDS,
    }
    return json.dumps(body).encode()


def events() -> list[bytes]:
    """The same answer as server-sent events, one for each token."""

    def event(**fields: Any) -> bytes:
        chunk = {"id": "@ID@", "object": "chat.completion.chunk", "created": 1, "model": "policy", **fields}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def choice(content: str, **fields: Any) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": {"content": content}, "finish_reason": None, **fields}]

    def token(token_id: int) -> bytes:
        end = {"finish_reason": "stop"} if token_id == RESPONSE_IDS[-1] else {}
        return event(choices=choice("word ", token_ids=[token_id], logprobs={"content": [logprob(token_id)]}, **end))

    first = event(choices=choice(""), prompt_token_ids=PROMPT_IDS)
    last = event(choices=[], usage=USAGE)
    return [first, *(token(token_id) for token_id in RESPONSE_IDS), last, b"data: [DONE]\n\n"]


class Upstream:
    """The server and its counters."""

    def __init__(self) -> None:
        self.latency = 0.0
        self.served = self.present = self.peak = 0
        self.numbers = count(1)
        self.whole = whole()
        self.events = events()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one chat completion."""
        asked = json.loads(await request.read())
        self.present += 1
        self.peak = max(self.peak, self.present)
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            name = f"chatcmpl-{next(self.numbers)}".encode()
            if asked.get("stream"):
                return await self.stream(request, name)
            return web.Response(body=self.whole.replace(b"@ID@", name), content_type="application/json")
        finally:
            self.served += 1
            self.present -= 1

    async def stream(self, request: web.Request, name: bytes) -> web.StreamResponse:
        """Send the events, four to a write, as an engine under load does."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(self.events), 4):
            await response.write(b"".join(self.events[start : start + 4]).replace(b"@ID@", name))
        await response.write_eof()
        return response

    async def stats(self, request: web.Request) -> web.Response:
        """What was seen since the last reset."""
        return web.json_response({"served": self.served, "peak": self.peak})

    async def reset(self, request: web.Request) -> web.Response:
        """Begin a run: ``{"latency": seconds}``."""
        self.latency = float((await request.json())["latency"])
        self.served = self.peak = 0
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        """The one model, and that the server is well."""
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})


async def serve() -> None:
    """Serve on a free port of this machine and print it."""
    upstream = Upstream()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream.complete)
    app.router.add_get("/v1/models", upstream.models)
    app.router.add_get("/health", upstream.models)
    app.router.add_get("/stats", upstream.stats)
    app.router.add_post("/reset", upstream.reset)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())

"""In front of all of vLLM's routes: only those that the trainer uses, and only for who has the key, if there is one."""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

ALLOWED = {
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/load_lora_adapter",
    "/pause",
    "/resume",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/reset_prefix_cache",
}
"""vLLM has others that run code by name."""
OPEN = ("/health", "/metrics")
"""Served without the key."""
ABOUT = "/agl"
"""Tells that this server was started as the trainer needs it."""
KEY = "AGL_VLLM_KEY"


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self._app = app
        key = os.environ.get(KEY)
        self._key = f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let it pass, or refuse."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path = scope["path"]
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._key is not None and path not in OPEN and not secrets.compare_digest(given, self._key):
            await _answer(send, 401, {"error": {"message": f"the key of this server, {KEY}, is missing or wrong"}})
        elif path == ABOUT:
            await _answer(send, 200, {"arguments": sys.argv[2:]})
        elif path in ALLOWED:
            await self._app(scope, receive, send)
        else:
            await _answer(send, 404, {"error": {"message": f"there is no {path} here"}})


async def _answer(send: Any, status: int, content: Any) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})

"""Server-sent events: reading the upstream's, writing ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

DONE = b"[DONE]"


async def read_events(content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """The data of events, in batches: whatever has arrived together is handed on together."""
    rest = b""
    async for received in content.iter_any():
        *events, rest = (rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        batch = [data for event in events if (data := _data(event))]
        if batch:
            yield batch


def _data(event: bytes) -> bytes:
    lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def event(message: Any) -> bytes:
    """One event with a JSON message."""
    return b"data: " + orjson.dumps(message) + b"\n\n"


def end() -> bytes:
    """The event that ends a stream as it should end."""
    return b"data: " + DONE + b"\n\n"

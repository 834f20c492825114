"""The Lightning client never sends a request that the server would refuse for its size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl import wire
from agl.client import ENQUEUED_AT_ONCE, LARGEST_REQUEST, LightningClient
from agl.records import Rollout, Task


class Sending(LightningClient):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", "key")
        self.sent: list[bytes] = []

    async def _request(self, method: str, path: str, message: Any = None, wait: float = 0.0) -> bytes:
        self.sent.append(wire.encode(message))
        return b"{}"


@pytest.mark.parametrize(("number", "characters"), [(3 * ENQUEUED_AT_ONCE + 1, 1), (40, 1_000_000), (1, 9_000_000)])
async def test_many_or_large_rollouts_are_enqueued_in_parts_and_in_order(number: int, characters: int):
    task = Task(id="t", data={"text": "x" * characters})
    client = Sending()
    await client.enqueue([Rollout(id=str(place), task=task, batch="b") for place in range(number)])
    parts = [json.loads(body)["rollouts"] for body in client.sent]
    assert [rollout["id"] for part in parts for rollout in part] == [str(place) for place in range(number)]
    for body, part in zip(client.sent, parts, strict=True):
        assert len(part) == 1 or (len(part) <= ENQUEUED_AT_ONCE and len(body) <= LARGEST_REQUEST)

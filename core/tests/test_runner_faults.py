"""What goes wrong around the runner: agents that do not import, and a server that is ill for a while."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl.client import LightningClient
from agl.errors import ServerError, StaleAttempt, UsageError
from agl.records import Lease, Rollout, Task
from agl.runner import AsyncRunner, load_agent


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def answer(task, llm)\n    pass\n", r"SyntaxError"),
        ("1 / 0\n", r"ZeroDivisionError: division by zero"),
        ("import no_such_module_here\n", r"No module named 'no_such_module_here'"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "agent_that_fails_to_import.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=rf"cannot import '.*agent_that_fails_to_import\.py': {text}"):
        load_agent(f"{path}:answer")
    sys.modules.pop("agent_that_fails_to_import", None)


class IllServer:
    """Gives out one lease; refuses heartbeats with the errors of a script, then takes them."""

    url = "http://127.0.0.1:9"

    def __init__(self, *script: ServerError) -> None:
        self.script = list(script)
        self.beats = 0
        self.leases = [
            Lease(rollout=Rollout(id="r", task=Task(id="t", data={}), batch="b"), attempt=1, key="k", seconds=0.03)
        ]
        self.ended = asyncio.Event()

    async def lease(self, *_: Any, **__: Any) -> Sequence[Lease]:
        if not self.leases:
            await asyncio.sleep(60)
        return [self.leases.pop()]

    async def heartbeat(self, *_: Any) -> None:
        self.beats += 1
        if self.script:
            raise self.script.pop(0)

    async def finish(self, *_: Any) -> None:
        self.ended.set()


async def beats(server: IllServer, wanted: int) -> int:
    """Heartbeats until the agent returns, which it does after so many or after half a second."""

    async def agent(task: Any, llm: Any) -> float:
        for _ in range(50):
            if server.beats >= wanted:
                break
            await asyncio.sleep(0.01)
        return 1.0

    work = asyncio.create_task(AsyncRunner(agent, server).run())  # pyright: ignore[reportArgumentType]
    await server.ended.wait()
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return server.beats


async def test_heartbeats_go_on_after_the_server_was_ill():
    assert await beats(IllServer(ServerError("the disk is full", 507), ServerError("gone")), wanted=4) >= 4


async def test_an_attempt_that_is_stale_does_not_beat_on():
    assert await beats(IllServer(StaleAttempt("another attempt", 409)), wanted=3) == 1


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://localhost"])
def test_an_address_that_is_no_url_is_told_at_once(url: str):
    with pytest.raises(UsageError, match=r"the Lightning server's address is '.*'; write a URL"):
        LightningClient(url, "key")

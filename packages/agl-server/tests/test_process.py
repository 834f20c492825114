"""``agl serve`` as a process: it starts, says where it is, stops when told to, and survives being killed."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agl.client import LightningClient
from agl.errors import ServerError
from agl.records import Lease, Reward
from agl.testing import ModelServer, ScriptedEngine
from agl.wire import PolicyState

from .conftest import HELLO, chat_path, new_rollout

KILLS = 10


class Process:
    """One home folder, and the server that lives in it at the moment."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.environment = {**os.environ, **environment}
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self, *options: str) -> float:
        """Start and wait until it listens; the seconds that took."""
        started = time.monotonic()
        self.process = self.spawn("--port", str(self.port), *options)
        while self.address.get("pid") != self.process.pid:
            assert self.process.poll() is None and time.monotonic() - started < 20, "the server did not start"
            time.sleep(0.01)
        self.port = int(self.address["url"].rpartition(":")[2])
        assert self.address["url"] == self.url
        return time.monotonic() - started

    def spawn(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "agl", "serve", "--home", str(self.home), *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    @property
    def address(self) -> dict[str, Any]:
        path = self.home / "server.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (self.home / "key").read_text().strip()

    def stop(self, number: signal.Signals) -> tuple[int, str, str]:
        """Send a signal; exit status, output and error output."""
        assert self.process is not None
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=15)
        return self.process.returncode, out, err


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    server = Process(tmp_path / "home")
    yield server
    if server.process is not None and server.process.poll() is None:
        server.stop(signal.SIGKILL)


def test_it_starts_fast_tells_where_it_is_and_stops_when_told(server: Process):
    assert server.start() < 5  # 0.7 s on an idle machine; tests share theirs
    assert httpx2.get(f"{server.url}/healthz", trust_env=False).json()["ok"] is True
    status, out, err = server.stop(signal.SIGTERM)
    assert (status, err) == (0, "")
    assert out.count("\n") == 1 and server.url in out and str(server.home / "key") in out
    assert server.key not in out
    assert sorted(path.name for path in server.home.iterdir()) == ["key", "lock", "store.sqlite"]


def test_the_command_imports_neither_torch_nor_before_it_runs_a_web_server():
    check = (
        "import sys, agl.plugins; agl.plugins.commands(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'starlette', 'aiohttp', 'uvicorn', 'sqlite3')))"
    )
    assert subprocess.run([sys.executable, "-c", check], env={**os.environ, "AGL_PLUGINS": "server"}).returncode == 0
    check = "import sys, agl_server.app, agl_server.store.sqlite; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_a_second_server_in_the_same_home_is_refused(server: Process):
    server.start()
    second = server.spawn()
    _, err = second.communicate(timeout=15)
    assert second.returncode == 2 and "another server uses" in err
    assert httpx2.get(f"{server.url}/healthz", trust_env=False).status_code == 200


def test_a_public_address_needs_a_chosen_key(tmp_path: Path):
    refused = Process(tmp_path / "a").spawn("--host", "0.0.0.0")
    _, err = refused.communicate(timeout=15)
    assert refused.returncode == 2 and "AGL_KEY" in err and "UsageError" in err


def test_an_unknown_store_is_told_with_those_there_are(tmp_path: Path):
    for url, said in (("mongo://x", "known: sqlite"), ("x.sqlite", "is no URL")):
        refused = Process(tmp_path).spawn("--store", url)
        _, err = refused.communicate(timeout=15)
        assert refused.returncode == 2 and said in err


def test_a_port_that_is_taken_is_told(server: Process, tmp_path: Path):
    server.start()
    second = Process(tmp_path / "other").spawn("--port", str(server.port))
    _, err = second.communicate(timeout=15)
    assert second.returncode == 2 and "choose another --port" in err


async def test_at_sigterm_calls_under_way_end_well_and_waiting_workers_are_sent_home(server: Process):
    async with ModelServer(engine=ScriptedEngine(["slow"], latency=1.0)) as model:
        await asyncio.to_thread(server.start)
        async with LightningClient(server.url, server.key, patience=0.1) as client, httpx2.AsyncClient() as http:
            await client.set_policy(PolicyState(upstream=model.url))
            await client.enqueue([new_rollout("a")])
            (lease,) = await client.lease("w", 1, 60)
            call = asyncio.create_task(ask(http, server.url, lease))
            worker = asyncio.create_task(client.lease("w", 1, 60, wait=30))
            await asyncio.to_thread(model.wait, lambda: bool(model.exchanges))
            started = time.monotonic()
            status, _, err = await asyncio.to_thread(server.stop, signal.SIGTERM)
            assert (status, err) == (0, "")
            assert time.monotonic() - started < 5
            assert await worker == ()
            answer = await call
    assert answer.status_code == 200
    assert answer.headers["x-agl-record"] in kept_calls(server.home)


async def ask(http: httpx2.AsyncClient, url: str, lease: Lease) -> httpx2.Response:
    headers = {"authorization": f"Bearer {lease.key}"}
    return await http.post(f"{url}{chat_path(lease)}", json={"messages": HELLO}, headers=headers, timeout=10)


def kept_calls(home: Path) -> set[str]:
    connection = sqlite3.connect(home / "store.sqlite")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return {row[0] for row in connection.execute("SELECT id FROM calls")}
    finally:
        connection.close()


class Load:
    """Workers and a trainer that go on whatever happens to the server, and remember what it acknowledged."""

    def __init__(self, client: LightningClient, http: httpx2.AsyncClient) -> None:
        self.client = client
        self.http = http
        self.stopping = False
        self.produced = False
        self.enqueued: set[str] = set()
        self.calls: set[str] = set()
        self.rewards: dict[str, float] = {}
        self.collected: list[Any] = []

    async def progress(self) -> None:
        """Return at some moment after a few more calls were acknowledged."""
        before = len(self.calls)
        while len(self.calls) < before + 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(random.uniform(0, 0.1))

    async def produce(self) -> None:
        while not self.stopping:
            names = [f"r{len(self.enqueued) + index}" for index in range(4)]
            await self.client.enqueue([new_rollout(name, max_attempts=1) for name in names])
            self.enqueued.update(names)
            await asyncio.sleep(0.05)
        self.produced = True

    async def work(self, name: str) -> None:
        while not (self.produced and len(self.rewards) >= len(self.enqueued)):
            for lease in await self.client.lease(name, 2, 30, wait=0.2):
                for _ in range(3):
                    self.calls.add(await self.call(lease))
                reward = random.random()
                await self.client.finish(lease.rollout.id, lease.attempt, "ok", Reward.of(reward))
                self.rewards[lease.rollout.id] = reward

    async def call(self, lease: Lease) -> str:
        """A model call, as a patient SDK makes it; the id under which it was acknowledged."""
        while True:
            try:
                answer = await ask(self.http, self.client.url, lease)
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            return answer.headers["x-agl-record"]

    async def train(self) -> None:
        cursor = 0
        while not (self.produced and len(self.collected) >= len(self.enqueued)):
            cursor, rollouts = await self.client.collect("batch", cursor, 50, wait=0.2)
            self.collected += rollouts


async def test_a_server_killed_again_and_again_under_load_loses_nothing_that_it_acknowledged(server: Process):
    await asyncio.to_thread(server.start)
    async with (
        ModelServer(lambda prompt, labels: "four") as model,
        LightningClient(server.url, server.key, patience=30) as client,
        httpx2.AsyncClient(trust_env=False) as http,
    ):
        await client.set_policy(PolicyState(upstream=model.url, version=7))
        load = Load(client, http)
        working = asyncio.gather(load.produce(), load.train(), *(load.work(f"w{index}") for index in range(8)))
        for _ in range(KILLS):
            await load.progress()
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
        load.stopping = True
        await asyncio.wait_for(working, 30)
        policy = await client.policy()
    assert policy is not None and (policy.version, policy.upstream) == (7, model.url)
    assert server.stop(signal.SIGTERM)[0] == 0

    names = [rollout.id for rollout in load.collected]
    assert len(names) == len(set(names)) and set(names) == load.enqueued
    assert len(names) > 2 * KILLS
    for rollout in load.collected:
        assert (rollout.outcome, rollout.attempt) == ("ok", 1)  # no lease was lost with the answer that gave it
        assert rollout.returned == Reward.of(load.rewards[rollout.id])
        assert all(call.choices[0].logprobs for call in rollout.calls if call.state == "done")
    collected = {call.id for rollout in load.collected for call in rollout.calls}
    assert load.calls <= collected <= kept_calls(server.home)
    assert len(load.calls) == 3 * len(names)


async def test_keys_survive_a_kill(server: Process):
    await asyncio.to_thread(server.start)
    async with ModelServer(lambda prompt, labels: "four") as model, httpx2.AsyncClient() as http:
        async with LightningClient(server.url, server.key) as client:
            await client.set_policy(PolicyState(upstream=model.url))
            await client.enqueue([new_rollout("a")])
            (lease,) = await client.lease("w", 1, 60)
        await asyncio.to_thread(server.stop, signal.SIGKILL)
        await asyncio.to_thread(server.start)
        assert (await ask(http, server.url, lease)).status_code == 200
        async with LightningClient(server.url, "x" * 32, patience=1) as stranger:
            with pytest.raises(ServerError, match="401"):
                await stranger.policy()

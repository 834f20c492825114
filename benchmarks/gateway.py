"""Measure the gateway: agl beside its bare upstream and agentlightning 1.0.2, in one run on one machine.

    python benchmarks/gateway.py            # everything; about four minutes, most of them agentlightning's
    python benchmarks/gateway.py --quick    # small loads, half a minute

Three processes share the machine: this loader, the gateway under test, and an upstream that answers as vLLM does
(benchmarks/upstream.py). Each agent makes its calls one after another; all agents run at once. agl writes every
call to disk before the answer ends; agentlightning keeps them in memory. The figures go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp

from agl.client import LightningClient
from agl.records import Rollout, Task
from agl.wire import PolicyState
from peers import environment

ROOT = environment.ROOT
RESULTS = ROOT / "benchmarks" / "results" / "gateway.json"
PEER = "agentlightning==1.0.2"

BODY = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "You write SQL. " * 20},
        {"role": "user", "content": "How many singers are older than thirty? " * 20},
    ],
    "max_tokens": 64,
}


@dataclass(frozen=True, slots=True)
class Load:
    """How many agents ask how often, and how long the upstream takes to answer."""

    agents: int
    calls: int
    latency: float
    """Seconds."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.agents:,} agents x {self.calls} calls, {self.latency:g} s upstream"


FULL = (Load(agents=100, calls=20, latency=0.0), Load(agents=1000, calls=2, latency=2.0))
QUICK = (Load(agents=20, calls=10, latency=0.0), Load(agents=100, calls=2, latency=0.5))


@dataclass(frozen=True, slots=True)
class Door:
    """Where one agent sends its calls."""

    url: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one system did under one load. Times in seconds."""

    system: str
    load: str
    requests: int
    errors: int
    wall: float
    per_second: float
    p50: float
    p99: float
    upstream_peak: int
    """The most requests that the upstream saw at once."""
    kept: int | None
    """Calls that the gateway had recorded afterwards; None where that is not asked."""


# ------------------------------------------------------------------------------------------------- the loader


def http_session() -> aiohttp.ClientSession:
    """A client that opens as many connections as there are agents."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600))


async def press(
    session: aiohttp.ClientSession, system: str, doors: Sequence[Door], load: Load, stream: bool
) -> Figures:
    """Run the load and measure it."""
    body = json.dumps({**BODY, "stream": True} if stream else BODY).encode()
    proof = b"data: [DONE]" if stream else b'"finish_reason"'
    times: list[float] = []
    errors: list[str] = []

    async def agent(door: Door) -> None:
        for _ in range(load.calls):
            begun = time.perf_counter()
            try:
                async with session.post(door.url, data=body, headers=door.headers) as response:
                    answer = await response.read()
                if response.status != 200 or proof not in answer:
                    errors.append(f"{response.status} {answer[:200]!r}")
            except aiohttp.ClientError as error:
                errors.append(repr(error))
            times.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(agent(door) for door in doors))
    wall = time.perf_counter() - begun
    for error in errors[:3]:
        print(f"  {system}: {error}", file=sys.stderr)
    times.sort()
    return Figures(
        system=system,
        load=load.title,
        requests=len(times),
        errors=len(errors),
        wall=wall,
        per_second=len(times) / wall,
        p50=times[len(times) // 2],
        p99=times[min(len(times) - 1, int(len(times) * 0.99))],
        upstream_peak=0,
        kept=None,
    )


# ------------------------------------------------------------------------------------------------ the processes


@contextmanager
def process(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of ours, ended with the block."""
    running = subprocess.Popen([str(part) for part in command], text=True, **options)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(timeout=10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


async def until(ready: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Wait until ``ready()`` is true, and return what it said."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (answer := await asyncio.to_thread(ready)) is not None:
            return answer
        await asyncio.sleep(0.05)
    raise SystemExit(f"{what} did not start within {seconds:g} s")


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------------------- the systems


class Direct:
    """No gateway: what the loader and the upstream can do by themselves."""

    name = "none (direct)"
    streams = True

    @asynccontextmanager
    async def run(self, session: aiohttp.ClientSession, upstream: str) -> AsyncIterator[None]:
        """Nothing to start."""
        self.url = f"{upstream}/v1/chat/completions"
        yield

    async def doors(self, session: aiohttp.ClientSession, agents: int) -> list[Door]:
        """The upstream itself."""
        return [Door(self.url, {"content-type": "application/json"})] * agents

    async def kept(self) -> int | None:
        """There is nothing that keeps."""
        return None


class Agl:
    """agl's server: one attempt, with a key of its own, for every agent."""

    name = "agl"
    streams = True

    def __init__(self) -> None:
        self.batch = 0

    @asynccontextmanager
    async def run(self, session: aiohttp.ClientSession, upstream: str) -> AsyncIterator[None]:
        """Serve from a fresh home and point the gateway to the upstream."""
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            command = [sys.executable, "-m", "agl", "serve", "--home", home, "--port", "0"]
            with process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                self.url = await until(lambda: served_at(home / "server.json"), self.name)
                async with LightningClient(self.url, (home / "key").read_text().strip()) as self.client:
                    await self.client.set_policy(PolicyState(upstream=upstream))
                    yield

    async def doors(self, session: aiohttp.ClientSession, agents: int) -> list[Door]:
        """Enqueue a rollout for every agent and lease it."""
        self.batch += 1
        names = [f"rollout-{self.batch}-{number}" for number in range(agents)]
        batch = f"batch-{self.batch}"
        await self.client.enqueue([Rollout(id=name, task=Task(id=name, data={}), batch=batch) for name in names])
        self.leases = await self.client.lease("bench", agents, seconds=600)
        return [
            Door(
                f"{self.url}/r/{lease.rollout.id}/{lease.attempt}/v1/chat/completions",
                {"content-type": "application/json", "authorization": f"Bearer {lease.key}"},
            )
            for lease in self.leases
        ]

    async def kept(self) -> int | None:
        """End the rollouts, collect them as a trainer does, and count the calls that carry tokens."""
        for lease in self.leases:
            await self.client.finish(lease.rollout.id, lease.attempt, "ok")
        calls, cursor = 0, 0
        while True:
            cursor, rollouts = await self.client.collect(f"batch-{self.batch}", cursor)
            if not rollouts:
                return calls
            calls += sum(len(call.choices[0].response_ids) > 0 for rollout in rollouts for call in rollout.calls)


class AgentLightning:
    """The released peer, in an environment of its own, with its packaged defaults."""

    name = PEER.replace("==", " ")
    streams = False

    def __init__(self, python: Path) -> None:
        self.python = python
        self.headers = {"content-type": "application/json", "authorization": "Bearer bench"}
        self.batch = 0

    @asynccontextmanager
    async def run(self, session: aiohttp.ClientSession, upstream: str) -> AsyncIterator[None]:
        """Start ``agl-server`` and register the upstream as the model's endpoint."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"port={port}", "host=127.0.0.1", "key=bench", "default_proxy.model_name=policy"]
            command = [
                self.python.with_name("agl-server"),
                *settings,
                "hydra.run.dir=.",
                "hydra.output_subdir=null",
            ]
            with process(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
                await until(lambda: can_connect(port), self.name)
                models = [{"model": "policy", "endpoint": f"{upstream}/v1"}]
                async with session.post(f"{self.url}/api/models", json=models, headers=self.headers) as response:
                    response.raise_for_status()
                yield

    async def doors(self, session: aiohttp.ClientSession, agents: int) -> list[Door]:
        """Register a rollout for every agent."""
        self.batch += 1
        names = [f"rollout-{self.batch}-{number}" for number in range(agents)]
        rollouts = [{"rollout_id": name, "input": {}} for name in names]
        async with session.post(f"{self.url}/api/rollouts", json=rollouts, headers=self.headers) as response:
            response.raise_for_status()
        path = "proxy/rollout/{}/attempt/0/mode/train/openai/v1/chat/completions"
        return [Door(f"{self.url}/{path.format(name)}", self.headers) for name in names]

    async def kept(self) -> int | None:
        """Not asked: they are in memory only."""
        return None


System = Direct | Agl | AgentLightning


def served_at(record: Path) -> str | None:
    """The URL that agl's server wrote down when it was ready."""
    try:
        return json.loads(record.read_text())["url"]
    except (OSError, ValueError):
        return None


def can_connect(port: int) -> bool | None:
    """True once somebody listens."""
    with socket.socket() as probe:
        return True if probe.connect_ex(("127.0.0.1", port)) == 0 else None


def peer_environment() -> Path | str:
    """The Python of the peer's environment, made on the first run; or why there is none."""
    python = peer_python()
    return "it needs Python 3.12, and none was found here" if python is None else environment.make(PEER, python=python)


def peer_python() -> str | None:
    """A Python 3.12: on the path, or one that pyenv keeps."""
    kept = sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python"))
    for candidate in ["python3.12", *map(str, kept)]:
        with_it = shutil.which(candidate)
        if with_it and subprocess.run([with_it, "--version"], capture_output=True).returncode == 0:
            return with_it
    return None


# ------------------------------------------------------------------------------------------------- the whole run


async def measure(systems: Sequence[System], loads: Sequence[Load]) -> list[Figures]:
    """Every system under every load; the upstream and the loader are the same for all."""
    figures: list[Figures] = []
    with process([sys.executable, ROOT / "benchmarks" / "upstream.py"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        upstream = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for system in systems:
            async with http_session() as session, system.run(session, upstream):
                await once(session, system, upstream, Load(agents=5, calls=2, latency=0.0), stream=False)  # warm
                for load in loads:
                    for stream in (False, True) if system.streams else (False,):
                        figures.append(await once(session, system, upstream, load, stream))
                        print(line(figures[-1]), flush=True)
    return figures


async def once(session: aiohttp.ClientSession, system: System, upstream: str, load: Load, stream: bool) -> Figures:
    """One system under one load."""
    doors = await system.doors(session, load.agents)
    async with session.post(f"{upstream}/reset", json={"latency": load.latency}) as response:
        response.raise_for_status()
    figures = await press(session, system.name + (", streaming" if stream else ""), doors, load, stream)
    async with session.get(f"{upstream}/stats") as response:
        peak = (await response.json())["peak"]
    return replace(figures, upstream_peak=peak, kept=await system.kept())


def line(row: Figures) -> str:
    """One row for people."""
    times = f"p50 {row.p50:>7.3f} s  p99 {row.p99:>7.3f} s  wall {row.wall:>7.2f} s"
    counts = f"upstream peak {row.upstream_peak:>5}  errors {row.errors}"
    counts += "" if row.kept is None else f"  kept {row.kept} of {row.requests}"
    return f"{row.load:<40} {row.system:<25} {row.per_second:>7.0f} req/s  {times}  {counts}"


def ratios(figures: Sequence[Figures]) -> list[str]:
    """agl beside the others, one line for each load."""
    lines: list[str] = []
    for load in dict.fromkeys(row.load for row in figures):
        rows = {row.system: row for row in figures if row.load == load}
        ours, bare, peer = (rows.get(name) for name in (Agl.name, Direct.name, AgentLightning.name))
        if ours and bare:
            lines.append(f"{load}: agl takes {ours.wall / bare.wall:.2f}x the wall time of no gateway")
        if ours and peer:
            faster, sooner = ours.per_second / peer.per_second, peer.p99 / ours.p99
            lines.append(f"{load}: agl does {faster:.1f}x the requests of {peer.system}, p99 {sooner:.1f}x lower")
    return lines


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small loads")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out")
    arguments = parser.parse_args()

    systems: list[System] = [Direct(), Agl()]
    if not arguments.without_peer:
        python = peer_environment()
        if isinstance(python, Path):
            systems.append(AgentLightning(python))
        else:
            print(f"{PEER} is not measured: {python}", file=sys.stderr)
    figures = asyncio.run(measure(systems, QUICK if arguments.quick else FULL))
    print(*ratios(figures), sep="\n")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "agl": version("agl")}
    if not arguments.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            json.dumps({"machine": machine, "figures": [asdict(row) for row in figures]}, indent=2) + "\n"
        )
    if any(row.errors or row.kept not in (None, row.requests) for row in figures if row.system != AgentLightning.name):
        sys.exit("agl answered with errors or lost calls")


if __name__ == "__main__":
    main()

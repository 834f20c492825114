"""What must run so that rollouts happen: the Lightning server, the backend, and whoever runs the agents.

The backend's endpoint and our client share one event loop; agents have another, so that a program that blocks its
loop cannot keep the backend from answering. The server is a process of its own and is started again when it dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from agl import plugins
from agl.client import LightningClient
from agl.errors import ConfigError, RunError, ServerError, StallError
from agl.protocols import AgentFunction, Backend
from agl.records import Rollout
from agl.runner import AsyncRunner
from agl.wire import PolicyState, Upstream
from agl_trainer.config import Endpoint, TrainConfig
from agl_trainer.progress import say

T = TypeVar("T")
START_SECONDS = 60.0
WATCH_SECONDS = 0.25
CLOSE_SECONDS = 10.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing:
            # asyncio lets these two out of the loop as well as into the task; an agent's task may raise them.
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run in the loop and wait for the result.

        Raises:
            TimeoutError: it took longer.
        """
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        """Stop the loop."""
        self._closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()


class ServerProcess:
    """A Lightning server of our own: started, watched, started again on the same port, stopped."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it listens."""
        self.home.mkdir(parents=True, exist_ok=True)
        self._wait_for_predecessor()
        port = self.url.rsplit(":", 1)[-1] if self.url else "0"
        command = [sys.executable, "-m", "agl", "serve", "--home", str(self.home), "--port", port]
        # The server ends by itself when this process is gone, however it ended.
        environment = {**os.environ, "AGL_KEY": self.key, "AGL_PARENT": str(os.getpid())}
        log = (self.home / "server.log").open("ab")
        self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        log.close()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if (found := self._read_address()) is not None:
                self.url = found
                return
            time.sleep(0.02)
        tail = (self.home / "server.log").read_text(errors="replace")[-500:]
        raise ServerError(f"the Lightning server did not start within {START_SECONDS:g} s; its log ends: {tail}")

    def _wait_for_predecessor(self) -> None:
        """The server of a trainer that was killed notices it within a second, and ends."""
        deadline = time.monotonic() + START_SECONDS
        with (self.home / "lock").open("a") as lock:
            while time.monotonic() < deadline:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.05)

    def _read_address(self) -> str | None:
        try:
            written = json.loads((self.home / "server.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        assert self._process is not None
        return written["url"] if written["pid"] == self._process.pid else None

    def revive(self) -> None:
        """Start it again if it has died: what it acknowledged is on disk."""
        if self._process is not None and self._process.poll() is not None:
            self.restarts += 1
            say(f"the Lightning server died (exit {self._process.returncode}); starting it again")
            self.start()

    def stop(self) -> None:
        """End it, by its own process id."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Services:
    """Starts everything, collects rollouts, stops everything it started."""

    def __init__(self, agent: AgentFunction, config: TrainConfig, backend: Backend, folder: Path) -> None:
        self.agent = agent
        self.config = config
        self.backend = backend
        self.server: ServerProcess | None = None if config.server_url else ServerProcess(folder / "server")
        self._folder = folder
        self._serving = LoopThread("agl-serving")
        self._agents = LoopThread("agl-agents")
        self._stack = AsyncExitStack()
        self._client: LightningClient | None = None
        self._runner: Any = None
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start server, backend and runner, in this order."""
        if self.server is not None:
            self.server.start()
        self._client = self._serving.run(self._stack.enter_async_context(LightningClient(*self.address)))
        self._serving.run(self.backend.start())
        if self.server is None:
            self._refuse_busy_server()
        # Of a trainer that was killed; whoever resumes it enqueues them again.
        self._serving.run(self.client.withdraw(""))
        if self.config.workers == "external":
            return
        if self.config.workers:
            self._workers = [self._start_worker() for _ in range(self.config.workers)]
        else:
            self._runner = asyncio.run_coroutine_threadsafe(self._run_agents(), self._agents.loop)

    @property
    def address(self) -> tuple[str, str]:
        """URL and key of the Lightning server."""
        if self.server is not None:
            return self.server.url, self.server.key
        key = os.environ.get("AGL_KEY")
        if not key:
            raise ConfigError(f"server_url={self.config.server_url!r} needs that server's key in AGL_KEY")
        assert self.config.server_url is not None
        return self.config.server_url, key

    def _refuse_busy_server(self) -> None:
        """A server serves one policy: a second run would answer the first one's agents with its own.

        Raises:
            ConfigError: another run's backend answers.
        """
        state = self._serving.run(self.client.policy())
        if state is None or state.upstream == self.backend.url:
            return
        import httpx2

        try:
            answer = httpx2.get(f"{state.upstream}/health", timeout=5.0, trust_env=False)
        except httpx2.TransportError:
            return  # that run is over
        if answer.is_success:
            raise ConfigError(
                f"server_url={self.config.server_url!r}: that server serves another run, whose backend is alive "
                f"(policy version {state.version}); wait for its end, or start a second `agl serve` with another --home"
            )

    async def _run_agents(self) -> None:
        async with LightningClient(*self.address) as client:
            factory = plugins.runners().find("asyncio")
            runner: AsyncRunner = factory(
                self.agent, client, concurrency=self.config.concurrency, timeout=self.config.rollout_timeout
            )
            await runner.run()

    def _start_worker(self) -> subprocess.Popen[bytes]:
        url, key = self.address
        command = [sys.executable, "-m", "agl", "worker", agent_path(self.agent), "--url", url]
        command += ["--concurrency", str(self.config.concurrency), "--timeout", str(self.config.rollout_timeout)]
        environment = {**os.environ, "AGL_KEY": key, "AGL_PARENT": str(os.getpid())}
        # A worker finds the agent's module wherever this process found it.
        environment["PYTHONPATH"] = os.pathsep.join(place or os.getcwd() for place in sys.path)
        with (self._folder / "workers.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def client(self) -> LightningClient:
        """Our client; its coroutines run by `run`."""
        assert self._client is not None
        return self._client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the client or the backend and wait for it, and watch over the others meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self._serving.loop)
        while not wait([future], timeout=WATCH_SECONDS).done:
            self.check()  # the work may wait for a server that has died
        return future.result()

    def serve(self, version: int, upstream: str | None = None, *, state: Any = "serving") -> None:
        """Tell the gateway where the policy is and which version it has."""
        own = self.config.unselected
        unselected = Upstream(**own.model_dump()) if isinstance(own, Endpoint) else own
        policy = PolicyState(upstream=upstream or self.backend.url, version=version, state=state, unselected=unselected)
        self.run(self.client.set_policy(policy))

    def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Hand rollouts to whoever runs agents; those that are known already stay as they are."""
        self.run(self.client.enqueue(rollouts))

    def collect(self, rollouts: Sequence[Rollout], progress: Callable[[int, int], None]) -> list[Rollout]:
        """Wait until all enqueued rollouts of one batch have ended; they come back in the order given.

        Raises:
            StallError: none ended for ``stall_timeout`` seconds; the message says who waits for what.
        """
        ended: dict[str, Rollout] = {}
        cursor, moved = 0, time.monotonic()
        while len(ended) < len(rollouts):
            self.check()
            cursor, news = self.run(self.client.collect(rollouts[0].batch, after=cursor, wait=1.0))
            ended.update((rollout.id, rollout) for rollout in news)
            progress(len(ended), len(rollouts))
            if news:
                moved = time.monotonic()
            elif time.monotonic() - moved > self.config.stall_timeout:
                raise StallError(self._diagnose(len(ended), rollouts))
        return [ended[rollout.id] for rollout in rollouts]

    def check(self) -> None:
        """Revive what was killed; raise what ended the backend, the runner or a worker by itself."""
        self.backend.check()
        if self.server is not None:
            self.server.revive()
        if self._runner is not None and self._runner.done():
            self._runner.result()
            raise RunError("the runner has ended by itself")
        for place, worker in enumerate(self._workers):
            if worker.poll() is None:
                continue
            if worker.returncode < 0:  # by a signal, such as the kernel's when memory is short; its leases run out
                say(f"a worker process was killed (signal {-worker.returncode}); starting another")
                self._workers[place] = self._start_worker()
            else:
                tail = (self._folder / "workers.log").read_text(errors="replace")[-800:]
                raise RunError(f"a worker process died (exit {worker.returncode}); its log ends: {tail}")

    def _diagnose(self, done: int, rollouts: Sequence[Rollout]) -> str:
        waiting = [self.run(self.client.rollout(rollout.id)) for rollout in rollouts[:64]]
        unfinished = [rollout for rollout in waiting if rollout.outcome is None]
        leased = [rollout for rollout in unfinished if rollout.attempt]
        hint = (
            "no runner has taken them: is a worker running?" if not leased else "agents are running and do not return"
        )
        example = leased[0] if leased else (unfinished[0] if unfinished else rollouts[0])
        return (
            f"{done} of {len(rollouts)} rollouts ended, then none for {self.config.stall_timeout:g} s; {hint} "
            f"(for instance rollout {example.id!r}, attempt {example.attempt}, {len(example.calls)} calls so far)"
        )

    def close(self) -> None:
        """Stop what was started, in reverse order."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.kill()
        if self._runner is not None:
            self._runner.cancel()
            with suppress(TimeoutError):  # an agent blocks the loop; its thread does not keep the process alive
                self._agents.run(_settle(), CLOSE_SECONDS)
        self._serving.run(self.backend.close())
        self._serving.run(self._stack.aclose())
        if self.server is not None:
            self.server.stop()
        self._agents.close()
        self._serving.close()


async def _settle() -> None:
    """Let cancelled tasks of this loop end."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.wait(others, timeout=5) if others else None


def agent_path(agent: AgentFunction) -> str:
    """How a worker process finds this function.

    Raises:
        ConfigError: it has no name at the top of a module.
    """
    name, module = getattr(agent, "__qualname__", "<"), getattr(agent, "__module__", "")
    if "<" in name or "." in name:
        raise ConfigError(f"workers= needs an agent function at the top of a module, not {agent!r}")
    if module == "__main__":
        return f"{sys.modules['__main__'].__file__}:{name}"
    return f"{module}:{name}"

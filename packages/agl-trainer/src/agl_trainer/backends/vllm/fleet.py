"""All replicas: who answers a call, who is dead, and how it comes back with the present weights."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2

from agl.errors import BackendError
from agl_trainer.backends.vllm.replica import Replica
from agl_trainer.backends.vllm.weights import Weights
from agl_trainer.progress import say

WATCH_SECONDS = 0.25
DYING_SECONDS = 10.0
"""A server that does not answer is given so long before it is ended."""
SLACK = 8
"""A rollout stays with its replica, for the prefix cache, until that has so many more calls than another."""
REMEMBERED = 100_000
"""Rollouts whose replica is remembered."""
FUTILE_STARTS = 3
"""A server that dies so often without answering a single call is not started again."""


class Fleet:
    """Keeps replicas alive and at one version, and gives them out."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        start: Callable[[Replica, Weights], None],
        prove: Callable[[Replica], Any],
        limit: float,
    ) -> None:
        """Prepare.

        Args:
            replicas: not started yet.
            start: starts the server of a replica of our own with these weights.
            prove: a coroutine function that raises when a replica serves other weights than the last canary saw.
            limit: seconds that a start may take.
        """
        self.replicas = replicas
        self.weights: Weights | None = None
        """What all are to serve."""
        self.failure: BackendError | None = None
        """What ended the backend."""
        self.restarts = 0
        self._futile = 0
        self._start = start
        self._prove = prove
        self._limit = limit
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._changed = asyncio.Condition()
        self._updating = asyncio.Lock()
        """Held while weights change, and while a replica that comes back takes the present ones."""
        self._keepers: list[asyncio.Task[None]] = []

    async def open(self, weights: Weights) -> None:
        """Start everything, with these weights."""
        self.weights = weights
        for replica in self.replicas:
            if replica.server is not None:
                self._start(replica, weights)
        for replica in self.replicas:
            await self._bring_up(replica)
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]

    async def update(self, weights: Weights) -> None:
        """New weights for all; one that is down takes them when it comes back."""
        async with self._updating:
            self.weights = weights
            present = [replica for replica in self.replicas if replica.state == "serving"]
            for replica in present:
                replica.state = "updating"
            await asyncio.gather(*(self._take(replica, weights) for replica in present))
        await self._tell()

    async def _take(self, replica: Replica, weights: Weights) -> None:
        try:
            await replica.take(weights, whole=not weights.adapters)
        except (httpx2.TransportError, BackendError):
            if await replica.alive():
                raise  # its engine is well, so it is the weights that are wrong
            replica.state = "down"  # it takes them when it is back
        else:
            replica.state = "serving"

    # ------------------------------------------------------------------------------------------ who answers

    @asynccontextmanager
    async def replica(self, rollout: str) -> AsyncGenerator[Replica]:
        """A replica that serves, for one call; waits until there is one."""
        chosen = await self._choose(rollout)
        chosen.calls += 1
        try:
            yield chosen
        finally:
            chosen.calls -= 1

    async def serving(self) -> list[Replica]:
        """All that serve; waits until there is one.

        Raises:
            BackendError: there will be none.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.failure or self._present())
        self.check()
        return self._present()

    def check(self) -> None:
        """Raise what ended the backend by itself."""
        if self.failure is not None:
            raise self.failure

    def suspect(self, replica: Replica) -> None:
        """It broke off a call: nobody is sent there until its keeper has looked after it."""
        if replica.state == "serving":
            replica.state = "down"

    def _present(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "serving"]

    async def _choose(self, rollout: str) -> Replica:
        present = await self.serving()
        least = min(present, key=lambda replica: replica.calls)
        home = self._homes.get(rollout)
        chosen = home if home in present and home.calls <= least.calls + SLACK else least
        if rollout:
            self._homes[rollout] = chosen
            self._homes.move_to_end(rollout)
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return chosen

    # ------------------------------------------------------------------------------------------- who is dead

    async def _keep(self, replica: Replica) -> None:
        """Bring a replica back whenever it is lost."""
        try:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                died = replica.server is not None and replica.server.exit_code is not None
                if died or replica.state == "down":
                    with suppress(httpx2.TransportError):  # it died once more; it is still down
                        await self._recover(replica)
        except BackendError as error:
            self.failure = error
            await self._tell()

    async def _recover(self, replica: Replica) -> None:
        replica.state = "down"
        if replica.server is None:
            say(f"a call to vLLM at {replica.name} broke off; waiting until it answers")
        elif not await self._still_lives(replica):
            say(f"vLLM {replica.name} died (exit {replica.server.exit_code}); starting it again")
            await replica.server.stop()
            self._count(replica)
            assert self.weights is not None
            self._start(replica, self.weights)
        await self._bring_up(replica)

    async def _still_lives(self, replica: Replica) -> bool:
        """A broken connection alone is no death; a server whose engine is dead ends by itself, or is ended."""
        assert replica.server is not None
        for _ in range(int(DYING_SECONDS / WATCH_SECONDS)):
            if replica.server.exit_code is not None:
                return False
            if await replica.alive():
                return True
            await asyncio.sleep(WATCH_SECONDS)
        return False

    def _count(self, replica: Replica) -> None:
        self.restarts += 1
        self._futile = 0 if replica.answered else self._futile + 1
        replica.answered = 0
        if self._futile >= FUTILE_STARTS:
            assert replica.server is not None
            raise BackendError(
                f"vLLM {replica.name} died {self._futile} times and answered no call in between; its log "
                f"{replica.server.log} ends: {replica.server.tail()}"
            )

    async def _bring_up(self, replica: Replica) -> None:
        """Wait for a replica, and let it serve once it has the present weights."""
        await replica.wait(self._limit)
        if replica.server is None:
            await replica.check_settings()
        async with self._updating:
            weights, loaded = self.weights, replica.loading
            assert weights is not None
            fresh = replica.server is not None and loaded is not None
            if replica.version != weights.version or fresh or await replica.told_version() != weights.version:
                whole = not fresh or (loaded is not None and loaded.folder != weights.folder)
                if whole or weights.adapters:
                    await replica.take(weights, whole=whole)
                else:
                    await replica.call_it(weights.version)
            replica.loading = None
            await self._prove(replica)
            replica.state = "serving"
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """Stop watching, then stop everything."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        self.failure = self.failure or BackendError("the backend was stopped")
        await self._tell()

"""The rollout queue: the store's, plus waiting, waking and leases that run out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agl import wire
from agl.errors import UsageError
from agl.records import Lease, Rollout
from agl.selection import Selection
from agl_server.auth import Keys
from agl_server.http import Refused, log, retry_after
from agl_server.store import ServerStore

MOST_WAITING = 100_000
"""Rollouts that may wait at once; more are refused until some are leased."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,199}")
"""A rollout's id is part of the gateway's URL."""


class Bell:
    """Wakes everybody who waits for something to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake those who wait now."""
        self._event.set()
        self._event = asyncio.Event()

    def listen(self) -> asyncio.Event:
        """Set at the next ring. Take it before you look, so that no ring in between is missed."""
        return self._event


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """An attempt that runs, as the gateway needs it."""

    rollout: Rollout
    attempt: int
    selection: Selection


class Queue:
    """Gives out rollouts and takes them back."""

    def __init__(self, store: ServerStore, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._enqueued = Bell()
        self._ended = Bell()
        self._live: dict[tuple[str, int], LiveAttempt] = {}
        self._closing = False

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts.

        Raises:
            UsageError: an id does not fit into a URL, or ``optimize`` selects nobody.
            Refused: too many wait already.
        """
        for index, rollout in enumerate(rollouts):
            if not NAME.fullmatch(rollout.id):
                raise wire.FieldError(
                    f"rollouts.{index}.id", f"rollout id {wire.shorten(rollout.id)}: use letters, digits and ._:@+-"
                )
            if rollout.max_attempts < 1:
                raise wire.FieldError(f"rollouts.{index}.max_attempts", f"{rollout.max_attempts!r} is less than 1")
            try:
                Selection(rollout.optimize)
            except UsageError as error:
                raise wire.FieldError(f"rollouts.{index}.optimize", str(error)) from error
        if await self._store.waiting() + len(rollouts) > MOST_WAITING:
            raise Refused(429, f"{MOST_WAITING} rollouts wait already", code="queue_full", headers=retry_after(5))
        await self._store.enqueue(rollouts)
        self._enqueued.ring()

    async def lease(self, message: wire.LeaseRequest) -> list[Lease]:
        """Up to ``limit`` rollouts; waits for the first."""
        deadline = time.monotonic() + message.wait
        while True:
            bell = self._enqueued.listen()
            await self.sweep()
            given = await self._store.lease(message.worker, message.limit, message.seconds, message.request)
            if given or not await self._heard(bell, deadline):
                return [self._lease(rollout, attempt, message.seconds) for rollout, attempt in given]

    def _lease(self, rollout: Rollout, attempt: int, seconds: float) -> Lease:
        self._live[rollout.id, attempt] = LiveAttempt(rollout, attempt, Selection(rollout.optimize))
        key = self._keys.of_attempt(rollout.id, attempt)
        return Lease(rollout=rollout, attempt=attempt, key=key, seconds=seconds)

    async def finish(self, rollout: str, attempt: int, message: wire.Finish) -> None:
        """End an attempt."""
        self._live.pop((rollout, attempt), None)
        await self._store.finish(rollout, attempt, message.outcome, message.returned, message.error)
        self._ended.ring()
        self._enqueued.ring()  # it may have to be tried again

    async def collect(self, batch: str, after: int, limit: int, wait: float) -> wire.Collected:
        """Ended rollouts after a cursor; waits for the first."""
        deadline = time.monotonic() + wait
        while True:
            bell = self._ended.listen()
            cursor, rollouts = await self._store.finished(batch, after, limit)
            if rollouts or not await self._heard(bell, deadline):
                return wire.Collected(cursor=cursor, rollouts=tuple(rollouts))

    async def live(self, rollout: str, attempt: int) -> LiveAttempt:
        """The attempt, if it runs. A hint that saves work: the store has the last word when a call is kept.

        Raises:
            StaleAttempt: it does not run, or no longer.
        """
        found = self._live.get((rollout, attempt))
        if found is None:
            record = await self._store.running(rollout, attempt)
            found = LiveAttempt(record, attempt, Selection(record.optimize))
            self._live[rollout, attempt] = found
        return found

    async def sweep(self) -> None:
        """Take back leases that ran out."""
        released = await self._store.release_expired()
        for one in released:
            self._live.pop((one.rollout, one.attempt), None)
            log.warning("attempt %d of rollout %s: the lease ran out", one.attempt, one.rollout)
        if any(one.ended for one in released):
            self._ended.ring()
        if not all(one.ended for one in released):
            self._enqueued.ring()

    async def withdraw(self, prefix: str) -> None:
        """Take unfinished rollouts of these batches out of the queue, until they are enqueued again."""
        for attempt in await self._store.withdraw(prefix):
            self._live.pop(attempt, None)

    def close(self) -> None:
        """Send away those who wait: the server stops."""
        self._closing = True
        self._enqueued.ring()
        self._ended.ring()

    async def _heard(self, bell: asyncio.Event, deadline: float) -> bool:
        """True when it rang before the deadline."""
        left = deadline - time.monotonic()
        if left <= 0 or self._closing:
            return False
        try:
            async with asyncio.timeout(left):
                await bell.wait()
        except TimeoutError:
            return False
        return not self._closing

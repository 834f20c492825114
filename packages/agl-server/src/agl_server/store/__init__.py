"""Durable memory of the server: what it asks of a store, beyond `agl.protocols.Store`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agl.protocols import Store
from agl.records import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """An attempt whose lease ran out."""

    rollout: str
    attempt: int
    ended: bool
    """It was the last one allowed, so the rollout has ended; otherwise it waits to be leased again."""


class ServerStore(Store, Protocol):
    """What the Lightning server needs of its store."""

    async def lease(
        self, worker: str, limit: int, seconds: float, request: str | None = None
    ) -> Sequence[tuple[Rollout, int]]:
        """As in `Store`; the same ``request`` again gives what it gave before and still runs."""
        ...

    async def release_expired(self) -> Sequence[Released]:
        """Take back every lease that ran out."""
        ...

    async def withdraw(self, prefix: str) -> Sequence[tuple[str, int]]:
        """Take every unfinished rollout of batches whose names begin so out of the queue, until enqueued again.

        Returns:
            The attempts that ran: what they still send is refused, and they count for nothing.
        """
        ...

    async def waiting(self) -> int:
        """How many rollouts wait to be leased."""
        ...

    async def running(self, rollout: str, attempt: int) -> Rollout:
        """The rollout, without calls and steps, if this attempt of it runs.

        Raises:
            StaleAttempt: it does not run, or no longer.
        """
        ...

    async def rollout(self, rollout: str) -> Rollout | None:
        """A rollout as it stands, with the calls and steps of its latest attempt."""
        ...

    async def setting(self, name: str) -> bytes | None:
        """A value that the server keeps over restarts."""
        ...

    async def set_setting(self, name: str, value: bytes) -> None:
        """Keep a value."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the store cannot write at the moment."""
        ...

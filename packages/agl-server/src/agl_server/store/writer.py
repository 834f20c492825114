"""One thread that writes: everything that waits is committed in one transaction (group commit).

A commit with ``synchronous=FULL`` waits for the disk. A hundred agents that end a call at the same moment wait for
it once, together.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agl.errors import AglError, ServerError

T = TypeVar("T")

Operation = Callable[[sqlite3.Connection], T]
"""Runs in the writer's thread, inside a transaction. It may refuse with an `AglError`, before it writes anything."""

LARGEST_BATCH = 1024


@dataclass(slots=True)
class _Request:
    operation: Operation[Any]
    future: asyncio.Future[Any]


class Writer:
    """Runs operations on one connection. Used from one event loop."""

    def __init__(self, connection: sqlite3.Connection, undo: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            connection: only this thread touches it from now on; it closes it in the end.
            undo: called in the thread after a rollback; forgets what operations kept in memory.
        """
        self.trouble: str | None = None
        self.commits = 0
        self._connection = connection
        self._undo = undo
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="agl-store", daemon=True)
        self._thread.start()

    async def run(self, operation: Operation[T]) -> T:
        """The operation's result, once it is on disk.

        Raises:
            AglError: whatever the operation refused with.
            ServerError: the disk is full (507) or the store is broken (503); nothing was written.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(_Request(operation, future))
        return await future

    async def close(self) -> None:
        """Finish what is queued, then close the connection."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        closing = False
        while not closing:
            batch: list[_Request] = []
            request = self._queue.get()
            while request is not None:
                batch.append(request)
                if len(batch) == LARGEST_BATCH or self._queue.empty():
                    break
                request = self._queue.get()
            closing = request is None
            if batch:
                outcomes = self._commit(batch)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits, and all is on disk
                    batch[0].future.get_loop().call_soon_threadsafe(_deliver, batch, outcomes)
        self._connection.close()

    def _commit(self, batch: Sequence[_Request]) -> list[tuple[Any, BaseException | None]]:
        """Result or exception of each; when the transaction fails, each is tried on its own."""
        connection = self._connection
        before = connection.total_changes
        try:
            connection.execute("BEGIN IMMEDIATE")
            outcomes = [_attempt(request.operation, connection) for request in batch]
            connection.execute("COMMIT")
        except Exception as error:
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            self._undo()
            if len(batch) > 1:
                return [outcome for request in batch for outcome in self._commit([request])]
            return [(None, self._failure(error))]
        if connection.total_changes > before:  # a commit of nothing proves nothing
            self.commits += 1
            self.trouble = None
        return outcomes

    def _failure(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.Error):
            return error
        self.trouble = f"the store cannot write: {error}"
        full = isinstance(error, sqlite3.OperationalError) and "full" in str(error)
        return ServerError(self.trouble, 507 if full else 503)


def _attempt(operation: Operation[Any], connection: sqlite3.Connection) -> tuple[Any, BaseException | None]:
    try:
        return operation(connection), None
    except AglError as refusal:
        return None, refusal


def _deliver(batch: Sequence[_Request], outcomes: Sequence[tuple[Any, BaseException | None]]) -> None:
    for request, (result, error) in zip(batch, outcomes, strict=True):
        if request.future.cancelled():
            continue
        if error is None:
            request.future.set_result(result)
        else:
            request.future.set_exception(error)

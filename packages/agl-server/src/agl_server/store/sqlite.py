"""The embedded store: one SQLite file, one connection that writes, one that reads.

A write is acknowledged after its transaction is on disk. The attempt number is the fencing token: every write
that carries one is refused once the attempt no longer runs.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agl import wire
from agl.errors import ServerError, StaleAttempt
from agl.records import Call, Choice, Outcome, Reward, Rollout, Step
from agl_server.store import Released, schema
from agl_server.store.packing import (
    BYTES_PER_ID,
    pack_ids,
    pack_logprobs,
    shared_bytes,
    unpack_ids,
    unpack_logprobs,
)
from agl_server.store.writer import Operation, Writer

T = TypeVar("T")

FINAL: set[Outcome] = {"ok", "truncated"}
"""Outcomes that end a rollout at once; after the others it is tried again while attempts are left."""

LARGEST_ANSWER = 4_000_000
"""Prompt tokens after which an answer holds no further rollout; the cursor asks for the rest."""

INSERT_CALL = """
INSERT INTO calls (
    rollout, attempt, id, call_id, agent, parent, retry, state, error, model, temperature, policy_version,
    context, started, ended, base, shared, prompt, choices, responses, logprobs
)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21
WHERE EXISTS (SELECT 1 FROM rollouts WHERE id = ?1 AND attempt = ?2 AND state = 'running')
"""

SELECT_CALLS = """
SELECT position, id, call_id, agent, parent, retry, state, error, model, temperature, policy_version,
    context, started, ended, base, shared, prompt, choices, responses, logprobs
FROM calls WHERE rollout = ? AND attempt = ? ORDER BY position
"""

SELECT_ROLLOUT = """
SELECT r.record, r.attempt, r.state, r.ended, a.outcome, a.returned, a.error
FROM rollouts r LEFT JOIN attempts a ON a.rollout = r.id AND a.attempt = r.attempt
"""


class SqliteStore:
    """`ServerStore` in one file. Used from one event loop."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open, or create.

        Args:
            path: the file; its folder is made when missing.
            clock: tells the time by which leases run out.

        Raises:
            UsageError: a newer agl wrote the file, or it is no SQLite database.
        """
        self._clock = clock
        connection = schema.open_writer(path)
        # While the server was down no heartbeat could reach it: every lease starts again.
        connection.execute("UPDATE rollouts SET expires = ? + seconds WHERE state = 'running'", (clock(),))
        self._latest: dict[tuple[str, int], dict[str, tuple[int, bytes]]] = {}
        """Of each attempt's agents the last call: its position and its tokens, which the next prompt may repeat."""
        self._reader = schema.open_reader(path)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="agl-read")
        self.writer = Writer(connection, undo=self._latest.clear)

    async def close(self) -> None:
        """Write what is queued, then close."""
        await self.writer.close()
        self._reading.shutdown()
        self._reader.close()

    @property
    def trouble(self) -> str | None:
        """Why the last commit failed, if it did."""
        return self.writer.trouble

    async def _read(self, query: Operation[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, query, self._reader)

    # ------------------------------------------------------------------------------------------------- queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts; one whose id is known already is left as it is, or waits again if it was withdrawn."""
        rows = [(r.id, r.batch, r.max_attempts, wire.encode(_plain(r))) for r in rollouts]
        statement = "INSERT OR IGNORE INTO rollouts (id, batch, max_attempts, record) VALUES (?, ?, ?, ?)"

        def operation(connection: sqlite3.Connection) -> None:
            connection.executemany(statement, rows)
            connection.executemany(
                "UPDATE rollouts SET state = 'waiting' WHERE id = ? AND state = 'withdrawn'", [row[:1] for row in rows]
            )

        await self.writer.run(operation)

    async def lease(
        self, worker: str, limit: int, seconds: float, request: str | None = None
    ) -> Sequence[tuple[Rollout, int]]:
        """Give up to ``limit`` waiting rollouts, oldest first; the same ``request`` again gives the same again."""
        rows = await self.writer.run(partial(self._lease, worker, limit, seconds, request))
        return [(replace(wire.decode(Rollout, record), attempt=attempt), attempt) for record, attempt in rows]

    def _lease(
        self, worker: str, limit: int, seconds: float, request: str | None, connection: sqlite3.Connection
    ) -> list[tuple[bytes, int]]:
        now = self._clock()
        given: list[tuple[str, bytes, int]] = []
        if request is not None:
            given = connection.execute(
                "SELECT r.id, r.record, r.attempt FROM attempts a JOIN rollouts r "
                "ON r.id = a.rollout AND r.attempt = a.attempt WHERE a.request = ? AND r.state = 'running'",
                (request,),
            ).fetchall()
        if not given:
            waiting = connection.execute(
                "SELECT id, record, attempt + 1 FROM rollouts WHERE state = 'waiting' ORDER BY position LIMIT ?",
                (limit,),
            )
            given = waiting.fetchall()
            connection.executemany(
                "INSERT INTO attempts (rollout, attempt, worker, request, leased) VALUES (?, ?, ?, ?, ?)",
                [(rollout, attempt, worker, request, now) for rollout, _, attempt in given],
            )
        connection.executemany(
            "UPDATE rollouts SET state = 'running', attempt = ?, expires = ?, seconds = ? WHERE id = ?",
            [(attempt, now + seconds, seconds, rollout) for rollout, _, attempt in given],
        )
        return [(record, attempt) for _, record, attempt in given]

    async def heartbeat(self, rollout: str, attempt: int, seconds: float) -> None:
        """Renew a lease."""

        def operation(connection: sqlite3.Connection) -> None:
            renewed = connection.execute(
                "UPDATE rollouts SET expires = ?, seconds = ? WHERE id = ? AND attempt = ? AND state = 'running'",
                (self._clock() + seconds, seconds, rollout, attempt),
            )
            if renewed.rowcount == 0:
                raise _refusal(connection, rollout, attempt)

        await self.writer.run(operation)

    async def finish(
        self, rollout: str, attempt: int, outcome: Outcome, returned: Reward | None, error: str | None
    ) -> None:
        """End an attempt; the rollout ends with it, or waits for the next attempt. Repeating it changes nothing."""
        reward = None if returned is None else wire.encode(returned)

        def operation(connection: sqlite3.Connection) -> None:
            if _runs(connection, rollout, attempt):
                self._end(connection, rollout, attempt, outcome, reward, error)
                return
            ended = connection.execute(
                "SELECT outcome, returned, error FROM attempts WHERE rollout = ? AND attempt = ?", (rollout, attempt)
            ).fetchone()
            if ended != (outcome, reward, error):
                raise _refusal(connection, rollout, attempt)

        await self.writer.run(operation)

    def _end(
        self,
        connection: sqlite3.Connection,
        rollout: str,
        attempt: int,
        outcome: Outcome,
        returned: bytes | None,
        error: str | None,
    ) -> bool:
        """End a running attempt; True when the rollout has ended with it."""
        connection.execute(
            "UPDATE attempts SET outcome = ?, returned = ?, error = ? WHERE rollout = ? AND attempt = ?",
            (outcome, returned, error, rollout, attempt),
        )
        changed = connection.execute(
            "UPDATE rollouts SET state = 'ended', expires = NULL, "
            "ended = (SELECT coalesce(max(ended), 0) + 1 FROM rollouts) "
            "WHERE id = ? AND (? OR attempt >= max_attempts)",
            (rollout, outcome in FINAL),
        )
        ended = changed.rowcount == 1
        if not ended:
            connection.execute("UPDATE rollouts SET state = 'waiting', expires = NULL WHERE id = ?", (rollout,))
        self._latest.pop((rollout, attempt), None)
        return ended

    async def release_expired(self) -> Sequence[Released]:
        """Take back every lease that ran out."""
        return await self.writer.run(self._release_expired)

    def _release_expired(self, connection: sqlite3.Connection) -> list[Released]:
        expired = connection.execute(
            "SELECT r.id, r.attempt, r.seconds, a.worker FROM rollouts r JOIN attempts a "
            "ON a.rollout = r.id AND a.attempt = r.attempt WHERE r.state = 'running' AND r.expires < ?",
            (self._clock(),),
        ).fetchall()
        released: list[Released] = []
        for rollout, attempt, seconds, worker in expired:
            error = f"the lease ran out: worker {worker!r} sent no heartbeat for {seconds:g} s"
            ended = self._end(connection, rollout, attempt, "infra_error", None, error)
            released.append(Released(rollout=rollout, attempt=attempt, ended=ended))
        return released

    async def withdraw(self, prefix: str) -> Sequence[tuple[str, int]]:
        """Take unfinished rollouts out of the queue; returns the attempts of them that ran."""
        return await self.writer.run(partial(self._withdraw, prefix))

    def _withdraw(self, prefix: str, connection: sqlite3.Connection) -> list[tuple[str, int]]:
        running = connection.execute(
            "SELECT id, attempt FROM rollouts WHERE state = 'running' AND substr(batch, 1, length(?1)) = ?1", (prefix,)
        ).fetchall()
        connection.executemany(
            "UPDATE attempts SET outcome = 'infra_error', error = 'withdrawn' WHERE rollout = ? AND attempt = ?",
            running,
        )
        # The number of the attempt stays used, but whoever withdrew it is at fault, so one more is allowed.
        connection.execute(
            "UPDATE rollouts SET max_attempts = max_attempts + (state = 'running'), state = 'withdrawn', "
            "expires = NULL WHERE state IN ('waiting', 'running') AND substr(batch, 1, length(?1)) = ?1",
            (prefix,),
        )
        for attempt in running:
            self._latest.pop(attempt, None)
        return running

    async def waiting(self) -> int:
        """How many rollouts wait to be leased."""
        query = "SELECT count(*) FROM rollouts WHERE state = 'waiting'"
        return await self._read(lambda connection: connection.execute(query).fetchone()[0])

    # ---------------------------------------------------------------------------------------- calls and steps

    async def running(self, rollout: str, attempt: int) -> Rollout:
        """The rollout, without calls and steps, if this attempt of it runs."""

        def query(connection: sqlite3.Connection) -> Rollout:
            row = connection.execute("SELECT record FROM rollouts WHERE id = ?", (rollout,)).fetchone()
            if row is None or not _runs(connection, rollout, attempt):
                raise _refusal(connection, rollout, attempt)
            return replace(wire.decode(Rollout, row[0]), attempt=attempt)

        return await self._read(query)

    async def add_call(self, call: Call) -> None:
        """Keep one finished, failed or abandoned call."""
        await self.writer.run(partial(self._add_call, call))

    def _add_call(self, call: Call, connection: sqlite3.Connection) -> None:
        prompt = pack_ids(call.prompt_ids)
        responses = [pack_ids(choice.response_ids) for choice in call.choices]
        latest = self._latest.get((call.rollout, call.attempt), {}).get(call.agent)
        base, shared = (None, 0) if latest is None else (latest[0], shared_bytes(latest[1], prompt))
        inserted = connection.execute(
            INSERT_CALL,
            (
                call.rollout,
                call.attempt,
                call.id,
                call.call_id,
                call.agent,
                call.parent,
                call.retry,
                call.state,
                call.error,
                call.model,
                call.temperature,
                call.policy_version,
                call.context,
                call.started,
                call.ended,
                base,
                shared,
                prompt[shared:],
                json.dumps([[choice.finish_reason, len(choice.response_ids)] for choice in call.choices]),
                b"".join(responses),
                b"".join(pack_logprobs(choice.logprobs) for choice in call.choices),
            ),
        )
        if inserted.rowcount == 0:
            raise _refusal(connection, call.rollout, call.attempt)
        if prompt and inserted.lastrowid is not None:
            tokens = prompt + responses[0] if responses else prompt
            self._latest.setdefault((call.rollout, call.attempt), {})[call.agent] = (inserted.lastrowid, tokens)

    async def add_steps(self, rollout: str, attempt: int, steps: Sequence[Step]) -> None:
        """Keep steps; one whose id is known already is left as it is."""
        rows = [(rollout, attempt, step.id, wire.encode(step)) for step in steps]
        statement = "INSERT OR IGNORE INTO steps (rollout, attempt, id, record) VALUES (?, ?, ?, ?)"

        def operation(connection: sqlite3.Connection) -> None:
            if not _runs(connection, rollout, attempt):
                raise _refusal(connection, rollout, attempt)
            connection.executemany(statement, rows)

        await self.writer.run(operation)

    # ------------------------------------------------------------------------------------------------ reading

    async def finished(self, batch: str, after: int, limit: int) -> tuple[int, Sequence[Rollout]]:
        """Ended rollouts of a batch in the order they ended, after a cursor; returns the new cursor as well."""

        def query(connection: sqlite3.Connection) -> tuple[int, list[Rollout]]:
            rows = connection.execute(
                f"{SELECT_ROLLOUT} WHERE r.state = 'ended' AND r.batch = ? AND r.ended > ? ORDER BY r.ended LIMIT ?",
                (batch, after, limit),
            ).fetchall()
            cursor, rollouts, tokens = after, [], 0
            for row in rows:
                rollouts.append(_whole(connection, row))
                cursor = row[3]
                tokens += sum(len(call.prompt_ids) for call in rollouts[-1].calls)
                if tokens > LARGEST_ANSWER:
                    break
            return cursor, rollouts

        return await self._read(query)

    async def rollout(self, rollout: str) -> Rollout | None:
        """A rollout as it stands, with the calls and steps of its latest attempt."""

        def query(connection: sqlite3.Connection) -> Rollout | None:
            row = connection.execute(f"{SELECT_ROLLOUT} WHERE r.id = ?", (rollout,)).fetchone()
            return None if row is None else _whole(connection, row)

        return await self._read(query)

    # ----------------------------------------------------------------------------------------------- settings

    async def setting(self, name: str) -> bytes | None:
        """A value that the server keeps over restarts."""

        def query(connection: sqlite3.Connection) -> bytes | None:
            row = connection.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
            return None if row is None else row[0]

        return await self._read(query)

    async def set_setting(self, name: str, value: bytes) -> None:
        """Keep a value."""

        def operation(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (name, value))

        await self.writer.run(operation)


def _plain(rollout: Rollout) -> Rollout:
    """Only what was asked for; what the attempts bring has tables of its own."""
    return replace(rollout, attempt=0, outcome=None, error=None, returned=None, calls=(), steps=())


def _runs(connection: sqlite3.Connection, rollout: str, attempt: int) -> bool:
    query = "SELECT 1 FROM rollouts WHERE id = ? AND attempt = ? AND state = 'running'"
    return connection.execute(query, (rollout, attempt)).fetchone() is not None


def _refusal(connection: sqlite3.Connection, rollout: str, attempt: int) -> ServerError:
    """Why this attempt may not write."""
    row = connection.execute("SELECT state, attempt FROM rollouts WHERE id = ?", (rollout,)).fetchone()
    if row is None:
        return ServerError(f"no rollout is named {rollout!r}", 404)
    state, latest = row
    if attempt > latest:
        return ServerError(f"rollout {rollout!r} has no attempt {attempt}; the latest is {latest}", 404)
    if attempt < latest:
        return StaleAttempt(f"attempt {attempt} of rollout {rollout!r} is stale: attempt {latest} owns it", 409)
    return StaleAttempt(f"attempt {attempt} of rollout {rollout!r} has ended; the rollout is {state}", 409)


def _whole(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Rollout:
    """A rollout with all that its latest attempt brought."""
    record, attempt, state, _, outcome, returned, error = row
    rollout = wire.decode(Rollout, record)
    ended = state == "ended"
    steps = connection.execute(
        "SELECT record FROM steps WHERE rollout = ? AND attempt = ? ORDER BY position", (rollout.id, attempt)
    )
    return replace(
        rollout,
        attempt=attempt,
        outcome=outcome if ended else None,
        error=error if ended else None,
        returned=wire.decode(Reward, returned) if ended and returned is not None else None,
        calls=_calls(connection, rollout.id, attempt),
        steps=tuple(wire.decode(Step, step) for (step,) in steps),
    )


def _calls(connection: sqlite3.Connection, rollout: str, attempt: int) -> tuple[Call, ...]:
    """The calls of an attempt in the order they were kept, each prompt put together again."""
    calls: list[Call] = []
    tokens: dict[int, bytes] = {}
    for row in connection.execute(SELECT_CALLS, (rollout, attempt)):
        position, base, shared, suffix, choices, responses, logprobs = row[0], *row[14:]
        prompt = suffix if base is None else tokens[base][:shared] + suffix
        sampled = _choices(json.loads(choices), responses, logprobs)
        first = len(sampled[0].response_ids) * BYTES_PER_ID if sampled else 0
        tokens[position] = prompt + responses[:first]
        identity, call_id, agent, parent, retry, state, error, model, temperature, version, *rest = row[1:14]
        context, started, ended = rest
        calls.append(
            Call(
                id=identity,
                rollout=rollout,
                attempt=attempt,
                call_id=call_id,
                agent=agent,
                parent=parent,
                retry=retry,
                state=state,
                error=error,
                model=model,
                temperature=temperature,
                policy_version=version,
                context=context,
                prompt_ids=unpack_ids(prompt),
                choices=sampled,
                started=started,
                ended=ended,
            )
        )
    return tuple(calls)


def _choices(heads: list[tuple[str | None, int]], responses: bytes, logprobs: bytes) -> tuple[Choice, ...]:
    ids, values = unpack_ids(responses), unpack_logprobs(logprobs)
    choices: list[Choice] = []
    start = 0
    for finish_reason, length in heads:
        end = start + length
        choices.append(Choice(response_ids=ids[start:end], logprobs=values[start:end], finish_reason=finish_reason))
        start = end
    return tuple(choices)

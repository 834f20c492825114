"""Run one model-written query on an SQLite file that it can read but neither change nor leave, in bounded time.

Four fences, each enough for its own kind of harm:

* the file is opened read-only (``mode=ro``);
* an authorizer admits SELECT, reading tables, and the functions listed here: no write, ATTACH, PRAGMA, transaction
  or extension gets as far as running;
* a clock stops it: the authorizer reads it while the query is prepared, the progress handler while it runs;
* limits on lengths keep one instruction, one value and one result small, so that the clock is read often.

What a query sorts or groups beyond SQLite's cache of 2 MB goes to a nameless temporary file, gone when it ends.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl.errors import UsageError
from text_to_sql.sqltext import expansions

AGGREGATES = (
    "avg count group_concat max min string_agg sum total cume_dist dense_rank first_value lag last_value lead "
    "nth_value ntile percent_rank rank row_number"
)
NUMBERS = (
    "abs acos asin atan atan2 ceil ceiling cos degrees exp floor ln log log10 log2 mod pi pow power radians random "
    "round sign sin sqrt tan trunc"
)
TEXTS = "coalesce concat concat_ws glob ifnull iif instr length like lower nullif replace substr substring typeof upper"
DATES = "current_date current_time current_timestamp date datetime julianday strftime time timediff unixepoch"
ALLOWED_FUNCTIONS = frozenset(f"{AGGREGATES} {NUMBERS} {TEXTS} {DATES}".split())
"""What a query may call; missing are those that touch files, make big values, or spin in one call (printf, trim)."""

SQL_LENGTH = 10_000
LENGTH_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 20_000,  # one value or row; Spider's longest row has 229 bytes
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: SQL_LENGTH,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
MAX_EXPANSIONS = 20_000
"""Copies of WITH tables that a query may ask for: SQLite makes them before any clock is read."""
INSTRUCTIONS_BETWEEN_CHECKS = 100
"""How many instructions of SQLite's virtual machine pass between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a query gave: rows, or an error that its author can read."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    truncated: bool = False
    """More rows were there than the caps let through."""
    error: str | None = None
    tables: frozenset[str] = field(default_factory=frozenset[str])
    """Tables of the database that the query reads, in lower case."""

    def describe(self, rows: int = 3, characters: int = 240) -> str:
        """The result in a few words for a prompt: the error, or the number of rows and the first of them."""
        if self.error is not None:
            return f"Error: {self.error}"[:characters]
        if not self.rows:
            return "no rows"
        count = f"{len(self.rows)}{'+' if self.truncated else ''} row{'s' if len(self.rows) > 1 else ''}"
        lines = [" | ".join(str(value) for value in row) for row in self.rows[:rows]]
        return "\n".join([f"{count} ({', '.join(self.columns)})", *lines])[:characters]


class Guard:
    """Decides what one query may do, and when its time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.late = False
        self.refused: str | None = None
        self.tables: set[str] = set()

    def authorize(self, action: int, first: str | None, second: str | None, *where: str | None) -> int:
        """SQLite's authorizer callback, asked for every table, column and function while a query is prepared."""
        if self.check_time():
            return sqlite3.SQLITE_DENY
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            if first and not first.lower().startswith("sqlite_"):
                self.tables.add(first.lower())
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            if second and second.lower() in ALLOWED_FUNCTIONS:
                return sqlite3.SQLITE_OK
            self.refused = self.refused or f"the function {second} is not available here"
            return sqlite3.SQLITE_DENY
        self.refused = self.refused or "only a SELECT on the tables of this database is allowed"
        return sqlite3.SQLITE_DENY

    def check_time(self) -> bool:
        """SQLite's progress callback: true stops the query."""
        self.late = self.late or time.monotonic() > self.deadline
        return self.late

    def explain(self, error: Exception) -> str:
        """Why the query failed, in words for its author."""
        if self.late:
            return f"stopped after {self.seconds:g} s; write a cheaper query"
        return self.refused or str(error)


def execute(
    database: Path, sql: str, *, seconds: float = 2.0, max_rows: int = 1_000, max_characters: int = 1_000_000
) -> Result:
    """Run one statement. Whatever is wrong with it comes back as `Result.error`, never as an exception.

    Args:
        database: the SQLite file.
        sql: what the model wrote; a second statement is an error.
        seconds: the query is stopped after this time, preparation included.
        max_rows: further rows are not fetched.
        max_characters: rows are not fetched once the values together are longer than this.

    Raises:
        UsageError: the database itself cannot be opened.
    """
    with closing(open_read_only(database)) as connection:
        if expansions(sql[:SQL_LENGTH]) > MAX_EXPANSIONS:
            return Result(error="too many nested WITH tables; write a simpler query")
        guard = Guard(seconds)
        for limit, value in LENGTH_LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(guard.authorize)
        connection.set_progress_handler(guard.check_time, INSTRUCTIONS_BETWEEN_CHECKS)
        try:
            cursor = connection.execute(sql)
            rows, truncated = fetch(cursor, max_rows, max_characters)
        # ValueError: NUL bytes and lone surrogates; Warning: two statements, on Python 3.11.
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            return Result(error=guard.explain(error), tables=frozenset(guard.tables))
        if cursor.description is None:
            return Result(error="this is no query; write a SELECT")
        columns = tuple(column[0] for column in cursor.description)
        return Result(columns, tuple(rows), truncated, tables=frozenset(guard.tables))


def open_read_only(database: Path) -> sqlite3.Connection:
    """A read-only connection; bytes that are not UTF-8 are left out of texts, as the official evaluation does."""
    try:
        connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise UsageError(f"cannot open the database {str(database)!r}: {error}; check that the file exists") from error
    connection.text_factory = lambda data: data.decode(errors="ignore")
    return connection


def fetch(cursor: sqlite3.Cursor, max_rows: int, max_characters: int) -> tuple[list[tuple[Any, ...]], bool]:
    """Rows up to both caps, and whether more were there."""
    rows: list[tuple[Any, ...]] = []
    characters = 0
    for row in cursor:
        if len(rows) == max_rows or characters > max_characters:
            return rows, True
        rows.append(row)
        characters += sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
    return rows, False

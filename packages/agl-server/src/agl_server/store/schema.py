"""The tables of the SQLite store, and the number that says which code may open them."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from agl.errors import UsageError

VERSION = 2

TABLES = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE rollouts (
    position INTEGER PRIMARY KEY,              -- order of enqueueing; a retried rollout keeps its place
    id       TEXT NOT NULL UNIQUE,
    batch    TEXT NOT NULL,
    record   BLOB NOT NULL,                    -- JSON: what was enqueued
    max_attempts INTEGER NOT NULL,
    state    TEXT NOT NULL DEFAULT 'waiting',  -- waiting, running, withdrawn, ended
    attempt  INTEGER NOT NULL DEFAULT 0,       -- the latest; the fencing token
    expires  REAL,                             -- of the lease, while running
    seconds  REAL,                             -- how long the lease was asked for
    ended    INTEGER UNIQUE                    -- order of ending: the cursor of those who collect
);
CREATE INDEX waiting ON rollouts (position) WHERE state = 'waiting';
CREATE INDEX running ON rollouts (expires) WHERE state = 'running';
CREATE INDEX ended ON rollouts (batch, ended) WHERE state = 'ended';

CREATE TABLE attempts (
    rollout  TEXT NOT NULL,
    attempt  INTEGER NOT NULL,
    worker   TEXT NOT NULL,
    request  TEXT,                             -- the lease request that it answered
    leased   REAL NOT NULL,
    outcome  TEXT,
    returned BLOB,                             -- JSON of the reward; NULL is unscored
    error    TEXT,
    PRIMARY KEY (rollout, attempt)
) WITHOUT ROWID;
CREATE INDEX requests ON attempts (request) WHERE request IS NOT NULL;

CREATE TABLE calls (
    position  INTEGER PRIMARY KEY,
    rollout   TEXT NOT NULL,
    attempt   INTEGER NOT NULL,
    id        TEXT NOT NULL,
    call_id   TEXT,
    agent     TEXT NOT NULL,
    parent    TEXT,
    retry     INTEGER NOT NULL,
    state     TEXT NOT NULL,
    error     TEXT,
    model     TEXT NOT NULL,
    temperature    REAL NOT NULL,
    policy_version INTEGER,
    context   TEXT,
    started   REAL NOT NULL,
    ended     REAL NOT NULL,
    base      INTEGER,                         -- position of the call whose tokens this prompt begins with
    shared    INTEGER NOT NULL,                -- how many bytes it takes from there
    prompt    BLOB NOT NULL,                   -- int32 token ids after the shared ones
    choices   BLOB NOT NULL,                   -- JSON: [[finish reason, tokens], ...]
    responses BLOB NOT NULL,                   -- int32 token ids of all choices
    logprobs  BLOB NOT NULL                    -- float64, one for each of them
);
CREATE INDEX calls_of ON calls (rollout, attempt);

CREATE TABLE steps (
    position INTEGER PRIMARY KEY,
    rollout  TEXT NOT NULL,
    attempt  INTEGER NOT NULL,
    id       TEXT NOT NULL,
    record   BLOB NOT NULL,                    -- JSON
    UNIQUE (rollout, attempt, id)
);
"""


def open_writer(path: Path) -> sqlite3.Connection:
    """The one connection that writes; creates the file, readable by its owner only.

    Raises:
        UsageError: a newer agl wrote the file, or it is no SQLite database.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite gives its side files the same mode
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # acknowledged means durable, even when the power fails
        connection.execute("PRAGMA busy_timeout = 5000")
        _prepare(connection, path)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise UsageError(f"cannot use {str(path)!r} as the store: {error}; give another --home") from error
    except UsageError:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; it sees what is committed."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise UsageError(
            f"{str(path)!r} has schema {found}, written by a newer agl; this one knows {VERSION}. "
            "Upgrade agl-server, or give another --home"
        )
    if found == 1:
        connection.executescript(
            f"BEGIN IMMEDIATE; ALTER TABLE calls ADD COLUMN context TEXT; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    elif found == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")

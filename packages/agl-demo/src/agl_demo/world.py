"""The demo's world: a small SQLite database, questions about it, and the SQL that answers them. All generated."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COUNTRIES = (
    *("France", "Japan", "Brazil", "Kenya", "India", "Norway", "Peru", "Egypt", "Italy", "Canada"),
    *("Chile", "China", "Cuba", "Ghana", "Greece", "Iran", "Mali", "Nepal", "Poland", "Spain"),
)
TABLES = {
    # table: (name column, number column, plural, smallest and largest number)
    "singer": ("name", "age", "singers", 18, 80),
    "city": ("name", "people", "cities", 10, 90),
    "film": ("title", "length", "films", 60, 180),
}
SCHEMA = "singer(name, age, country) city(name, people, country) film(title, length, country)"
AGGREGATES = {"highest": "max", "lowest": "min", "average": "avg"}
ROWS = 200
SECONDS = 0.5
"""Longest that a query of the model may run."""


def build_database(path: Path) -> Path:
    """Write the database: always the same rows."""
    order = random.Random(7)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        for table, (name, number, _, low, high) in TABLES.items():
            connection.execute(f"CREATE TABLE {table} ({name} TEXT, {number} INTEGER, country TEXT)")
            rows = [(f"{table} {i}", order.randint(low, high), order.choice(COUNTRIES)) for i in range(ROWS)]
            connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?)", rows)  # noqa: S608
    connection.close()
    return path


def all_tasks() -> list[dict[str, Any]]:
    """Every question with its answer in SQL."""
    tasks: list[dict[str, Any]] = []

    def add(question: str, query: str) -> None:
        tasks.append({"id": f"q{len(tasks):03d}", "question": question, "query": query})

    for table, (name, number, plural, low, high) in TABLES.items():
        for country in COUNTRIES:
            where = f"FROM {table} WHERE country = '{country}'"
            add(f"How many {plural} are from {country}?", f"SELECT count(*) {where}")
            add(f"Which {plural} are from {country}?", f"SELECT {name} {where}")
            for word, function in AGGREGATES.items():
                add(f"What is the {word} {number} of {plural} from {country}?", f"SELECT {function}({number}) {where}")
        for limit in range(low + (high - low) // 8, high, (high - low) // 8):
            add(
                f"How many {plural} have {number} over {limit}?",
                f"SELECT count(*) FROM {table} WHERE {number} > {limit}",  # noqa: S608
            )
            add(
                f"Which {plural} have {number} under {limit}?",
                f"SELECT {name} FROM {table} WHERE {number} < {limit}",  # noqa: S608
            )
    return tasks


def split(held_out: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training tasks and held-out tasks, disjoint."""
    tasks = all_tasks()
    random.Random(seed).shuffle(tasks)
    return tasks[held_out:], tasks[:held_out]


def run_query(path: Path, query: str) -> tuple[list[tuple[Any, ...]] | None, str]:
    """Rows, or None and the error text. The model's SQL may only read, and not for long."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    deadline = time.monotonic() + SECONDS
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
    try:
        return connection.execute(query).fetchmany(1000), ""
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return None, str(error)
    finally:
        connection.close()


def matches(path: Path, query: str, gold: str) -> bool:
    """The same rows, in any order."""
    rows, _ = run_query(path, query)
    expected, _ = run_query(path, gold)
    return rows is not None and expected is not None and _sorted(rows) == _sorted(expected)


def _sorted(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=repr)


def corrupt(query: str, order: random.Random) -> str:
    """A plausible mistake: another aggregate, table, country, comparison, or a column that does not exist."""
    words = query.split()
    table = words[words.index("FROM") + 1]
    other = order.choice([name for name in TABLES if name != table])
    kind = order.randrange(4)
    if kind == 0:
        return query.replace(f"FROM {table}", f"FROM {other}")
    if kind == 1:
        return query.replace("country", "nation") if "country" in query else query.replace("WHERE", "WHEN")
    if kind == 2 and "country = " in query:
        right = query.split("'")[1]
        return query.replace(right, order.choice([country for country in COUNTRIES if country != right]))
    chosen = query.split(" FROM ")[0]
    number = TABLES[table][1]
    wrong = [f"SELECT {f}" for f in ("count(*)", f"max({number})", f"min({number})", f"avg({number})")]
    return query.replace(chosen, order.choice([other for other in wrong if other != chosen]))

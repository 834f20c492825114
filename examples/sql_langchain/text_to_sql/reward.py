"""What a query earns: execution match, as Spider's official evaluation judges it, and a little for running.

The official rule compares what the gold query and the prediction return on the database:

* ``> =``, ``< =`` and ``! =`` are read as one operator; MySQL's ``YEAR(CURDATE())`` as 2020.
* By default the word DISTINCT is removed from both queries, and only a prediction's first statement counts.
* The columns may come in any order. The rows are compared as a multiset; in order when the gold contains ``order by``.
* Values are compared as Python does: 1 equals 1.0, a text equals no number, NULL equals NULL. Two empty results match.

Where the official program crashes (an empty prediction, in the default mode) or would run what we refuse (writes,
anything beyond `database.execute`'s fences) the prediction earns 0, and so does one that is no query at all, such as
a lone comment, which officially matches every gold query with an empty result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl.errors import RewardError
from text_to_sql.database import Result, execute
from text_to_sql.sqltext import first_statement, join_operators, without_distinct

Row = tuple[Any, ...]

MATCH = 1.0
"""Earned when the prediction returns what the gold query returns: the reported metric."""
EXECUTABLE = 0.1
"""Earned when the prediction runs without error and reads a table, so that a weak model has something to climb."""

CURRENT_YEAR = re.compile(r"year\s*\(\s*curdate\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def score(prediction: str, gold: str, database: Path) -> dict[str, float]:
    """The reward of one answer, in named parts that add up to at most 1.1."""
    result = execute(database, prediction)
    return {
        "match": MATCH * execution_match(prediction, gold, database),
        "executable": EXECUTABLE * (result.error is None and bool(result.tables)),
    }


def execution_match(prediction: str, gold: str, database: Path, *, keep_distinct: bool = False) -> bool:
    """Whether both queries return the same, by the official rule.

    Args:
        prediction: the SQL to judge, as the model meant it to run (no code fence).
        gold: the reference SQL.
        database: the SQLite file both run on.
        keep_distinct: the stricter official mode, in which DISTINCT counts and an empty prediction is run as it is.

    Raises:
        RewardError: the gold query does not run, so there is nothing to compare with.
    """
    expected = execute(database, prepare(gold, keep_distinct), seconds=10.0, max_rows=100_000, max_characters=10**8)
    if expected.error is not None or expected.truncated:
        reason = expected.error or "its result is too large"
        raise RewardError(f"the gold query {gold!r} cannot be run on {database.name!r}: {reason}; leave the task out")
    if keep_distinct and not prediction.strip():
        return not expected.rows  # the official program runs the empty text, which gives no rows
    # One row more than expected is enough to see a difference in length.
    got = execute(database, prepare(prediction, keep_distinct), max_rows=len(expected.rows) + 1, max_characters=10**8)
    if got.error is not None:
        return False
    return same_result(expected, got, ordered="order by" in prepare(gold, keep_distinct).lower())


def prepare(sql: str, keep_distinct: bool) -> str:
    """The text that is really run."""
    sql = join_operators(sql)
    if not keep_distinct:
        sql = without_distinct(first_statement(sql))
    return CURRENT_YEAR.sub("2020", sql)


def same_result(expected: Result, got: Result, *, ordered: bool) -> bool:
    """Whether some order of the columns (and, unless ``ordered``, of the rows) makes the results equal."""
    if not expected.rows or not got.rows:
        return len(expected.rows) == len(got.rows)
    if len(expected.rows) != len(got.rows) or len(expected.rows[0]) != len(got.rows[0]):
        return False
    if not same_row_contents(expected.rows, got.rows, ordered=ordered):
        return False
    columns, candidates = list(zip(*expected.rows, strict=True)), list(zip(*got.rows, strict=True))
    if ordered:
        return Counter(columns) == Counter(candidates)
    return columns_fit(columns, candidates)


def same_row_contents(expected: Sequence[Row], got: Sequence[Row], *, ordered: bool) -> bool:
    """The official first filter: the rows agree when the values of each are sorted by their text.

    It is stricter than it looks: 10 and 10.0 sort differently beside a 1, so a match can fail here. We keep it,
    because the verdict has to be the official one.
    """

    def contents(row: Row) -> Row:
        return tuple(sorted(row, key=lambda value: f"{value}{type(value)}"))

    first, second = [contents(row) for row in expected], [contents(row) for row in got]
    return first == second if ordered else set(first) == set(second)


def columns_fit(columns: Sequence[Row], candidates: Sequence[Row]) -> bool:
    """Whether the candidates can be put in an order in which the rows are the same multiset.

    Places one column after the other and goes back when the rows so far differ. Equal candidates are tried once,
    and a candidate must hold the same values as the column it stands for, so few orders are ever looked at.
    """
    values = [Counter(column) for column in columns]
    candidate_values = [Counter(candidate) for candidate in candidates]

    def place(done: int, placed: list[Row], free: frozenset[int]) -> bool:
        if done == len(columns):
            return True
        target = Counter(zip(*columns[: done + 1], strict=True))
        tried: set[Row] = set()
        for index in sorted(free):
            candidate = candidates[index]
            if candidate in tried or candidate_values[index] != values[done]:
                continue
            tried.add(candidate)
            order = [*placed, candidate]
            if Counter(zip(*order, strict=True)) == target and place(done + 1, order, free - {index}):
                return True
        return False

    return place(0, [], frozenset(range(len(candidates))))

"""The teacher for the supervised warm-up: what each agent should answer, made from the gold query.

Writer and rewriter are shown the gold query in one tidy style. For a share of the tasks (`MISTAKES`) the writer plays a
plausible mistake, which is not learned: it takes the graph to the checker and the rewriter, who learn from it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agl.errors import UsageError
from agl_trainer import Played
from text_to_sql.data import database_path
from text_to_sql.database import execute
from text_to_sql.reward import execution_match
from text_to_sql.schema import read_tables
from text_to_sql.sqltext import tidy

MISTAKES = 0.3
"""The share of tasks whose writer plays a mistake."""

TRIED = re.compile(r"\nQuery: (.*?)\nResult: ", re.DOTALL)
"""Where the prompts of checker and rewriter hold the query that was tried."""


def demonstrate(task: Mapping[str, Any], agent: str, prompt: str) -> str:
    """The answer to show ``agent`` for this prompt; the same for the same task and prompt."""
    gold = tidy(task["query"])
    if agent == "rewriter":
        return gold
    if agent == "writer":
        return Played(mistake(task)) if is_mistake(task) else gold
    if agent == "checker":
        tried = TRIED.findall(prompt)
        if not tried:
            raise UsageError(f"the checker's prompt holds no query: {prompt[-200:]!r}; was the template changed?")
        return "CORRECT" if execution_match(tried[-1], task["query"], database_path(task["db_id"])) else "WRONG"
    raise UsageError(f"no demonstration for agent {agent!r}; there are writer, checker and rewriter")


def is_mistake(task: Mapping[str, Any]) -> bool:
    """Whether the writer plays a mistake on this task."""
    return random.Random(f"mistake/{task['id']}").random() < MISTAKES


def mistake(task: Mapping[str, Any]) -> str:
    """A plausible wrong query for the task; the gold query where none of the changes makes it wrong.

    Half of the tasks get one that runs, for the checker to find, and half one that fails, where there is such a one.
    """
    gold, database = tidy(task["query"]), database_path(task["db_id"])
    chance = random.Random(f"which/{task['id']}")
    candidates = sorted(set(spoiled(gold, database)) - {gold})
    chance.shuffle(candidates)
    wrong = [query for query in candidates if not execution_match(query, gold, database)]
    fails = chance.random() < 0.5
    liked = (query for query in wrong if (execute(database, query).error is not None) == fails)
    return next(liked, wrong[0] if wrong else gold)


def spoiled(query: str, database: Path) -> Iterator[str]:
    """The query with one thing wrong: a name misspelt or mistaken, a condition lost, an aggregate or order turned."""
    for one, other in (("max(", "min("), ("min(", "max("), ("avg(", "sum("), ("sum(", "avg("), ("count(*)", "*")):
        yield query.replace(one, other, 1)
    for one, other in ((" DESC", ""), (" > ", " < "), (" < ", " > "), (" = ", " != "), (" AND ", " OR ")):
        yield query.replace(one, other, 1)
    yield re.sub(r" WHERE .*?(?= GROUP BY| ORDER BY|$)", "", query, count=1)
    yield re.sub(r" LIMIT \d+$", "", query)
    yield re.sub(r"^SELECT (DISTINCT )?[^()]*?,", "SELECT", query, count=1)
    tables = read_tables(database)
    for table in tables:
        pattern = re.compile(rf"\b{re.escape(table.name)}\b", re.IGNORECASE)
        if pattern.search(query):
            yield pattern.sub(f"{table.name}s", query)
            for other in tables:
                yield pattern.sub(other.name, query)
    for column in {column for table in tables for column in table.columns}:
        pattern = re.compile(rf"\b{re.escape(column)}\b", re.IGNORECASE)
        if pattern.search(query):
            yield pattern.sub(column.replace("_", "") if "_" in column else f"{column}_name", query)

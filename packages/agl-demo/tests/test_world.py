"""The demo's world is generated, safe to query, and its questions are split without overlap."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from agl_demo.teacher import RIGHT, Teacher
from agl_demo.world import all_tasks, build_database, corrupt, matches, run_query, split


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_database(tmp_path_factory.mktemp("demo") / "shop.sqlite")


def test_the_database_is_always_the_same(database: Path, tmp_path: Path) -> None:
    query = "SELECT * FROM singer"
    assert run_query(build_database(tmp_path / "again.sqlite"), query) == run_query(database, query)


def test_every_question_has_an_answer_that_runs(database: Path) -> None:
    for task in all_tasks():
        rows, error = run_query(database, task["query"])
        assert rows, (task, error)
        assert matches(database, task["query"], task["query"])


def test_held_out_questions_are_not_trained_on() -> None:
    train, held_out = split(64, 0)
    assert len(held_out) == 64
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}
    assert len(train) + len(held_out) == len(all_tasks())


def test_corrupted_queries_are_nearly_always_wrong(database: Path) -> None:
    order = random.Random(0)
    tasks = all_tasks()
    right = sum(matches(database, corrupt(task["query"], order), task["query"]) for task in tasks)
    assert right < 0.05 * len(tasks)


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE singer",
        "DELETE FROM singer",
        "INSERT INTO singer VALUES ('x', 1, 'y')",
        "ATTACH DATABASE ':memory:' AS other",
        "PRAGMA writable_schema = 1",
        "CREATE TABLE t (x)",
        "SELECT 1; DROP TABLE singer",
        "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t",
        "SELECT count(*) FROM singer a, singer b, singer c, singer d",
        "SELECT zeroblob(1000000000)",
        "SELECT load_extension('x')",
        "\x00",
        "",
    ],
)
def test_a_hostile_query_ends_soon_and_changes_nothing(database: Path, query: str) -> None:
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    run_query(database, query)
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before


def test_the_teacher_is_right_as_often_as_it_says_and_repeats_itself() -> None:
    tasks, teacher = all_tasks(), Teacher(seed=0)
    answers = [teacher(task, "writer", "prompt") for task in tasks]
    assert answers == [Teacher(seed=0)(task, "writer", "prompt") for task in tasks]
    right = sum(answer == task["query"] for answer, task in zip(answers, tasks, strict=True)) / len(tasks)
    assert abs(right - RIGHT) < 0.1
    assert teacher(tasks[0], "checker", f"x {tasks[0]['query']} y") == "CORRECT"
    assert teacher(tasks[0], "checker", "x SELECT 1 y") == "WRONG"

"""Tasks: read them, name them, and draw them in an order that the seed alone decides."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl.errors import UsageError
from agl.records import Task


def read_tasks(source: str | Path | Sequence[Mapping[str, Any]]) -> list[Task]:
    """Tasks from a list of mappings or a JSONL file.

    A mapping without ``id`` gets one made from its content.

    Raises:
        UsageError: no tasks, a task that is not a JSON object, or two tasks with one id.
    """
    if not isinstance(source, (str, Path, Iterable)):
        raise UsageError(f"tasks are {source!r}; give a list of JSON objects, or a JSONL file of them")
    rows = _read_lines(Path(source)) if isinstance(source, (str, Path)) else list(source)
    if not rows:
        raise UsageError(f"no tasks in {source!r}")
    tasks: dict[str, Task] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UsageError(f"task {place} is {row!r}; a task is a JSON object")
        content = _as_json(row, place)
        name = _content_id(content) if row.get("id") is None else str(row["id"])
        if name in tasks:
            raise UsageError(f"two tasks have the id {name!r} (the second is number {place})")
        tasks[name] = Task(id=name, data=row)
    return list(tasks.values())


def _read_lines(path: Path) -> list[Any]:
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r} with tasks")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):  # only that ends a line: strings hold the others
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{path}:{number} is not JSON: {error}") from error
    return rows


def _as_json(row: Mapping[str, Any], place: int) -> bytes:
    """What travels to the agents; a set, a date or NaN would arrive as something else, or not at all."""
    try:
        return json.dumps(dict(row), sort_keys=True, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"task {place} does not fit into JSON: {error}") from error


def _content_id(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def fingerprint(tasks: Sequence[Task], eval_tasks: Sequence[Task], warmup: Any) -> dict[str, Any]:
    """What a resumed run must have the same of, besides its settings: the content of tasks, and of the warm-up."""
    content = {"tasks": tasks, "eval_tasks": eval_tasks}
    marks: dict[str, Any] = {
        name: _content_id(json.dumps([[task.id, dict(task.data)] for task in some], sort_keys=True).encode())
        for name, some in content.items()
    }
    if warmup is not None:
        own = _content_id(json.dumps(list(map(dict, warmup.tasks or [])), sort_keys=True, default=str).encode())
        agents = None if warmup.agents is None else list(warmup.agents)
        marks["warmup"] = [warmup.steps, warmup.batch, warmup.learning_rate, agents, own]
    return marks


def epochs(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """All tasks in a new order each time round, for ever."""
    order = random.Random(seed)
    while True:
        yield from order.sample(list(tasks), len(tasks))

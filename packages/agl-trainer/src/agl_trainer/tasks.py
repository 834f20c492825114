"""Tasks: read them, name them, and draw them in an order that the seed alone decides."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl.errors import UsageError
from agl.records import Task


def read_tasks(source: str | Path | Sequence[Mapping[str, Any]]) -> list[Task]:
    """Tasks from a list of mappings or a JSONL file.

    A mapping without ``id`` gets one made from its content.

    Raises:
        UsageError: no tasks, a line that is not a JSON object, or two tasks with one id.
    """
    rows = _read_lines(Path(source)) if isinstance(source, (str, Path)) else list(source)
    if not rows:
        raise UsageError(f"no tasks in {source!r}")
    tasks: dict[str, Task] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UsageError(f"task {place} is {row!r}; a task is a JSON object")
        name = str(row["id"]) if "id" in row else _content_id(row)
        if name in tasks:
            raise UsageError(f"two tasks have the id {name!r} (the second is number {place})")
        tasks[name] = Task(id=name, data=row)
    return list(tasks.values())


def _read_lines(path: Path) -> list[Any]:
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r} with tasks")
    rows: list[Any] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{path}:{number} is not JSON: {error}") from error
    return rows


def _content_id(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def epochs(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """All tasks in a new order each time round, for ever."""
    order = random.Random(seed)
    while True:
        yield from order.sample(list(tasks), len(tasks))

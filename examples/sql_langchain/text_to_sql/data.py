"""Spider's questions and databases: from the project's prepared copy, or from the user's own Spider folder.

* Prepared (``AGL_DATA``, else ``../shared/data`` beside the repository): ``sql/{train,train_small,val}.jsonl`` and
  ``sql/database/<db_id>.sqlite``.
* Your own (``AGL_SPIDER_DIR``): the official release, unpacked; it holds ``database/<db_id>/<db_id>.sqlite``. The
  questions are read from ``train_spider.json`` and ``dev.json`` beside it, or else from the Hugging Face hub.

A task is a dict with ``id``, ``db_id``, ``question`` and ``query`` (the gold SQL); it holds no path, so any worker
that has the databases can run it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from agl.errors import UsageError
from text_to_sql.schema import CHARACTERS, schema_text
from text_to_sql.sqltext import tokens

Split = Literal["train", "train_small", "val"]
Task = dict[str, Any]

HUB_ID = "xlangai/spider"
SMALL = 320
"""How many train questions ``train_small`` has."""
OFFICIAL = {"train": ("train_spider.json", "train"), "val": ("dev.json", "validation")}
"""File of the official release, and split on the hub, of each of our splits."""


def load(split: Split) -> list[Task]:
    """All tasks of a split.

    Raises:
        UsageError: no data was found; the text tells how to get them.
    """
    if split not in ("train", "train_small", "val"):
        raise UsageError(f"split={split!r}: choose 'train', 'train_small' or 'val'")
    prepared = prepared_folder()
    if prepared is not None:
        with (prepared / f"{split}.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    if split == "train_small":
        return random.Random(0).sample(load("train"), SMALL)
    return [
        {
            "id": f"spider-{'dev' if split == 'val' else 'train'}-{index}",
            "db_id": record["db_id"],
            "question": record["question"],
            "query": record["query"],
        }
        for index, record in enumerate(official_questions(split))
    ]


def official_questions(split: str) -> Iterable[Any]:
    """Records of the official release: from the user's folder, else from the Hugging Face hub."""
    name, hub_split = OFFICIAL[split]
    file = spider_folder() / name
    if file.is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"{str(file)!r} does not exist, and the questions cannot be fetched from the hub without the datasets "
            f"library: pip install datasets, or put {name} into AGL_SPIDER_DIR"
        ) from error
    return load_dataset(HUB_ID, split=hub_split)


def database_path(db_id: str) -> Path:
    """The SQLite file of a database.

    Raises:
        UsageError: it is not there.
    """
    prepared = prepared_folder()
    if prepared is not None:
        path = prepared / "database" / f"{db_id}.sqlite"
    else:
        path = spider_folder() / "database" / db_id / f"{db_id}.sqlite"
    if not path.is_file():
        raise UsageError(f"no database {db_id!r}: {str(path)!r} does not exist; is the Spider folder complete?")
    return path


def prepared_folder() -> Path | None:
    """The project's prepared copy, unless the user names a Spider folder or there is no copy."""
    if os.environ.get("AGL_SPIDER_DIR"):
        return None
    named = os.environ.get("AGL_DATA")
    folder = (Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "data") / "sql"
    return folder if folder.is_dir() else None


def spider_folder() -> Path:
    """The user's own Spider folder.

    Raises:
        UsageError: it is not named, or holds no databases; the text tells both ways to the data.
    """
    named = os.environ.get("AGL_SPIDER_DIR")
    if named and (Path(named) / "database").is_dir():
        return Path(named)
    found = f"AGL_SPIDER_DIR={named!r} has no folder 'database'" if named else "no Spider data were found"
    raise UsageError(
        f"{found}. Either set AGL_DATA to a folder with the project's prepared copy (sql/train.jsonl, "
        "sql/database/*.sqlite), or download Spider from https://yale-lily.github.io/spider, unpack it, and set "
        f"AGL_SPIDER_DIR to the folder that holds database/ (questions come from it, or from {HUB_ID} on the hub)"
    )


def curriculum(tasks: Iterable[Task], *, joins: int = 0, schema_characters: int = CHARACTERS) -> list[Task]:
    """The tasks that a very small model has a chance to learn from.

    Kept is a question whose gold query is one plain SELECT (no sub-query, no set operation) with at most ``joins``
    joins, on a database whose whole description has at most ``schema_characters``. Both are read from the query and
    the database, never from what a model does, so the choice is the same for everybody. It makes an easier
    benchmark: who evaluates on a curriculum reports the figure for all questions beside it.
    """

    def is_plain(task: Task) -> bool:
        words = [text.lower() for kind, text in tokens(task["query"]) if kind == "word"]
        return words.count("select") == 1 and words.count("join") <= joins

    def is_short(task: Task) -> bool:
        return len(schema_text(database_path(task["db_id"]), "", characters=10**6)) <= schema_characters

    return [task for task in tasks if is_plain(task) and is_short(task)]

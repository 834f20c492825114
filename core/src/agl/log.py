"""Default log plugin: every metric goes to ``metrics.jsonl`` in the run's folder, account or not."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl.hookspecs import hookimpl

NAME = "metrics.jsonl"
_run: dict[str, Any] = {}
"""``folder`` and ``version`` of the run that is going on; empty when none is."""


@hookimpl
def agl_train_start(trainer: Any) -> None:
    """Remember where this run is kept."""
    _run.update(folder=Path(trainer.folder), version=0)


@hookimpl
def agl_weights_updated(version: int) -> None:
    """Remember the policy version: every line carries it."""
    _run["version"] = version


@hookimpl
def agl_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Append one line of JSON; it is on disk at once, so a run that dies keeps its curve."""
    if "folder" in _run:
        # A broken number is null: NaN is no JSON, and the line must be readable most of all when a run goes wrong.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step, "time": round(time.time(), 3), "version": _run["version"], **numbers}
        with (_run["folder"] / NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")


def size(folder: Path) -> int:
    """Bytes that the log of a run has."""
    path = folder / NAME
    return path.stat().st_size if path.exists() else 0


def rewind(folder: Path, to: int) -> None:
    """Take back what was logged after `size` was ``to``: a run that is resumed there logs it again."""
    if (folder / NAME).exists():
        os.truncate(folder / NAME, min(to, size(folder)))


@hookimpl
def agl_train_end(trainer: Any) -> None:
    """Forget the run: what is logged from now on belongs to no folder."""
    _run.clear()

"""Default log plugin: every metric goes to ``metrics.jsonl`` in the run's folder, account or not."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agl.hookspecs import hookimpl

_folder: Path | None = None


@hookimpl
def agl_train_start(trainer: Any) -> None:
    """Remember where this run is kept."""
    global _folder
    _folder = Path(trainer.folder)


@hookimpl
def agl_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Append one line of JSON; it is flushed at once, so a run that dies keeps its curve."""
    if _folder is not None:
        with (_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": round(time.time(), 3), **metrics}) + "\n")

"""The learner: `Trainer` and `Warmup`. Heavy libraries load when a trainer is built, not on import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Before torch loads OpenMP: threads that wait for each other must give up the core. They spin by default, and beside
# agents and gateway on the same cores a decode step then takes 5 to 20 times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from agl_trainer.loop import Trainer
    from agl_trainer.session import Result
    from agl_trainer.warmup import Played, Warmup

__all__ = ["Played", "Result", "Trainer", "Warmup"]


def __getattr__(name: str) -> Any:
    import importlib

    homes = {"Trainer": "loop", "Result": "session", "Warmup": "warmup", "Played": "warmup"}
    if name not in homes:
        raise AttributeError(f"module 'agl_trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"agl_trainer.{homes[name]}"), name)

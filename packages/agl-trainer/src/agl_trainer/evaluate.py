"""Held-out evaluation: mean rewards with intervals that need no assumption about their distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agl.errors import UsageError

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval (percentile bootstrap over tasks)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Resample tasks with replacement; the seed is fixed, so the same values give the same interval."""
        if not values:
            raise UsageError("an interval needs at least one value")
        array = np.asarray(values, dtype=np.float64)
        picks = np.random.default_rng(0).integers(0, len(array), size=(RESAMPLES, len(array)))
        low, high = np.quantile(array[picks].mean(axis=1), [0.025, 0.975])
        return cls(float(array.mean()), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the agent earned on the held-out tasks."""

    name: str
    scores: Mapping[str, float]
    """Mean total reward of each task, over its scored rollouts."""
    parts: Mapping[str, float]
    """Mean of every reward part."""
    unscored: int
    """Rollouts without a reward: failed, timed out, or None returned. They are left out, not counted as 0."""

    @property
    def reward(self) -> Interval:
        """Mean over tasks."""
        return Interval.of(list(self.scores.values()))

    def gain_over(self, earlier: Evaluation) -> Interval:
        """Mean difference on the tasks that both scored; an interval above 0 is a significant gain."""
        common = [task for task in self.scores if task in earlier.scores]
        if not common:
            raise UsageError(f"no task was scored both in {earlier.name!r} and in {self.name!r}")
        return Interval.of([self.scores[task] - earlier.scores[task] for task in common])

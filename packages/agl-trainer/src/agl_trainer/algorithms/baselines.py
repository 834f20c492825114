"""Baselines over groups: pure functions on plain numbers that neither overflow nor divide by rounding errors."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from agl.errors import RewardError

ROUNDING = 1e-14
"""Rewards whose spread is smaller than this part of the largest are equal: the rest is rounding."""


def finite(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """The values themselves.

    Raises:
        RewardError: one is NaN or infinite; it is named.
    """
    for value, group in zip(values, groups, strict=True):
        if not math.isfinite(value):
            raise RewardError(
                f"reward {value!r} in group {group!r} is not finite; return a number, or None for unscored"
            )
    return list(values)


def by_group(values: Sequence[float], groups: Sequence[str]) -> Iterator[tuple[list[int], Spread]]:
    """The places and the spread of each group.

    Raises:
        RewardError: a value is NaN or infinite; it is named.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for place, _ in enumerate(finite(values, groups)):
        members[groups[place]].append(place)
    for places in members.values():
        yield places, Spread([values[place] for place in places])


class Spread:
    """Values around their mean, in units of a power of two so that no square overflows or vanishes."""

    def __init__(self, values: Sequence[float]) -> None:
        _, exponent = math.frexp(max(map(abs, values)))
        self.unit = math.ldexp(1.0, max(exponent - 1, -1022))
        small = [value / self.unit for value in values]
        mean = math.fsum(small) / len(small)
        equal = max(small) - min(small) <= ROUNDING * max(map(abs, small))
        self.centred = [0.0 if equal else value - mean for value in small]
        """Exactly 0 for a single value, and where all are equal."""

    @property
    def deviation(self) -> float:
        """The sample standard deviation (n - 1) in these units; 0 for a single value."""
        return math.sqrt(math.fsum(x * x for x in self.centred) / max(1, len(self.centred) - 1))


def times(number: float, unit: float) -> float:
    """The product; what exceeds the largest float is the largest."""
    most = sys.float_info.max
    return max(-most, min(most, number * unit))


def centred(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Each value minus the mean of its group; 0 for a group of one or of equal values."""
    result = [0.0] * len(values)
    for places, spread in by_group(values, groups):
        for place, x in zip(places, spread.centred, strict=True):
            result[place] = times(x, spread.unit)
    return result


def standardised(
    values: Sequence[float], groups: Sequence[str], scale: Literal["group", "batch"], epsilon: float
) -> list[float]:
    """`centred`, divided by the sample standard deviation of the group, or of all values, plus ``epsilon``."""
    result = [0.0] * len(values)
    whole = Spread(values) if scale == "batch" and values else None
    for places, spread in by_group(values, groups):
        other = whole or spread
        divisor = other.deviation + epsilon / other.unit
        for place, x in zip(places, spread.centred, strict=True):
            result[place] = x * (spread.unit / other.unit) / divisor if x and divisor else 0.0
    return result


def relative(
    values: Sequence[float], groups: Sequence[str], scale: Literal["group", "batch", "none"], epsilon: float
) -> list[float]:
    """GRPO's advantages: `centred` or `standardised`."""
    return centred(values, groups) if scale == "none" else standardised(values, groups, scale, epsilon)

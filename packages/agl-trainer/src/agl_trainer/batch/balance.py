"""Share the rows of a step among ranks by what they cost."""

from __future__ import annotations

from collections.abc import Sequence


def shares(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank, ascending: the longest processing time first (Graham 1969).

    The largest load is at most 4/3 - 1/(3 ranks) of the best possible.
    """
    loads = [0.0] * ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(taken[rank]), rank))
        loads[rank] += costs[index]
        taken[rank].append(index)
    return [sorted(indices) for indices in taken]

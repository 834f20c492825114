"""Prefix trees: tokens that several rows share go through the network once.

Sorted by their tokens, rows stand in the depth-first order of their prefix tree, and each shares with the tree so far
exactly what it shares with the row before it (as in a suffix array with its array of longest common prefixes, Manber
and Myers 1993). So a tree is a sorted list, and a subtree with its repeated prefix is a stretch of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agl_trainer.batch.pack import Laid, TrainRow, laid

Cost = Callable[[int, int], float]
"""``cost(length, shared)``: what it costs to compute a row of ``length`` tokens of which ``shared`` are known."""


def depth_first(rows: Sequence[TrainRow]) -> list[Laid]:
    """All rows in the order of their prefix tree, each with what it shares with the one before."""
    keys = [np.asarray(item.row.token_ids, dtype=">u4").tobytes() for item in rows]
    placed = laid(rows)
    order = sorted(range(len(rows)), key=keys.__getitem__)
    found: list[Laid] = []
    for place in order:
        row = placed[place]
        shared = common_prefix(found[-1].item.row.token_ids, row.item.row.token_ids) if found else 0
        found.append(row._replace(shared=shared))
    return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    size = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(different[0]) if len(different) else size


def subtrees(rows: Sequence[Laid], budget: int, cost: Cost, overhead: float) -> list[list[Laid]]:
    """Cut a tree into stretches that fit into micro-batches, the cheapest way there is.

    Each stretch repeats the prefix of its first row. Found by dynamic programming over the places of the cuts.

    Args:
        rows: as `depth_first` orders them.
        budget: tokens of a stretch; a single row may be longer.
        cost: of a row.
        overhead: of one more micro-batch, in the same unit.
    """
    best = [0.0]
    cut = [0]
    for stop in range(1, len(rows) + 1):
        best.append(float("inf"))
        cut.append(stop - 1)
        tokens, price = 0, overhead
        for start in range(stop - 1, -1, -1):
            length, shared = len(rows[start].item.row.token_ids), rows[start].shared
            if start < stop - 1 and tokens + length > budget:
                break  # an earlier start holds all this and more: the row before is as long as what it shares
            if best[start] + price + cost(length, 0) < best[stop]:
                best[stop] = best[start] + price + cost(length, 0)
                cut[stop] = start
            tokens += length - shared
            price += cost(length, shared)
    stretches: list[list[Laid]] = []
    stop = len(rows)
    while stop:
        stretch = list(rows[cut[stop] : stop])
        stretch[0] = stretch[0]._replace(shared=0)
        stretches.append(stretch)
        stop = cut[stop]
    return sorted(stretches, key=lambda stretch: -tokens_of(stretch))


def tokens_of(rows: Sequence[Laid]) -> int:
    """Tokens to compute."""
    return sum(len(row.item.row.token_ids) - row.shared for row in rows)

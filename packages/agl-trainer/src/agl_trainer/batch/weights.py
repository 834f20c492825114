"""How much each sampled token counts in an optimiser step.

The shares of all tokens are fixed once for the step and sum to 1, so the gradient does not depend on how rows are
split, forked, ordered or spread over micro-batches and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agl.records import Row

Aggregation = Literal["rollout", "token"]


def token_weights(rows: Sequence[Row], aggregation: Aggregation, rollouts: int | None = None) -> list[float]:
    """Share of each sampled token of every row (one number a row: all its tokens weigh the same).

    ``rollout``: mean over rollouts of the mean over that rollout's sampled tokens, whatever rows they stand in.
    ``token``: mean over all sampled tokens of the step (DAPO, arXiv 2503.14476).

    Args:
        rows: all rows of the optimiser step.
        aggregation: how token losses are averaged.
        rollouts: how many rollouts the step has, dropped ones included: a rollout that was left out because its
            advantage is zero still counts in the mean. Default: those that ``rows`` hold.
    """
    tokens = Counter[str]()
    for row in rows:
        tokens[row.rollout] += sum(row.sampled)
    if aggregation == "token":
        total = sum(tokens.values())
        return [1.0 / total if total else 0.0] * len(rows)
    count = rollouts or len(tokens)
    return [1.0 / (count * tokens[row.rollout]) if tokens[row.rollout] else 0.0 for row in rows]

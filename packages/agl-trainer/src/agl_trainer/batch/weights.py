"""How much each sampled token counts in an optimiser step.

The shares of all tokens are fixed once for the step and sum to 1, so the gradient does not depend on how rows are
split, forked, ordered or spread over micro-batches and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agl.records import Row

Aggregation = Literal["rollout", "sequence", "token", "constant"]


def token_weights(
    rows: Sequence[Row], aggregation: Aggregation, rollouts: int | None = None, length: int = 1
) -> list[list[float]]:
    """Share of each sampled token of every row, in order.

    ``rollout``: mean over rollouts of the mean over that rollout's sampled tokens, whatever rows they stand in.
    ``sequence``: mean over calls of the mean over that call's tokens (GRPO, arXiv 2402.03300; GSPO, 2507.18071).
    ``token``: mean over all sampled tokens of the step (DAPO, arXiv 2503.14476).
    ``constant``: sum over tokens, divided by rollouts times ``length`` (Dr. GRPO, arXiv 2503.20783).

    Args:
        rows: all rows of the optimiser step.
        aggregation: how token losses are averaged.
        rollouts: how many rollouts the step has, dropped ones included: a rollout that was left out because its
            advantage is zero still counts in the mean. Default: those that ``rows`` hold.
        length: of ``constant``, in tokens.
    """
    per_rollout = Counter[str]()
    per_call = Counter[tuple[str, int]]()
    for row in rows:
        for call in row.transitions:
            if call >= 0:
                per_rollout[row.rollout] += 1
                per_call[row.rollout, call] += 1
    count = rollouts or len(per_rollout)
    total = sum(per_rollout.values())

    def share(rollout: str, call: int) -> float:
        match aggregation:
            case "rollout":
                return 1.0 / (count * per_rollout[rollout])
            case "sequence":
                return 1.0 / (len(per_call) * per_call[rollout, call])
            case "token":
                return 1.0 / total
            case "constant":
                return 1.0 / (count * length)

    return [[share(row.rollout, call) for call in row.transitions if call >= 0] for row in rows]

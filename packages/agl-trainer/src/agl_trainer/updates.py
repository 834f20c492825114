"""Optimiser steps on the rows of one batch: lay them out, ask the model what the algorithm needs, step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agl.protocols import Algorithm
from agl_trainer.batch.balance import shares
from agl_trainer.batch.pack import MicroBatch, TrainRow, micro_batches
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy


def learn(
    policy: Policy, rows: Sequence[TrainRow], algorithm: Algorithm, config: TrainConfig, passes: int
) -> dict[str, float]:
    """``passes`` optimiser steps on all rows, of which each rank computes its share; returns the metrics of the last.

    Raises:
        NumericsError: too many steps in a row had no finite gradient.
    """
    own = shares([len(item.row.token_ids) for item in rows], policy.ranks.size)[policy.ranks.rank]
    batches: list[MicroBatch] = list(micro_batches([rows[place] for place in own], config.micro_batch_tokens))
    if passes > 1:  # one pass needs no extra forward: its own logprobs are the old ones
        batches = [replace(batch, old_logprobs=policy.logprobs(batch)) for batch in batches]
    metrics: dict[str, float] = {}
    for _ in range(passes):
        metrics = policy.update(batches, algorithm)
    computed = policy.ranks.gather(sum(batch.token_ids.numel() for batch in batches))
    metrics["rows"] = float(len(rows))
    metrics["tokens_computed"] = float(sum(computed))
    if len(computed) > 1:
        metrics["imbalance"] = max(computed) * len(computed) / max(1, sum(computed))  # 1 is even
    return metrics

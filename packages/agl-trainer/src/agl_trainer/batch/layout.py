"""Choose how rows are laid out, by what each layout would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agl_trainer import attention
from agl_trainer.batch import balance
from agl_trainer.batch.pack import MicroBatch, TrainRow, collate
from agl_trainer.batch.pack import micro_batches as without_sharing
from agl_trainer.batch.tree import depth_first, subtrees

Layout = Literal["auto", "tree", "packed", "padded"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a forward and backward pass costs, in multiply-adds of its linear layers.

    The factors were fitted to 30 timings (three models, ten layouts, float32, one CPU core) by ``benchmarks/costs.py``,
    which they miss by 5 % in the median and 30 % at most. They are ratios, so they hold where attention, elementwise
    work and the start of a call stand to matrix products as they do there.
    """

    weights: float
    """Of the linear layers."""
    width: float
    """Layers times hidden size."""
    attended: float
    """Layers times heads times head size: the numbers that a pair of tokens multiplies."""
    layers: int

    WIDTH = 4000.0
    """Of one number of one token's states in one layer: norms, activations, residuals."""
    PAIR = 6.0
    """Of one attended number for one pair of tokens. Multiply-adds alone would be 14 / 6."""
    CALL = 1e7
    """Of one attention call in one layer."""
    BATCH = 6e7
    """Of one more micro-batch in one layer: all its other calls."""
    SWEEP = 100.0
    """Of one more micro-batch for each weight: its gradient is written, read and added."""

    @classmethod
    def of(cls, model: Any) -> Cost:
        """Of a causal language model of transformers, with or without an adapter."""
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        decoder = attention.decoder_of(model)
        embeddings = sum(p.numel() for p in decoder.get_input_embeddings().parameters())
        weights = sum(p.numel() for p in decoder.parameters()) - embeddings
        layers = config.num_hidden_layers
        attended = float(layers * config.num_attention_heads * size)
        return cls(float(weights), float(layers * config.hidden_size), attended, layers)

    @property
    def batch(self) -> float:
        """Of one more micro-batch."""
        return self.BATCH * self.layers + self.SWEEP * self.weights

    def row(self, length: int, shared: int = 0) -> float:
        """Of a row, when the first ``shared`` tokens are there already."""
        tokens = (self.weights + self.WIDTH * self.width) * (length - shared)
        pairs = (length * (length + 1) - shared * (shared + 1)) / 2
        calls = 2 if shared else 1
        return tokens + self.PAIR * self.attended * pairs + self.CALL * self.layers * calls

    def padded(self, lengths: Sequence[int], budget: int) -> float:
        """Of rows that are padded to the longest of their micro-batch."""
        total, waiting = 0.0, sorted(lengths, reverse=True)
        while waiting:
            count = max(1, budget // waiting[0])
            filled = min(count, len(waiting))
            # One attention call for all.
            calls = self.CALL * self.layers
            total += self.batch + calls + filled * (self.row(waiting[0]) - calls)
            waiting = waiting[count:]
        return total


def micro_batches(rows: Sequence[TrainRow], budget: int, layout: Layout, model: Any) -> list[MicroBatch]:
    """The micro-batches of a step, the largest first.

    Args:
        rows: all rows of the step.
        budget: tokens that one micro-batch may hold, padding included. A longer row gets one of its own; a longer
            tree is cut into subtrees, each with the prefix it needs.
        layout: ``auto`` takes what costs least. A model whose attention cannot be told who sees whom
            (`agl_trainer.attention.sees_spans`) gets padded rows whatever is asked for.
        model: of transformers, with or without an adapter.
    """
    if not rows:
        return []
    if not attention.sees_spans(model):
        layout = "padded"
    if layout in ("packed", "padded"):
        return list(without_sharing(rows, budget, packed=layout == "packed"))
    cost = Cost.of(model)
    ordered = depth_first(rows)
    if layout == "auto":
        # A prefix of a few tokens is cheaper computed again than shared.
        ordered = [
            row if cost.row(size, row.shared) <= cost.row(size) else row._replace(shared=0)
            for row in ordered
            for size in [len(row.item.row.token_ids)]
        ]
    stretches = subtrees(ordered, budget, cost.row, cost.batch)
    if layout == "auto":
        forest = sum(
            cost.batch + sum(cost.row(len(row.item.row.token_ids), row.shared) for row in stretch)
            for stretch in stretches
        )
        if cost.padded([len(item.row.token_ids) for item in rows], budget) < forest:
            return list(without_sharing(rows, budget, packed=False))
    return [collate([stretch]) for stretch in stretches]


def counts(rows: Sequence[TrainRow], computed: int) -> dict[str, float]:
    """``tokens_asked``: of all rows; ``tokens_computed``: by all ranks; ``padding``: share of these that is none."""
    asked = sum(len(item.row.token_ids) for item in rows)
    # Only rows that share nothing are padded, so what is computed beyond them is padding.
    padding = max(0.0, 1 - asked / computed) if computed else 0.0
    return {"tokens_asked": float(asked), "tokens_computed": float(computed), "padding": padding}


def shares(rows: Sequence[TrainRow], ranks: int, layout: Layout, model: Any) -> list[list[int]]:
    """Which rows each rank computes, as their places in ascending order.

    Rows that share a prefix stay together: the depth-first order is cut into stretches whose largest cost is as small
    as can be. Where nothing is shared, rows are spread one by one.
    """
    if ranks == 1:
        return [[*range(len(rows))]]
    if layout in ("packed", "padded") or not attention.sees_spans(model):
        return balance.shares([len(item.row.token_ids) for item in rows], ranks)
    cost = Cost.of(model)
    place = {id(item): index for index, item in enumerate(rows)}
    ordered = depth_first(rows)
    sizes = [(place[id(row.item)], len(row.item.row.token_ids), row.shared) for row in ordered]

    def stretches(limit: float) -> list[list[int]]:
        found: list[list[int]] = []
        load = limit
        for index, length, shared in sizes:
            load += cost.row(length, shared)
            if load > limit:
                found.append([])
                load = cost.row(length)
            found[-1].append(index)
        return found

    most = sum(cost.row(length) for _, length, _ in sizes)
    least = 0.0
    for _ in range(40):
        limit = (least + most) / 2
        if len(stretches(limit)) > ranks:
            least = limit
        else:
            most = limit
    found = stretches(most)
    return [sorted(stretch) for stretch in found] + [[] for _ in range(ranks - len(found))]

"""Pack rows into micro-batches: several short rows share one line, and none sees another.

A micro-batch is a grid of lines ``[B, L]``. A token sees an earlier one of its line exactly when it stands inside that
one's span, ``place <= ends[earlier]``: the span of a token of a row ends with the row, the span of a token of a prefix
tree ends with its subtree. So padded, packed and tree layouts are one form, and give the same logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch

from agl.records import Row


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row with what the loss needs, one number for each sampled token (``[N]``, in order)."""

    row: Row
    advantages: Sequence[float]
    weights: Sequence[float]
    """Share of each in the step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass. N counts sampled tokens."""

    token_ids: torch.Tensor
    """``[B, L]``"""
    position_ids: torch.Tensor
    """``[B, L]``; each row counts from 0."""
    ends: torch.Tensor
    """``[B, L]``; the last place of the line that sees this token. Padding is seen by itself alone."""
    sources: torch.Tensor
    """``[N]`` flat index of the state that predicts each sampled token: the position before it."""
    targets: torch.Tensor
    """``[N]`` the sampled token ids."""
    temperatures: torch.Tensor
    """``[N]``"""
    calls: torch.Tensor
    """``[N]`` which call of the micro-batch sampled each token, from 0; a call is never split."""
    index: torch.Tensor
    """``[N]`` place of each sampled token among those of all rows of the step, in their order."""
    rollout_logprobs: torch.Tensor
    """``[N]`` as the sampler reported them."""
    advantages: torch.Tensor
    """``[N]``"""
    weights: torch.Tensor
    """``[N]``"""
    old_logprobs: torch.Tensor | None = None
    """``[N]`` at the start of the step; None when it has one pass, whose own logprobs are the old ones."""
    ref_logprobs: torch.Tensor | None = None
    """``[N]`` under the reference model, when the algorithm needs them."""
    old_values: torch.Tensor | None = None
    """``[N]`` of the critic at the start of the step, when there is one."""
    returns: torch.Tensor | None = None
    """``[N]`` what the critic should have said."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in tensors.items() if value is not None})


def micro_batches(rows: Sequence[TrainRow], budget: int, packed: bool = True) -> Iterator[MicroBatch]:
    """Group rows of similar length and pack them.

    Args:
        rows: all rows of a step; the longest comes first, so that a budget too large fails at once.
        budget: padded tokens ``B * L`` that one micro-batch may hold; a longer row gets one of its own.
        packed: False gives every row a line of its own.
    """
    first = [0, *accumulate(sum(item.row.sampled) for item in rows)]
    waiting = sorted(zip(rows, first, strict=False), key=lambda item: len(item[0].row.token_ids), reverse=True)
    while waiting:
        width = len(waiting[0][0].row.token_ids)
        lines: list[list[tuple[TrainRow, int]]] = []
        room: list[int] = []
        left: list[tuple[TrainRow, int]] = []
        for item in waiting:  # first fit, longest first
            size = len(item[0].row.token_ids)
            place = next((i for i, free in enumerate(room) if packed and free >= size), None)
            if place is not None:
                lines[place].append(item)
                room[place] -= size
            elif not lines or width * (len(lines) + 1) <= budget:
                lines.append([item])
                room.append(width - size)
            else:
                left.append(item)
        yield collate(lines, width)
        waiting = left


def collate(lines: Sequence[Sequence[tuple[TrainRow, int]]], width: int) -> MicroBatch:
    """Lay rows out in lines of ``width`` tokens; with each row stands the index of its first sampled token."""
    shape = (len(lines), width)
    token_ids, position_ids = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    ends = torch.arange(width).repeat(len(lines), 1)
    sources: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    calls: list[int] = []
    index: list[int] = []
    known: dict[tuple[str, int], int] = {}
    for line, items in enumerate(lines):
        start = 0
        for item, first in items:
            row = item.row
            end = start + len(row.token_ids)
            token_ids[line, start:end] = torch.tensor(row.token_ids)
            position_ids[line, start:end] = torch.arange(end - start)
            ends[line, start:end] = end - 1
            places = [place for place, sampled in enumerate(row.sampled) if sampled]
            sources += [line * width + start + place - 1 for place in places]
            targets += [row.token_ids[place] for place in places]
            temperatures += [row.temperatures[place] or 1.0 for place in places]
            logprobs += [row.logprobs[place] for place in places]
            advantages += item.advantages
            weights += item.weights
            calls += [known.setdefault((row.rollout, row.transitions[place]), len(known)) for place in places]
            index += range(first, first + len(places))
            start = end
    return MicroBatch(
        token_ids,
        position_ids,
        ends,
        torch.tensor(sources),
        torch.tensor(targets),
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor(calls),
        torch.tensor(index),
        *(torch.tensor(x, dtype=torch.float64) for x in (logprobs, advantages, weights)),
    )

"""Pack rows into micro-batches: several short rows share one line, and none sees another.

A micro-batch is a grid of lines ``[B, L]``. Each row keeps its own positions and attends to itself only, so packed,
padded and single rows give the same logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from agl.records import Row


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A row with what the loss needs, one number for each sampled token (``[N]``, in order)."""

    row: Row
    advantages: Sequence[float]
    weight: float
    """Share of each of its sampled tokens in the step."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward pass. N counts sampled tokens."""

    token_ids: torch.Tensor
    """``[B, L]``"""
    position_ids: torch.Tensor
    """``[B, L]``; each row counts from 0."""
    segments: torch.Tensor
    """``[B, L]``; which row a token belongs to, 0 for padding."""
    sources: torch.Tensor
    """``[N]`` flat index of the state that predicts each sampled token: the position before it."""
    targets: torch.Tensor
    """``[N]`` the sampled token ids."""
    temperatures: torch.Tensor
    """``[N]``"""
    rollout_logprobs: torch.Tensor
    """``[N]`` as the sampler reported them."""
    advantages: torch.Tensor
    """``[N]``"""
    weights: torch.Tensor
    """``[N]``"""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def micro_batches(rows: Sequence[TrainRow], budget: int, packed: bool = True) -> Iterator[MicroBatch]:
    """Group rows of similar length and pack them.

    Args:
        rows: all rows of a step; the longest comes first, so that a budget too large fails at once.
        budget: padded tokens ``B * L`` that one micro-batch may hold; a longer row gets one of its own.
        packed: False gives every row a line of its own.
    """
    waiting = sorted(rows, key=lambda item: len(item.row.token_ids), reverse=True)
    while waiting:
        width = len(waiting[0].row.token_ids)
        lines: list[list[TrainRow]] = []
        room: list[int] = []
        left: list[TrainRow] = []
        for item in waiting:  # first fit, longest first
            size = len(item.row.token_ids)
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


def collate(lines: Sequence[Sequence[TrainRow]], width: int) -> MicroBatch:
    """Lay rows out in lines of ``width`` tokens."""
    shape = (len(lines), width)
    token_ids, position_ids, segments = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    sources: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for line, items in enumerate(lines):
        start = 0
        for segment, item in enumerate(items, start=1):
            row = item.row
            end = start + len(row.token_ids)
            token_ids[line, start:end] = torch.tensor(row.token_ids)
            position_ids[line, start:end] = torch.arange(end - start)
            segments[line, start:end] = segment
            places = [place for place, sampled in enumerate(row.sampled) if sampled]
            sources += [line * width + start + place - 1 for place in places]
            targets += [row.token_ids[place] for place in places]
            temperatures += [row.temperatures[place] or 1.0 for place in places]
            logprobs += [row.logprobs[place] for place in places]
            advantages += item.advantages
            weights += [item.weight] * len(places)
            start = end
    return MicroBatch(
        token_ids,
        position_ids,
        segments,
        torch.tensor(sources),
        torch.tensor(targets),
        *(torch.tensor(x, dtype=torch.float64) for x in (temperatures, logprobs, advantages, weights)),
    )

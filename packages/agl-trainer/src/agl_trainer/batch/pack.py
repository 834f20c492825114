"""Lay rows out as tensors: padded, packed end to end, or with the prefixes they share laid only once.

A micro-batch is a grid of lines ``[B, L]``. A token sees an earlier one of its line exactly when it stands inside that
one's span, ``place <= ends[earlier]``: the span of a token of a row ends with the row, the span of a token of a prefix
tree ends with its subtree. So padded, packed and tree layouts are one form, and give the same logprobs.
`agl_trainer.batch.tree` finds the shared prefixes, `agl_trainer.batch.layout` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
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
    """``[B, L]``; each row counts from 0, so in a tree it is the depth."""
    ends: torch.Tensor
    """``[B, L]``; the last place of the line that sees this token. Padding belongs to the row before it, which cannot
    see it."""
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
    agent: str = ""
    """Whose adapter computes it; empty where all agents share their weights."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


class Laid(NamedTuple):
    """A row and where it goes."""

    item: TrainRow
    first: int
    """Place of its first sampled token among those of all rows of the step."""
    shared: int = 0
    """How many of its tokens are those of the row laid before it, and are not laid again."""


def laid(rows: Sequence[TrainRow]) -> list[Laid]:
    """The rows, each with the place of its first sampled token."""
    first = accumulate((sum(item.row.sampled) for item in rows), initial=0)
    return [Laid(item, place) for item, place in zip(rows, first, strict=False)]


def micro_batches(rows: Sequence[TrainRow], budget: int, packed: bool = True) -> Iterator[MicroBatch]:
    """Lay rows out without sharing anything.

    Args:
        rows: all rows of a step; the longest comes first, so that a budget too large fails at once.
        budget: tokens ``B * L`` that one micro-batch may hold, padding included; a longer row gets one of its own.
        packed: all rows of a micro-batch in one line, end to end; False pads each in a line of its own.
    """
    waiting = sorted(laid(rows), key=lambda row: len(row.item.row.token_ids), reverse=True)
    if not packed:
        while waiting:
            count = max(1, budget // len(waiting[0].item.row.token_ids))
            yield collate([row] for row in waiting[:count])
            waiting = waiting[count:]
        return
    bins: list[list[Laid]] = []
    room: list[int] = []
    for row in waiting:  # first fit, longest first
        size = len(row.item.row.token_ids)
        place = next((place for place, free in enumerate(room) if free >= size), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(budget)
        bins[place].append(row)
        room[place] -= size
    yield from (collate([line]) for line in bins)


def collate(lines: Iterable[Sequence[Laid]]) -> MicroBatch:
    """Tensors of lines of rows; rows that share a prefix stand one after another (depth first)."""
    lines = list(lines)
    width = max(sum(len(item.row.token_ids) - shared for item, _, shared in line) for line in lines)
    token_ids = np.zeros((len(lines), width), dtype=np.int64)
    position_ids, ends = np.zeros_like(token_ids), np.zeros_like(token_ids)
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
        end = 0
        path = np.zeros(0, dtype=np.int64)  # where in the line the tokens of the row stand
        for item, first, shared in items:
            row = item.row
            start, end = end, end + len(row.token_ids) - shared
            token_ids[line, start:end] = row.token_ids[shared:]
            position_ids[line, start:end] = np.arange(shared, len(row.token_ids))
            path = np.concatenate([path[:shared], np.arange(start, end)])
            ends[line, path] = end - 1
            places = [place for place, sampled in enumerate(row.sampled) if sampled]
            sources += (line * width + path[np.array(places, dtype=np.int64) - 1]).tolist()
            targets += [row.token_ids[place] for place in places]
            temperatures += [row.temperatures[place] or 1.0 for place in places]
            logprobs += [row.logprobs[place] for place in places]
            advantages += item.advantages
            weights += item.weights
            calls += [known.setdefault((row.rollout, row.transitions[place]), len(known)) for place in places]
            index += range(first, first + len(places))
        padding = np.arange(end, width)
        position_ids[line, end:] = len(path) + padding - end
        ends[line, path] = ends[line, end:] = width - 1
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        ends=torch.from_numpy(ends),
        sources=torch.tensor(sources),
        targets=torch.tensor(targets),
        temperatures=torch.tensor(temperatures, dtype=torch.float64),
        calls=torch.tensor(calls),
        index=torch.tensor(index),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
    )

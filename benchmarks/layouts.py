"""A forward and backward pass over the same rows, laid out in three ways: one part of ``benchmarks/learner.py``.

``calls``: every model call a row of its own, as trainers do that keep one sample for each call. ``merged``: calls that
extend one another are one row, rows packed end to end. ``tree``: whatever prefix rows share is computed once. All three
give the same loss (asserted), run in one process, and take turns; times are medians, ratios those of the medians.

The *gain* of a layout is its wall-clock speed-up over the one before it, and *of the ratio* is that gain divided by the
ratio of tokens: 1 would mean that time is proportional to tokens. It cannot be: the head must answer for the same
sampled tokens in every layout, and gradients of all weights are written once whatever the tokens.

Prediction, made before the first run from counted operations on SmolLM2-135M (106 million weights in its layers, a
head of 28 million, sampled tokens walked twice): at 256 + 8 x 64 tokens the head is 12 % of the tree's work and 4 % of
the packed rows', so at most 0.91 of the token ratio; at 1,000 + 8 x 100 at most 0.93. Attention was expected to scale
with the tokens or better, since no pair that is not seen is computed. Outcome: see ``benchmarks/results/learner.json``.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from agl.records import Row, Transition
from agl.transitions import build_rows
from agl_trainer import attention
from agl_trainer.batch.layout import micro_batches
from agl_trainer.batch.pack import MicroBatch, TrainRow
from agl_trainer.logprobs import LogprobModel
from agl_trainer.models import SMALL_MODEL, load

BUDGET = 4096
"""Tokens in a micro-batch."""


def rollout(
    name: str, order: random.Random, prompt: Sequence[int], turns: int, said: int, heard: int
) -> list[Transition]:
    """Turns that extend one another: ``said`` sampled tokens, then ``heard`` observed ones."""
    known = list(prompt)
    transitions: list[Transition] = []
    for turn in range(turns):
        answer = [order.randrange(1000, 40000) for _ in range(said)]
        transitions.append(
            Transition(
                rollout=name,
                agent="main",
                call=f"{name}/{turn}",
                prompt_ids=tuple(known),
                response_ids=tuple(answer),
                logprobs=(-10.0,) * said,
            )
        )
        known += [*answer, *(order.randrange(1000, 40000) for _ in range(heard))]
    return transitions


def group(size: int, prompt: int, turns: int, said: int, heard: int = 0) -> list[list[Transition]]:
    """Rollouts of one task."""
    order = random.Random(0)
    shared = [order.randrange(1000, 40000) for _ in range(prompt)]
    return [rollout(str(index), order, shared, turns, said, heard) for index in range(size)]


CASES: dict[str, Callable[[], list[list[Transition]]]] = {
    "8 answers of 64 to a prompt of 256": lambda: group(8, 256, 1, 64),
    "8 answers of 100 to a prompt of 1000": lambda: group(8, 1000, 1, 100),
    "2 rollouts of 10 turns (100, then 24 + 16 a turn)": lambda: group(2, 100, 10, 24, 16),
}


def train_rows(rows: Sequence[Row]) -> list[TrainRow]:
    """With advantages of both signs and equal weights."""
    count = sum(sum(row.sampled) for row in rows)
    return [
        TrainRow(row, [1.0 if int(row.rollout) % 2 else -1.0] * sum(row.sampled), [1 / count] * sum(row.sampled))
        for row in rows
    ]


def layouts(rollouts: Sequence[Sequence[Transition]], model: Any) -> dict[str, list[MicroBatch]]:
    """The micro-batches of each way."""
    merged = train_rows([row for one in rollouts for row in build_rows(one)])
    apart: list[Row] = []
    for one in rollouts:
        for index, call in enumerate(one):
            (row,) = build_rows([call])
            apart.append(replace(row, transitions=tuple(index if place == 0 else -1 for place in row.transitions)))
    return {
        "calls": micro_batches(train_rows(apart), BUDGET, "packed", model),
        "merged": micro_batches(merged, BUDGET, "packed", model),
        "tree": micro_batches(merged, BUDGET, "tree", model),
    }


def learn(module: LogprobModel, batches: Sequence[MicroBatch], autocast: bool) -> float:
    """Forward and backward; returns the loss of a policy gradient."""
    module.zero_grad()
    total = 0.0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logprobs = module(
                batch.token_ids, batch.position_ids, batch.ends, batch.sources, batch.targets, batch.temperatures
            ).logprobs
        loss = -(logprobs * (batch.advantages * batch.weights).to(logprobs.dtype)).sum()
        loss.backward()
        total += float(loss.detach())
    return total


def measure(quick: bool, with_peer: bool = True) -> dict[str, Any]:
    """Both precisions as `agl_trainer.policy` trains in them: float32 weights, computed in bfloat16 or not."""
    del with_peer
    model, _ = load(SMALL_MODEL, "float32")
    module = LogprobModel(model.eval())
    assert attention.sees_spans(model)
    results: dict[str, Any] = {}
    for case, rollouts in CASES.items():
        ways = layouts(rollouts(), model)
        if all(len(one) == 1 for one in rollouts()):
            del ways["calls"]  # the same as merged
        tokens = {way: sum(batch.token_ids.numel() for batch in batches) for way, batches in ways.items()}
        for precision in ("bfloat16", "float32"):
            half = precision == "bfloat16"
            losses = {way: learn(module, batches, half) for way, batches in ways.items()}  # and a warm-up
            first = losses["tree"]
            assert all(abs(loss - first) < (0.05 if half else 1e-4) for loss in losses.values()), losses
            wall: dict[str, list[float]] = {way: [] for way in ways}
            busy: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(1 if quick else 5):
                for way, batches in ways.items():
                    start, used = time.perf_counter(), time.process_time()
                    learn(module, batches, half)
                    wall[way].append(time.perf_counter() - start)
                    busy[way].append(time.process_time() - used)
            seconds = {way: statistics.median(times) for way, times in wall.items()}
            processor = {way: statistics.median(times) for way, times in busy.items()}
            found: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "cpu_seconds": processor}
            for slow in [way for way in ways if way != "tree"]:
                ratio = tokens[slow] / tokens["tree"]
                found[f"tree over {slow}"] = {
                    "tokens": round(ratio, 3),
                    "gain": round(seconds[slow] / seconds["tree"], 3),
                    "of the ratio": round(seconds[slow] / seconds["tree"] / ratio, 3),
                    "of the ratio, cpu": round(processor[slow] / processor["tree"] / ratio, 3),
                }
            results[f"{case}, {precision}"] = found
            print(case, precision, found, flush=True)
    return results


if __name__ == "__main__":
    measure(quick=True)

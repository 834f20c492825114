"""agl's learner, one optimiser step at a time, on the rows that a peer gets too."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from agl.records import Row, Transition
from agl.transitions import build_rows
from agl_trainer import algorithms, updates
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from peers.worker import Turns


def build(calls: list[dict[str, Any]]) -> list[TrainRow]:
    """Rows as the loop builds them; every sampled token weighs the same, as in TRL's default loss."""
    rows: list[Row] = []
    gains: list[float] = []
    for rollout, group in groupby(calls, key=lambda call: call["rollout"]):
        own = list(group)
        transitions = [
            Transition(
                rollout=rollout,
                agent="main",
                call=f"{rollout}/{place}",
                prompt_ids=tuple(call["prompt_ids"]),
                response_ids=tuple(call["response_ids"]),
                logprobs=(0.0,) * len(call["response_ids"]),
            )
            for place, call in enumerate(own)
        ]
        made = build_rows(transitions)
        rows += made
        gains += [own[0]["advantage"]] * len(made)
    weights = token_weights(rows, "token")
    return [
        TrainRow(row, [gain] * sum(row.sampled), weight) for row, gain, weight in zip(rows, gains, weights, strict=True)
    ]


def with_sampler_logprobs(policy: Policy, rows: list[TrainRow], config: TrainConfig) -> list[TrainRow]:
    """The rows as a sampler with the same arithmetic would have reported them: no importance weight differs from 1."""
    known: dict[int, float] = {}
    for batch in updates.lay_out(policy, rows, config):
        known.update(zip(batch.index.tolist(), policy.logprobs(batch).tolist(), strict=True))
    logprobs = iter([known[place] for place in range(len(known))])
    return [
        replace(item, row=replace(item.row, logprobs=tuple(next(logprobs) if s else 0.0 for s in item.row.sampled)))
        for item in rows
    ]


def main() -> None:
    """The first question says what to train on; every other asks for one step."""
    turns = Turns()
    asked = turns.question()
    torch.set_num_threads(asked["threads"])
    config = TrainConfig.of(
        model=asked["model"],
        precision=asked["precision"],
        learning_rate=asked["learning_rate"],
        micro_batch_tokens=asked["micro_batch_tokens"],
        algorithm={"name": "grpo", "aggregation": "token", "clip_high": 0.2},
    )
    policy = Policy(config)
    algorithm = algorithms.make(config.algorithm)
    rows = with_sampler_logprobs(policy, build(asked["calls"]), config)
    turns.answer({"rows": len(rows)})
    while True:
        turns.question()
        started = time.perf_counter()
        metrics = updates.learn(policy, rows, algorithm, config, passes=1)
        seconds = time.perf_counter() - started
        wanted = {name: metrics[name] for name in ("loss", "grad_norm", "tokens_computed")}
        turns.answer({"seconds": seconds, **wanted})


if __name__ == "__main__":
    main()

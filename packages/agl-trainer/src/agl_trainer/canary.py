"""The canary: the backend samples a few tokens, and the trainer's logprobs of them must be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agl.protocols import Token
from agl.records import Transition
from agl.transitions import build_rows
from agl_trainer.batch.pack import TrainRow, micro_batches
from agl_trainer.policy import Policy

TEXT = "The quick brown fox jumps over the lazy dog, and then"
TOKENS = 8
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""Mean absolute difference of logprobs between engine and trainer that rounding may cause."""


def difference(policy: Policy, agent: str, prompt: Sequence[int], tokens: Sequence[Token]) -> float:
    """Mean absolute difference between what the backend told and what the policy computes; all ranks ask together."""
    count = len(tokens)
    sampled = Transition(
        rollout="canary",
        agent="canary",
        call="canary",
        prompt_ids=tuple(prompt),
        response_ids=tuple(token.id for token in tokens),
        logprobs=tuple(token.logprob for token in tokens),
    )
    (row,) = build_rows([sampled])
    (batch,) = micro_batches([TrainRow(row, [0.0] * count, [1.0] * count)], len(row.token_ids))
    batch = replace(batch, agent=agent)
    return float((policy.logprobs(batch) - batch.rollout_logprobs).abs().mean())

"""Golden vectors of the peers: grids of rows and tokens as they have them, flat tokens as we have them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agl.protocols import LossInputs, StepTokens
from agl.records import Row
from agl_trainer.algorithms.policy_gradient import PolicyGradient
from agl_trainer.batch.weights import Aggregation, token_weights

from .conftest import tensor

UNBOUNDED = (0.0, 1e30)
"""Bounds of a correction that the peer has applied before."""


class Ledger:
    """All cases of a golden file. Every one must be entered once; none is passed over."""

    def __init__(self, folder: Path, name: str) -> None:
        golden = json.loads((folder / "vectors" / f"{name}.json").read_text())
        self.cases: list[Mapping[str, Any]] = golden["cases"]
        self.rtol: float = golden["rtol"]
        self._entered: dict[int, str] = {}

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.cases)

    def enter(self, case: Mapping[str, Any], how: str = "equal") -> None:
        """``equal``, ``differs: why`` (and our value was asserted), or ``not offered: why``."""
        assert id(case) not in self._entered
        self._entered[id(case)] = how

    def closes(self, **expected: int) -> None:
        """Every case was entered, and so many of each kind."""
        assert len(self._entered) == len(self.cases)
        found = Counter(how.split(":")[0].replace(" ", "_") for how in self._entered.values())
        assert found == Counter(expected), found


def rows_of(mask: torch.Tensor, rollouts: Sequence[str] | None = None) -> list[Row]:
    """Every row of a grid as a rollout of one call, unless the rollouts are named."""
    names = rollouts or [str(place) for place in range(len(mask))]
    return [
        Row(
            rollout=name,
            agent="a",
            token_ids=(),
            sampled=tuple(line),
            logprobs=(),
            temperatures=(),
            transitions=tuple(place if seen else -1 for seen in line),
        )
        for place, (name, line) in enumerate(zip(names, mask.bool().tolist(), strict=True))
    ]


def weights_of(mask: torch.Tensor, aggregation: Aggregation, **options: Any) -> torch.Tensor:
    """``[N]`` shares of the sampled tokens."""
    rollouts = options.pop("names", None)
    shares = token_weights(rows_of(mask, rollouts), aggregation, **options)
    return torch.tensor([share for own in shares for share in own], dtype=torch.float64)


def grid(flat: Sequence[float], mask: torch.Tensor) -> torch.Tensor:
    """Flat tokens back on their grid, 0 elsewhere."""
    result = torch.zeros_like(mask)
    result[mask.bool()] = torch.tensor(flat, dtype=mask.dtype)
    return result


def step_tokens(mask: torch.Tensor, rewards: torch.Tensor, **others: torch.Tensor) -> StepTokens:
    """Every row of a grid as an episode."""
    sampled = mask.bool()
    places = grid(range(int(sampled.sum())), mask).long()
    return StepTokens(
        rewards=rewards[sampled].tolist(),
        episodes=[line[seen].tolist() for line, seen in zip(places, sampled, strict=True)],
        **{name: value[sampled].tolist() for name, value in others.items()},
    )


def loss_of(
    algorithm: PolicyGradient,
    mask: torch.Tensor,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    *,
    rollout: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
    """Loss, its gradient on the grid, and metrics. Every row is a call and a rollout, unless there are weights."""
    sampled = mask.bool()
    variable = logprobs.clone().requires_grad_()
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand_as(mask)
    loss, metrics = algorithm.loss(
        LossInputs(
            logprobs=variable[sampled],
            old_logprobs=old[sampled],
            rollout_logprobs=(old if rollout is None else rollout)[sampled],
            advantages=wide[sampled],
            weights=weights_of(mask, algorithm.aggregation) if weights is None else weights,
            calls=sampled.nonzero()[:, 0],
            ref_logprobs=None if reference is None else reference[sampled],
        )
    )
    loss.backward()
    assert variable.grad is not None
    return loss, variable.grad, metrics


def inputs_of(case: Mapping[str, Any], *names: str) -> Iterator[torch.Tensor]:
    """Some inputs of a case as tensors."""
    return (tensor(case["inputs"][name]) for name in names)


def counts_empty_rows(mask: torch.Tensor) -> float:
    """The factor between a mean over all rows and one over rows that hold a token; a rollout without one is none."""
    return len(mask) / max(1, int(mask.bool().any(1).sum()))


def finite(number: Any) -> bool:
    """Whether a number of a golden file is one."""
    return math.isfinite(float(number))

"""Steps that were refused because a number was not finite: kept with their weights, and replayed row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agl.errors import UsageError
from agl.protocols import Algorithm
from agl.records import Row
from agl_trainer import algorithms, updates
from agl_trainer.batch.pack import TrainRow
from agl_trainer.checkpoint import save_tensors
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy

PER_TOKEN = {"token_ids": torch.int64, "sampled": torch.bool, "logprobs": torch.float64, "temperatures": torch.float64}
PER_TOKEN |= {"transitions": torch.int64}
"""Fields of a row with one number for each token."""
PER_SAMPLE = ("advantages", "weights")


@dataclass(frozen=True, slots=True)
class Culprit:
    """A row that is not finite on its own."""

    row: int
    """Its place in the step."""
    rollout: str
    agent: str
    found: str
    """Which numbers are not finite."""

    def __str__(self) -> str:
        return f"row {self.row} (rollout {self.rollout!r}, agent {self.agent!r}): {self.found}"


def dump(
    folder: Path, rows: Sequence[TrainRow], weights: Mapping[str, torch.Tensor], policy: Policy, reason: str
) -> None:
    """Keep the rows of a refused step, and the weights it was refused with.

    Args:
        folder: is made; where it exists already, what is in it is overwritten.
        rows: of the step, on all ranks.
        weights: as the step left them, whole.
        policy: tells its version and settings.
        reason: for people.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for place, item in enumerate(rows):
        for name, kind in PER_TOKEN.items():
            tensors[f"{place}/{name}"] = torch.tensor(getattr(item.row, name), dtype=kind)
        for name in PER_SAMPLE:
            tensors[f"{place}/{name}"] = torch.tensor(getattr(item, name), dtype=torch.float64)
    save_tensors(folder / "rows.safetensors", tensors)
    save_tensors(folder / "weights.safetensors", weights)
    owners = [{"rollout": item.row.rollout, "agent": item.row.agent} for item in rows]
    about = {"reason": reason, "version": policy.version, "rows": owners, "settings": policy.config.public()}
    (folder / "refused.json").write_text(json.dumps(about, indent=1))


def replay(folder: Path, algorithm: Algorithm | None = None) -> list[Culprit]:
    """Compute loss and gradient of each row of a refused step on its own, with the weights it was refused with.

    Args:
        folder: what `dump` wrote.
        algorithm: the run's, when it is not registered under a name.

    Returns:
        The rows that are not finite; none when only their sum is not.

    Raises:
        UsageError: the folder holds no refused step.
    """
    try:
        about = json.loads((folder / "refused.json").read_text())
    except OSError as error:
        raise UsageError(f"{str(folder)!r} holds no refused step: {error.strerror}") from error
    policy = Policy(TrainConfig.of(**about["settings"]))
    try:
        with torch.no_grad():
            own = policy.trained | policy.buffers
            for name, value in load_file(folder / "weights.safetensors").items():
                own[name].copy_(value)
        algorithm = algorithm or algorithms.make(policy.config.algorithm)
        culprits: list[Culprit] = []
        for place, item in enumerate(read_rows(folder, about["rows"])):
            found = _broken(policy, item, algorithm)
            if found:
                culprits.append(Culprit(place, item.row.rollout, item.row.agent, ", ".join(found)))
        return culprits
    finally:
        policy.close()


def read_rows(folder: Path, owners: Sequence[dict[str, str]]) -> list[TrainRow]:
    """The rows that `dump` wrote."""
    tensors = load_file(folder / "rows.safetensors")
    rows: list[TrainRow] = []
    for place, owner in enumerate(owners):
        fields: dict[str, Any] = {name: tuple(tensors[f"{place}/{name}"].tolist()) for name in PER_TOKEN}
        rows.append(TrainRow(Row(**owner, **fields), *(tensors[f"{place}/{name}"].tolist() for name in PER_SAMPLE)))
    return rows


def _broken(policy: Policy, item: TrainRow, algorithm: Algorithm) -> list[str]:
    """What of a row is not finite."""
    given = {name: getattr(item, name) for name in PER_SAMPLE} | {"rollout_logprobs": item.row.logprobs}
    found = [f"its {name} hold {x}" for name, values in given.items() for x in values if not math.isfinite(x)]
    batches = updates.lay_out(policy, [item], policy.config)
    logprobs = torch.cat([policy.logprobs(batch) for batch in batches])
    if strange := int((~logprobs.isfinite()).sum()):
        found.append(f"{strange} of {len(logprobs)} logprobs are not finite")
    metrics = policy.gradients(updates.estimate(policy, batches, algorithms.needs(algorithm), 1), algorithm)
    names = ("loss", "grad_norm", "critic_grad_norm")
    return found + [f"{name} is {metrics[name]}" for name in names if not math.isfinite(metrics.get(name, 0.0))]

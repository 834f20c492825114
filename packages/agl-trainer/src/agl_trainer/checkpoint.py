"""Checkpoints: all that the next step depends on, in safetensors and JSON, whole or not at all.

A checkpoint is written aside, each file and the folder forced to disk, a manifest with the hash of every file last, and
then renamed. What a crash leaves half-written has no name that is looked at; what was damaged later does not match its
manifest, and the one before it is used. Finished rollouts need no place here: the run's server keeps them.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agl.errors import RunError
from agl_trainer.policy import Policy
from agl_trainer.progress import say
from agl_trainer.sharding import fill, full

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1

MAY_CHANGE = {
    "steps", "eval_every", "checkpoint_every", "keep_checkpoints", "output_dir", "trackers", "micro_batch_tokens",
    "layout", "activation_checkpointing", "slots", "workers", "concurrency", "rollout_timeout", "stall_timeout",
    "max_attempts", "server_url",
}  # fmt: skip
"""Settings that a resumed run may have other values of; all others would make it another run."""


class DamagedCheckpoint(RunError):
    """A file of a checkpoint is missing, cut short or changed; the message names it."""


@dataclass(slots=True)
class Position:
    """Where a run stands: everything that is counted. Tasks are drawn in an order that the seed decides."""

    warmed: int = 0
    """Steps of the warm-up that are behind."""
    batches: int = 0
    """Batches of rollouts, those without a step included."""
    drawn: int = 0
    """Tasks that the sampler has given out."""
    ahead: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Batches that were begun and not trained on: number, first task, tasks."""
    steps: int = 0
    empty_steps: int = 0
    """In a row, with nothing to learn."""
    began: int = 0
    """Policy version with which reinforcement learning began."""
    evaluated: int = 0
    logged: int = 0
    """Bytes of ``metrics.jsonl``."""
    agents_seen: list[str] = field(default_factory=list[str])
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reward: float | None = None
    """Held-out reward of these very weights, where they were evaluated."""

    @property
    def done(self) -> int:
        """Steps of both kinds."""
        return self.warmed + self.steps


# ---------------------------------------------------------------------------------------------------- policy


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole values, by name, of all that learning changes. All ranks take part; rank 0 alone keeps what is gathered."""
    return _whole(policy, policy.trained | policy.buffers)


def _whole(policy: Policy, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One after the other: a device that holds shards has no room for everything at once."""
    gathered: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        whole = full(value.detach())
        if policy.ranks.leads:
            gathered[name] = whole if whole is value else whole.cpu()
    return gathered


def capture(policy: Policy) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """All state of a policy and of the random number generators: tensors for each file, and plain values.

    All ranks take part; what is sharded is gathered, and rank 0 alone keeps it.
    """
    names = {parameter: name for name, parameter in policy.trained.items()}
    moments: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, state in policy.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                moments[f"{key}/{names[parameter]}"] = value
            else:
                plain.setdefault(names[parameter], {})[key] = value
    groups = [{key: x for key, x in group.items() if key != "params"} for group in policy.optimizer.param_groups]
    generator = np.random.get_state(legacy=True)
    assert isinstance(generator, tuple)
    words = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(generator[1].astype(np.int64))}
    words |= {f"cuda{place}": state for place, state in enumerate(torch.cuda.get_rng_state_all())}
    tensors = {"weights": weights(policy), "optimizer": _whole(policy, moments), "random": words}
    values = {
        "version": policy.version,
        "bad_steps": policy.bad_steps,
        "groups": groups,
        "optimizer": plain,
        "python": random.getstate(),
        "numpy": generator[2:],
    }
    return tensors, values


def restore(policy: Policy, tensors: Mapping[str, Mapping[str, torch.Tensor]], values: Mapping[str, Any]) -> None:
    """Give a fresh policy the state that `capture` read.

    Raises:
        RunError: the checkpoint is of a model with other parameters.
    """
    own = policy.trained | policy.buffers
    if own.keys() != tensors["weights"].keys():
        odd = sorted(own.keys() ^ tensors["weights"].keys())
        raise RunError(f"the checkpoint is of another model: {odd[:3]!r} are in one of them only")
    with policy.lock, torch.no_grad():
        for name, kept in tensors["weights"].items():
            fill(own[name], kept)
    policy.collect()
    optimizer = policy.optimizer
    optimizer.state.clear()
    for name, kept in tensors["optimizer"].items():
        key, _, parameter = name.partition("/")
        value = kept
        if key != "step":  # AdamW counts on the CPU
            value = torch.zeros_like(policy.trained[parameter].detach())
            fill(value, kept)
        optimizer.state[policy.trained[parameter]][key] = value
    for name, state in values["optimizer"].items():
        optimizer.state[policy.trained[name]].update(state)
    for group, kept in zip(optimizer.param_groups, values["groups"], strict=True):
        # JSON has no tuples, of which AdamW's betas are one.
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})
    policy.version, policy.bad_steps = values["version"], values["bad_steps"]
    kind, words, gauss = values["python"]
    random.setstate((kind, tuple(words), gauss))
    np.random.set_state(("MT19937", tensors["random"]["numpy"].numpy().astype(np.uint32), *values["numpy"]))
    torch.set_rng_state(tensors["random"]["torch"])
    for place in range(torch.cuda.device_count()):
        if (state := tensors["random"].get(f"cuda{place}")) is not None:
            torch.cuda.set_rng_state(state, place)


# ----------------------------------------------------------------------------------------------------- files


def write(root: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any], name: str) -> Path:
    """Write a checkpoint ``root/name``, so that it is there whole or not at all, whenever the power fails."""
    if not root.exists():
        root.mkdir()
        to_disk(root.parent)
    for left in root.glob(".*.partial"):  # of a process that was killed while it wrote
        shutil.rmtree(left)
    aside = root / f".{name}.partial"
    aside.mkdir()
    for stem, group in tensors.items():
        save_tensors(aside / f"{stem}.safetensors", group)
    (aside / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _hash(file)} for file in sorted(aside.iterdir())}
    (aside / MANIFEST).write_text(json.dumps(files, indent=1))
    for file in (*aside.iterdir(), aside):
        to_disk(file)
    final = root / name
    if final.exists():  # of a run that was resumed from before it
        shutil.rmtree(final)
    os.rename(aside, final)
    to_disk(root)
    return final


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors from whatever device."""
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)


def verify(folder: Path) -> None:
    """Check every byte of a checkpoint.

    Raises:
        DamagedCheckpoint: it names the file that is missing, cut short or changed.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())
        entries = [(folder / name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    for file, size, digest in entries:
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(f"{file} has {file.stat().st_size} bytes instead of {size}")
        if _hash(file) != digest:
            raise DamagedCheckpoint(f"{file} was changed: its hash is not that of the manifest")
    if not {STATE, "weights.safetensors", "optimizer.safetensors", "random.safetensors"} <= files.keys():
        raise DamagedCheckpoint(f"{folder / MANIFEST} does not list all files of a checkpoint")


def read(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Tensors and state of a checkpoint that is whole (`verify`).

    Raises:
        RunError: another agl wrote it.
    """
    state = json.loads((folder / STATE).read_text())
    if state["format"] != FORMAT:
        raise RunError(f"{folder} has format {state['format']}, written by another agl; this one reads {FORMAT}")
    return {file.stem: load_file(file) for file in folder.glob("*.safetensors")}, state


def newest(root: Path) -> Path | None:
    """The newest checkpoint that is whole; None when there is none. What is passed over is said."""
    for folder in reversed(found(root)):
        try:
            verify(folder)
        except DamagedCheckpoint as damage:
            say(f"checkpoint {folder.name} is damaged and not used: {damage}")
            continue
        return folder
    return None


def found(root: Path) -> list[Path]:
    """Checkpoints in the order of their steps; none of them is half-written."""
    return sorted(path for path in root.glob("[0-9]*") if path.is_dir()) if root.is_dir() else []


def prune(root: Path, keep: int, last: Path) -> None:
    """Remove all but the last ``keep`` and the one with the best held-out reward.

    What comes after ``last``, the newest one, was damaged when the run was resumed from before it: it goes first, so
    that it takes no place of a whole one.
    """
    past = [folder for folder in found(root) if folder.name <= last.name]
    rewards: dict[Path, float] = {}
    for folder in past:
        try:
            reward = json.loads((folder / STATE).read_text())["position"]["reward"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; it goes when its time has come
        if reward is not None:
            rewards[folder] = reward
    best = max(rewards, key=lambda folder: rewards[folder], default=None)
    for folder in found(root):
        if folder not in past[-keep:] and folder != best:
            shutil.rmtree(folder)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, would survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------- settings


def differences(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs though it may not, each with both values.

    Args:
        kept: ``settings``, and what else makes the run what it is.
        now: the same of the run that wants to go on with it.
    """
    before, after = ({**run, **run["settings"]} for run in (kept, now))
    free = MAY_CHANGE if before.get("lr_schedule") == "constant" else MAY_CHANGE - {"steps"}
    names = sorted((before.keys() | after.keys()) - free - {"settings"})
    changed = [name for name in names if before.get(name) != after.get(name)]
    return [f"{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in changed]

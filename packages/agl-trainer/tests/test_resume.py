"""A run that is killed at any moment and resumed is, to the last bit, the run that was never killed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Path]

KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "full": ({}, False),
    "lora": ({"lora_rank": 4, "learning_rate": 1e-2, "checkpoint_every": 2}, False),
    "warm-up": ({"steps": 2, "epochs": 2, "checkpoint_every": 2}, True),
    "critic": ({"steps": 2, "algorithm": "ppo", "checkpoint_every": 0}, False),
}


def run(model: Path, output: Path, kind: str, *fates: dict[str, int]) -> Path:
    """Live, die at each of the fates, resume, and end; returns the run's folder."""
    settings, warm = KINDS[kind]
    order = {"model": str(model), "output": str(output), "settings": settings, "warm": warm, "fates": fates}
    output.mkdir(parents=True)
    script = Path(__file__).with_name("lives.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(order)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder,) = output.iterdir()
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was logged, without what a clock says."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "seconds", "server_restarts")} for line in read]


def weights(folder: Path) -> dict[str, bytes]:
    """Files of the trained model that hold tensors."""
    found = {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
    assert found
    return found


def rollouts(folder: Path) -> dict[str, int]:
    """Of every rollout, how many attempts ended well."""
    with sqlite3.connect(folder / "server" / "store.sqlite") as store:
        rows = store.execute(
            "SELECT r.id, sum(a.outcome = 'ok') FROM rollouts r JOIN attempts a ON a.rollout = r.id GROUP BY r.id"
        )
        return dict(rows.fetchall())


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a kind that was never killed."""
    kept: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in kept:
            kept[kind] = run(model_folder, tmp_path_factory.mktemp("whole") / "runs", kind)
        return kept[kind]

    return make


FATES: list[tuple[str, list[dict[str, int]]]] = [
    (
        "full",
        [
            {"evaluate": 1},  # before anything was done
            {"call": 3},  # in the first evaluation
            {"call": 9},
            {"rollout": 2},
            {"learn": 1},
            {"gradients end": 1},
            {"apply end": 1},  # the weights are new, and nobody knows
            {"weights end": 1},
            {"log": 1},
            {"disk": 2},  # in the checkpoint, before its manifest counts
            {"rename": 1},
            {"prune": 1},
            {"call": 7},
            {"rename end": 2},
            {"evaluate": 1},  # after the last step
            {"call": 3},
            {"save": 1},
        ],
    ),
    ("lora", [{"rollout": 11}, {"apply end": 2}, {"disk": 5}, {"call": 4}, {"weights": 2}]),
    (
        "warm-up",
        [{"demonstration": 5}, {"gradients": 1}, {"log": 3}, {"apply end": 3}, {"rename end": 1}, {"evaluate": 1}],
    ),
    ("critic", [{"gradients end": 1}, {"call": 8}, {"log": 3}]),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "fates"), FATES, ids=[kind for kind, _ in FATES])
def test_a_run_killed_at_any_moment_ends_as_if_it_never_was(
    whole: Callable[[str], Path], model_folder: Path, tmp_path: Path, kind: str, fates: list[dict[str, int]]
):
    expected, folder = whole(kind), run(model_folder, tmp_path / "runs", kind, *fates)
    assert lines(folder) == lines(expected)
    assert weights(folder) == weights(expected)
    counts = rollouts(folder)
    assert counts.keys() == rollouts(expected).keys(), "no task was lost or added"
    assert set(counts.values()) == {1}, "no finished rollout was run again"

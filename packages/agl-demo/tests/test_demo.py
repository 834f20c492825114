"""``agl demo`` learns: the command itself fails unless the held-out gain is significant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Whatever tried to leave this machine would find nobody there.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}


def run_demo(folder: Path, *options: str, environment: dict[str, str] | None = None) -> tuple[str, Path]:
    """Run the command; its output and the run's folder."""
    command = [sys.executable, "-m", "agl", "demo", "--output-dir", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"Kept in (.+):$", done.stdout, re.MULTILINE)
    assert match
    return done.stdout, Path(match[1])


def low_end_of_the_gain(output: str) -> float:
    """Lower end of the 95 % interval of the gain by reinforcement learning."""
    match = re.search(r"gain by RL +\S+ \[(\S+), ", output)
    assert match
    return float(match[1])


@pytest.mark.learns
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_tiny_demo_learns_offline(tmp_path: Path, seed: int) -> None:
    output, run = run_demo(tmp_path, "--tiny", "--seed", str(seed), environment=OFFLINE)
    print(output)
    assert low_end_of_the_gain(output) > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "eval/reward" in line][-1]["eval/unscored"] == 0
    assert (run / "model" / "config.json").is_file() and (run / "model" / "README.md").is_file()


@pytest.mark.learns
@pytest.mark.timeout(1500)
def test_the_real_demo_learns(tmp_path: Path) -> None:
    output, run = run_demo(tmp_path, "--seed", "0")
    print(output)
    assert low_end_of_the_gain(output) > 0
    assert (run / "model" / "adapter_config.json").is_file()

"""The benchmarks run: our own half of each, small, and untimed. What the peers' halves do is for `nox -s bench`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["learner.py", "step"], "tokens computed"),
        (["time_to_reward.py"], "seconds_per_step"),
    ],
    ids=["learner", "time to reward"],
)
def test_our_half_of_a_benchmark_runs(arguments: list[str], shown: str) -> None:
    before = {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    program, *options = arguments
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / program), *options, "--quick", "--without-peer"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert shown in done.stdout
    after = {path: path.read_bytes() for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert after == before, "a quick run must keep no figures"

"""The program trains, on real data, with a tiny model and a few real steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agl_demo import TINY_MODEL


@pytest.mark.slow
@pytest.mark.needs_data
@pytest.mark.timeout(300)
def test_a_few_real_steps(tmp_path: Path) -> None:
    program = Path(__file__).parent.parent / "train.py"
    options = ["--model", TINY_MODEL, "--steps", "1", "--warmup-steps", "3", "--eval-tasks", "8"]
    command = [sys.executable, str(program), *options, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after: reward" in done.stdout and "gain by reinforcement learning" in done.stdout
    (run,) = tmp_path.iterdir()
    assert (run / "model" / "adapter_config.json").is_file()

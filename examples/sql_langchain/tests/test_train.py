"""The program trains, on real data, with a tiny model and a few real steps."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agl
from agl_demo import TINY_MODEL
from agl_trainer import Trainer, Warmup
from text_to_sql.agent import answer
from text_to_sql.data import curriculum, load
from text_to_sql.demonstrate import demonstrate


@pytest.mark.slow
@pytest.mark.needs_data
@pytest.mark.timeout(300)
def test_the_program_warms_up_and_evaluates(tmp_path: Path, spider: Path) -> None:
    program = Path(__file__).parent.parent / "train.py"
    options = ["--model", TINY_MODEL, "--steps", "0", "--warmup-steps", "2", "--eval-tasks", "4"]
    command = [sys.executable, str(program), *options, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after: reward" in done.stdout and "gain by reinforcement learning" in done.stdout
    (run,) = tmp_path.iterdir()
    assert (run / "model" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.needs_data
@pytest.mark.timeout(300)
def test_a_few_real_steps(tmp_path: Path, spider: Path) -> None:
    """The tiny model is never right about Spider, so a part that always differs gives the steps something to learn."""
    rolls = itertools.count()

    def answered(task: Mapping[str, Any], llm: agl.LLM) -> dict[str, float]:
        return {**answer(task, llm), "roll": next(rolls) / 100}

    trainer = Trainer(
        answered,
        curriculum(load("train_small")),
        model=TINY_MODEL,
        optimize=["writer", "rewriter"],
        warmup=Warmup(demonstrate=demonstrate, agents=["*"], steps=2, batch=8, learning_rate=1e-3),
        steps=2,
        tasks_per_step=2,
        group_size=4,
        learning_rate=1e-4,
        max_length=1024,
        output_dir=str(tmp_path),
    )
    trainer.fit()
    assert trainer.session.policy.version == 4 and trainer.session.agents_seen >= {"writer", "rewriter"}

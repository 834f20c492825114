"""The command ``agl demo``: a small text-to-SQL agent learns, and the gain on held-out questions is measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_demo import TINY_MODEL

if TYPE_CHECKING:
    from agl_trainer import Result, Trainer

HELD_OUT = 64
SPLIT_SEED = 0
"""The split is the same in every run; ``--seed`` changes everything else."""


def demo(
    tiny: Annotated[bool, typer.Option(help="A tiny model that ships with agl: a minute, offline.")] = False,
    seed: Annotated[int, typer.Option(help="Order of tasks, the teacher's mistakes, and sampling.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
) -> None:
    """Watch an agent learn: LangGraph writes SQL, agl trains the language model inside it."""
    started = time.monotonic()
    output_dir.mkdir(parents=True, exist_ok=True)
    trainer = build(tiny, seed, output_dir)
    typer.echo(
        f"agl demo: writer, checker and rewriter (LangGraph) answer questions with SQL on {trainer.config.model}.\n"
        "First they imitate a teacher who is wrong more often than right; then writer and rewriter learn from the\n"
        f"results of their own queries. {HELD_OUT} questions are held out to measure the gain.\n"
    )
    result = trainer.fit()
    typer.echo(summary(result, time.monotonic() - started))
    gain = result.gain
    if gain is None or gain.low <= 0:
        typer.echo("The held-out reward did not rise significantly. Please report this with the run's folder.")
        raise typer.Exit(1)


def build(tiny: bool, seed: int, output_dir: Path) -> Trainer:
    """The trainer of the demo."""
    from agl_demo.agent import answer
    from agl_demo.teacher import Teacher
    from agl_demo.world import build_database, split
    from agl_trainer import Trainer, Warmup

    database = str(build_database(output_dir / "shop.sqlite").resolve())
    tasks, held_out = ([{**task, "database": database} for task in part] for part in split(HELD_OUT, SPLIT_SEED))
    warmup, settings = tiny_settings() if tiny else small_settings()
    return Trainer(
        answer,
        tasks,
        eval_tasks=held_out,
        optimize=["writer", "rewriter"],
        warmup=Warmup(demonstrate=Teacher(seed), agents=["*"], **warmup),
        seed=seed,
        output_dir=str(output_dir),
        max_length=512,
        slots=64,
        workers=1,  # agents have an interpreter, and so a core, of their own
        **settings,
    )


def small_settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """A real small model: SmolLM2 with 135 million weights, LoRA on bfloat16."""
    from agl_trainer.models import SMALL_MODEL

    warmup = {"steps": 16, "batch": 8, "learning_rate": 1e-3}
    settings = {
        "model": SMALL_MODEL,
        "precision": "bfloat16",
        "lora_rank": 16,
        "learning_rate": 3e-4,
        "steps": 5,
        "tasks_per_step": 8,
        "group_size": 8,
    }
    return warmup, settings


def tiny_settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """The tiny model that `agl_demo.pretrain` made: all weights, float32."""
    warmup = {"steps": 4, "batch": 16, "learning_rate": 3e-4}
    settings = {
        "model": TINY_MODEL,
        "learning_rate": 1e-3,
        "steps": 14,
        "tasks_per_step": 16,
        "group_size": 4,
        "eval_samples": 2,
    }
    return warmup, settings


def summary(result: Result, seconds: float) -> str:
    """The table that people see in the end, and what they may do next."""
    lines = ["", "held-out reward      mean  [95 % interval]"]
    lines += [f"  {name:<17} {evaluation.reward}" for name, evaluation in result.evaluations.items()]
    lines += [
        f"  {'gain by RL':<17} {result.gain}",
        "",
        f"{seconds:.0f} s in all. Kept in {result.folder}:",
        "  metrics.jsonl         the curve, one line a step",
        "  server/store.sqlite   every call with its exact tokens",
        "  model/                the trained model, for from_pretrained",
        "",
        "Next: train your own agent, see the README (15 lines), or `agl train --help`.",
    ]
    return "\n".join(lines)

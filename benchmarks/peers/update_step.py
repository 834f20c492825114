"""One optimiser step on the same rows: agl's learner beside TRL's GRPO trainer, taking turns in one run.

Rows are those of tool-using agents: groups of eight with a common prompt, several turns, ragged lengths. Both get the
same model, AdamW, precision, threads and budget of padded tokens, and start from the same weights; the gradient norm
of the first step shows that they compute the same thing. TRL gets each of its forms: one row for each rollout with a
tool mask (its best), with and without the gradient checkpointing that it does by default, and one row for each call.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agl_trainer.models import SMALL_MODEL, find_model
from agl_trainer.testing import tiny_model
from peers import calls, environment
from peers.worker import Worker

PEER = "trl==1.16.0"
OURS = "agl"
BEST, DEFAULT, PER_CALL = "trl, row per rollout", "trl, row per rollout, checkpointing", "trl, row per call"
FORMS: dict[str, dict[str, Any]] = {
    BEST: {"form": "merged", "gradient_checkpointing": False},
    DEFAULT: {"form": "merged", "gradient_checkpointing": True},
    PER_CALL: {"form": "per call", "gradient_checkpointing": False},
}
LEARNING_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    """What both train on."""

    model: str
    precision: str
    shape: calls.Shape
    rounds: int
    threads: int
    forms: tuple[str, ...] = tuple(FORMS)
    """Of TRL's forms, those that are measured."""
    micro_batch_tokens: int = 2048


AGENT = calls.Shape(groups=2, prompt=(256, 384), turns=(3, 4, 5, 4), answer=(12, 48), observation=(16, 64))
SHORT = calls.Shape(groups=1, prompt=(48, 64), turns=(2,), answer=(8, 16), observation=(8, 16))


def cases(quick: bool) -> list[Case]:
    """The tiny model, and the small real one in both precisions: one group, and no form of TRL's that takes minutes."""
    if quick:
        return [Case("tiny", "float32", SHORT, rounds=3, threads=1)]
    tiny = Case("tiny", "float32", AGENT, rounds=9, threads=1)
    group = replace(AGENT, groups=1)
    small = Case(SMALL_MODEL, "bfloat16", group, rounds=3, threads=2, forms=(BEST, DEFAULT))
    return [tiny, small, replace(small, precision="float32", forms=(BEST,))]


def measure(quick: bool, with_peer: bool) -> dict[str, Any]:
    """Every case; a mapping for JSON."""
    python = environment.make(PEER, f"torch=={version('torch').split('+')[0]}") if with_peer else None
    if isinstance(python, str):
        print(f"{PEER} is not measured: {python}", file=sys.stderr)
        python = None
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_model(Path(folder))
        return {
            "machine": environment.machine(["agl", "agl-trainer", "torch", "transformers", "accelerate"]),
            "cases": [
                one(case, str(tiny) if case.model == "tiny" else find_model(case.model), python)
                for case in cases(quick)
            ],
        }


def one(case: Case, model: str, python: Path | None) -> dict[str, Any]:
    """Agl beside TRL on one case, in turns."""
    sampled = calls.make(case.shape, vocabulary=vocabulary(model))
    common = {
        "model": model,
        "calls": calls.as_json(sampled),
        "precision": case.precision,
        "threads": case.threads,
        "micro_batch_tokens": case.micro_batch_tokens,
        "learning_rate": LEARNING_RATE,
    }
    names = [OURS, *(case.forms if python else ())]
    workers: dict[str, Worker] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in names:
        ours = name == OURS
        # Threads that wait actively, OpenMP's default, stand in each other's way on a busy machine.
        workers[name] = Worker(
            sys.executable if ours or python is None else python,
            "peers.agl_update" if ours else "peers.trl_update",
            OMP_WAIT_POLICY="PASSIVE",
        )
        facts[name] = workers[name].ask(**common, **({} if ours else FORMS[name]))
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(case.rounds + 1):  # the first is for warming up, and for the gradient's norm
        for name in names:
            steps[name].append(workers[name].ask())
    for worker in workers.values():
        worker.close()
    systems = {
        name: {
            "seconds": statistics.median(step["seconds"] for step in steps[name][1:]),
            "all_seconds": [step["seconds"] for step in steps[name]],
            "first_grad_norm": steps[name][0]["grad_norm"],
            "first_loss": steps[name][0]["loss"],
            "tokens_computed": steps[name][0].get("tokens_computed"),
            **facts[name],
        }
        for name in names
    }
    result = {
        **asdict(case),
        "calls": len(sampled),
        "tokens_asked": sum(len(call.prompt_ids) + len(call.response_ids) for call in sampled),
        "tokens_unique": calls.unique_tokens(sampled),
        "tokens_sampled": sum(len(call.response_ids) for call in sampled),
        "systems": systems,
        "times_faster": {name: systems[name]["seconds"] / systems[OURS]["seconds"] for name in names[1:]},
    }
    report(result)
    return result


def vocabulary(model: str) -> int:
    """How many tokens the model knows."""
    return json.loads((Path(model) / "config.json").read_text())["vocab_size"]


def report(result: dict[str, Any]) -> None:
    """A case, for people."""
    print(
        f"{result['model']}, {result['precision']}, {result['calls']} calls: tokens asked {result['tokens_asked']:,}, "
        f"unique {result['tokens_unique']:,}, sampled {result['tokens_sampled']:,}"
    )
    for name, system in result["systems"].items():
        faster = f"  agl is {result['times_faster'][name]:.2f}x faster" if name in result["times_faster"] else ""
        print(
            f"  {name:<36} {system['seconds']:>8.3f} s  {system['tokens_computed']:>7,.0f} tokens computed  "
            f"gradient norm {system['first_grad_norm']:.6g}{faster}",
            flush=True,
        )

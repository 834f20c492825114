"""Training that never waits: ``mode="async"`` beside ``"sync"``, with agents whose tools are slow now and then.

    python benchmarks/asynchrony.py            # figures go to benchmarks/results/asynchrony.json
    python benchmarks/asynchrony.py --quick    # does it run?

32 rollouts run at once. Each makes three model calls (the tiny model, embedded) and waits for a tool after each of the
first two; waits are log-normal (median 0.3 s, sigma 1.2), so that the slowest of a step takes many times the mean. A
step trains on 32 rollouts (4 groups of 8). The modes get the same tasks, waits, seed and 16 steps, one after the other.
Throughput is rollouts per second from the first step's end to the last one's. Staleness is what the run's log says:
updates between sampling and training.

Prediction, from a simulation of the queue alone (0.3 s of model and 0.3 s of update assumed): 4.6 rollouts a second in
sync, which waits for the slowest of 32; 10.7 with a cap of 2 updates, 14.7 with 4. Taking whichever groups are ready
first, instead of the oldest, came out slower there (10.1 and 12.9), because the late ones meet at the cap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import agl
from agl_trainer import Trainer
from agl_trainer.testing import tiny_model
from peers import environment

RESULTS = environment.ROOT / "benchmarks" / "results" / "asynchrony.json"
AT_ONCE, GROUPS, GROUP = 32, 4, 8
MEDIAN, SIGMA = 0.3, 1.2
MODES: dict[str, Any] = {"sync": "sync", "async, cap 2": {"async": 2}, "async, cap 4": {"async": 4}}


class Agent:
    """Three turns with a slow tool between them; which waits a rollout has depends on its number alone."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}

    async def __call__(self, task: Mapping[str, Any], llm: agl.LLM) -> float:
        number = self.begun[task["id"]] = self.begun.get(task["id"], -1) + 1
        order = random.Random(f"{task['id']}/{number}")
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        said = ""
        async with llm.async_client() as client:
            for turn in range(3):
                if turn:
                    await asyncio.sleep(order.lognormvariate(0.0, SIGMA) * MEDIAN)
                    messages.append({"role": "user", "content": "go on"})
                answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
                text = answer.choices[0].message.content or ""
                said += text
                messages.append({"role": "assistant", "content": text})
        return sum(" " <= letter <= "~" for letter in said) / 24


def one(model: Path, mode: Any, steps: int) -> dict[str, float]:
    """One run."""
    tasks = [{"id": str(number), "question": f"Say {number}"} for number in range(GROUPS * steps)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Agent(),
            tasks,
            model=str(model),
            output_dir=folder,
            mode=mode,
            steps=steps,
            tasks_per_step=GROUPS,
            group_size=GROUP,
            concurrency=AT_ONCE,
            slots=AT_ONCE,
            max_length=512,
            checkpoint_every=0,
        )
        ages: list[float] = []
        ends: list[float] = []
        learning = 0.0
        for batch in trainer.batches():
            start = time.perf_counter()
            ages.append(trainer.step(batch)["staleness/max"])
            ends.append(time.perf_counter())
            learning += ends[-1] - start
    return {
        "rollouts_per_second": GROUPS * GROUP * (steps - 1) / (ends[-1] - ends[0]),
        "seconds_a_step": (ends[-1] - ends[0]) / (steps - 1),
        "seconds_of_it_learning": learning / steps,
        "staleness_max": max(ages),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few steps; nothing is kept")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    runs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        for name, mode in MODES.items():
            runs[name] = one(model, mode, steps=4 if quick else 16)
    base = runs["sync"]["rollouts_per_second"]
    for name, run in runs.items():
        run["times_sync"] = run["rollouts_per_second"] / base
        print(
            f"{name:<14} {run['rollouts_per_second']:6.1f} rollouts/s  {run['times_sync']:.2f}x  "
            f"{run['seconds_of_it_learning']:.2f} s of each step learning, staleness at most {run['staleness_max']:.0f}"
        )
    if not quick:
        machine = environment.machine(["agl", "agl-trainer", "torch", "transformers"])
        RESULTS.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Wall-clock until a tiny model has learned a task: agl beside TRL's GRPO trainer, in turns, in one run.

    python benchmarks/time_to_reward.py             # three seeds of each, some ten minutes
    python benchmarks/time_to_reward.py --quick     # a step: does it run?

The task is the demo's, in one call: write SQL, and the database says whether it was right; once with a short prompt,
and once with a prompt as agents have it. Both start from the same weights and get the same questions in the same order,
rewards, groups, optimiser, learning rate, temperature, clipping, precision and processor cores. TRL gets its batch in
one pass and no gradient checkpointing, which is its best; one run shows its defaults too. TRL generates in its own
process; agl's agent calls an HTTP gateway, as agents do, and every call is on disk before it is answered. Held-out
reward is taken by one function, while the clock stands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agl_demo import TINY_MODEL
from agl_trainer.tasks import epochs, read_tasks
from peers import environment
from peers.sql_task import Prompt, SqlTask
from peers.worker import Worker

RESULTS = environment.ROOT / "benchmarks" / "results" / "time_to_reward.json"
PEER = "trl==1.16.0"


@dataclass(frozen=True, slots=True)
class Budget:
    """What both get."""

    steps: int
    """At most."""
    tasks_per_step: int
    group_size: int
    check_every: int
    target: float = 0.75
    """Held-out reward at which the clock stops."""
    samples: int = 4
    """Answers to each held-out question."""


FULL = Budget(steps=40, tasks_per_step=8, group_size=8, check_every=2)
LEARNING_RATE: dict[Prompt, float] = {"short": 1e-3, "agent": 3e-4}
QUICK = Budget(steps=1, tasks_per_step=2, group_size=4, check_every=1, samples=1)


@dataclass(frozen=True, slots=True)
class System:
    """One way to train."""

    name: str
    module: str
    threads: int
    """What made it fastest, on two cores."""
    passes: int = 1
    """In how many micro-batches TRL computes a step."""
    checkpointing: bool = False


OURS = System("agl", "peers.agl_reward", threads=1)
THEIRS = System("trl", "peers.trl_reward", threads=2)
DEFAULTS = System("trl, as by default", "peers.trl_reward", threads=2, passes=8, checkpointing=True)


PER_RUN = ("seconds_to_start", "seconds_per_step", "processor_seconds_per_step", "steps")


def run(system: System, prompt: Prompt, seed: int, budget: Budget, peer: Path | None) -> dict[str, Any]:
    """One run of one system, in a fresh process."""
    if system is OURS:
        worker = Worker(sys.executable, system.module, OMP_WAIT_POLICY="passive")
    else:
        assert peer is not None
        demo = environment.ROOT / "packages" / "agl-demo" / "src"
        worker = Worker(peer, system.module, demo, OMP_WAIT_POLICY="passive")
    model = TINY_MODEL
    if prompt == "agent":
        from peers.sql_model import model_for_agents  # which takes PyTorch, and seconds to import it

        model = model_for_agents()
    with TemporaryDirectory() as scratch:
        tasks = read_tasks(SqlTask(Path(scratch), prompt).train)
    drawn = islice(epochs(tasks, seed), budget.steps * budget.tasks_per_step)
    answer = worker.ask(
        model=str(model),
        prompt=prompt,
        seed=seed,
        learning_rate=LEARNING_RATE[prompt],
        order=[task.id for task in drawn],
        **asdict(budget),
        **asdict(system),
    )
    worker.close()
    reached = next((seconds for _, seconds, _, score in answer["curve"] if score >= budget.target), None)
    step, seconds, busy, score = answer["curve"][-1]
    ready, busy_before = answer["ready"]
    one = {
        "system": system.name,
        "threads": system.threads,
        "prompt": prompt,
        "seed": seed,
        "seconds_to_target": reached,
        "steps": step,
        "seconds_to_start": ready,
        "seconds_per_step": (seconds - ready) / step,
        "processor_seconds_per_step": (busy - busy_before) / step,
    }
    at = "not reached" if reached is None else f"after {reached:.1f} s"
    print(
        f"{prompt} prompt, seed {seed}, {system.name}: {budget.target} {at}; start {ready:.1f} s, {step} steps of "
        f"{one['seconds_per_step']:.2f} s ({one['processor_seconds_per_step']:.2f} processor seconds), "
        f"in the end {score:.3f}",
        flush=True,
    )
    return {**one, **answer}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds for each prompt, and the ratios; no median where a seed did not get there."""
    found: dict[str, Any] = {}
    for prompt in dict.fromkeys(one["prompt"] for one in runs):
        medians: dict[str, Any] = {}
        for system in dict.fromkeys(one["system"] for one in runs if one["prompt"] == prompt):
            own = [one for one in runs if one["prompt"] == prompt and one["system"] == system]
            times = [one["seconds_to_target"] for one in own]
            medians[system] = {
                "seconds_to_target": None if None in times else statistics.median(times),
                **{name: statistics.median(one[name] for one in own) for name in PER_RUN},
            }
        found[prompt] = {"medians": medians, "times_faster_than_trl": _ratios(medians)}
    return found


def _ratios(medians: dict[str, Any]) -> dict[str, float | None]:
    ours, theirs = medians.get(OURS.name), medians.get(THEIRS.name)
    if not ours or not theirs:
        return {}
    names = ("seconds_to_target", "seconds_per_step", "processor_seconds_per_step")
    return {name: theirs[name] / ours[name] if theirs[name] and ours[name] else None for name in names}


def report(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept."""
    packages = ["agl", "agl-trainer", "torch", "transformers", "accelerate", "openai"]
    return {
        "machine": environment.machine(packages),
        "budget": asdict(FULL),
        "learning_rate": LEARNING_RATE,
        **summary(runs),
        "runs": runs,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one step, the short prompt, one seed")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out")
    arguments = parser.parse_args()

    peer = None if arguments.without_peer else environment.make(PEER, f"torch=={version('torch').split('+')[0]}")
    if isinstance(peer, str):
        print(f"{PEER} is not measured: {peer}", file=sys.stderr)
        peer = None
    budget, seeds = (QUICK, 1) if arguments.quick else (FULL, 3)
    prompts: tuple[Prompt, ...] = ("short",) if arguments.quick else ("short", "agent")
    runs: list[dict[str, Any]] = []
    for prompt in prompts:
        for seed in range(seeds):
            systems = [OURS] if peer is None else [OURS, THEIRS, *([DEFAULTS] if seed == 0 else [])]
            runs += [run(system, prompt, seed, budget, peer) for system in systems]
    result = report(runs)
    print(json.dumps({prompt: result[prompt] for prompt in prompts}, indent=1))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

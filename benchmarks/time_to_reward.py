"""Wall-clock until a tiny model has learned a task: agl beside TRL's GRPO trainer, in turns, in one run.

    python benchmarks/time_to_reward.py             # three seeds of each, some minutes
    python benchmarks/time_to_reward.py --quick     # a few steps: does it run?

The task is the demo's: write SQL in one call, and the database says whether it was right. Both start from the same
weights and have the same questions, rewards, seeds, steps, groups, learning rate (constant), temperature, clipping,
precision and threads; all else is what each does by default, except that TRL gets its whole batch in one pass and no
gradient checkpointing, which is faster. TRL generates in its own process; agl's agent calls an HTTP gateway, as agents
do, and every call is on disk before it is answered. Held-out reward is taken by one function, while the clock stands.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agl_demo import TINY_MODEL
from peers import environment
from peers.worker import Worker

RESULTS = environment.ROOT / "benchmarks" / "results" / "time_to_reward.json"
PEER = "trl==1.16.0"
OURS, APART, THEIRS = "agl", "agl, agents in a process of their own", "trl"


@dataclass(frozen=True, slots=True)
class Budget:
    """What both get."""

    steps: int
    tasks_per_step: int
    group_size: int
    check_every: int
    learning_rate: float = 1e-3
    threads: int = 1


FULL = Budget(steps=24, tasks_per_step=8, group_size=8, check_every=2)
QUICK = Budget(steps=2, tasks_per_step=4, group_size=4, check_every=1)
TARGET = 0.75
"""Held-out reward to reach; the model begins at 0.36."""


def run(system: str, seed: int, budget: Budget, peer: Path | None) -> dict[str, Any]:
    """One run of one system, in a fresh process."""
    if system == THEIRS:
        assert peer is not None
        worker = Worker(peer, "peers.trl_reward", environment.ROOT / "packages" / "agl-demo" / "src")
    else:
        worker = Worker(sys.executable, "peers.agl_reward")
    answer = worker.ask(model=TINY_MODEL, seed=seed, workers=int(system == APART), **asdict(budget))
    worker.close()
    reached = next((seconds for _, seconds, score in answer["curve"] if score >= TARGET), None)
    last_step, last_seconds, last_score = answer["curve"][-1]
    per_step = (last_seconds - answer["ready"]) / last_step
    at = "not reached" if reached is None else f"after {reached:.1f} s"
    print(
        f"seed {seed}  {system:<38} {TARGET} {at}; start {answer['ready']:.1f} s, {per_step:.2f} s a step, "
        f"{answer['cpu_seconds'] / last_step:.2f} processor seconds a step, in the end {last_score:.3f}",
        flush=True,
    )
    return {"system": system, "seed": seed, "seconds_to_target": reached, "seconds_per_step": per_step, **answer}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, and the ratios; no median where a seed did not get there."""
    medians: dict[str, Any] = {}
    for system in dict.fromkeys(one["system"] for one in runs):
        own = [one for one in runs if one["system"] == system]
        times = [one["seconds_to_target"] for one in own]
        medians[system] = {
            "seconds_to_target": None if None in times else statistics.median(times),
            "seconds_per_step": statistics.median(one["seconds_per_step"] for one in own),
            "seconds_to_start": statistics.median(one["ready"] for one in own),
        }
    theirs = medians.get(THEIRS, {}).get("seconds_to_target")
    faster = {
        system: theirs / own["seconds_to_target"]
        for system, own in medians.items()
        if theirs and system != THEIRS and own["seconds_to_target"]
    }
    return {"medians": medians, "times_faster_than_trl": faster}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few steps, one seed")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out")
    arguments = parser.parse_args()

    peer = None if arguments.without_peer else environment.make(PEER, f"torch=={version('torch').split('+')[0]}")
    if isinstance(peer, str):
        print(f"{PEER} is not measured: {peer}", file=sys.stderr)
        peer = None
    budget, seeds = (QUICK, 1) if arguments.quick else (FULL, 3)
    systems = [OURS, APART] + ([THEIRS] if peer else [])
    runs = [run(system, seed, budget, peer) for seed in range(seeds) for system in systems]
    result = {
        "machine": environment.machine(["agl", "agl-trainer", "torch", "transformers", "accelerate", "openai"]),
        "target": TARGET,
        **asdict(budget),
        **summary(runs),
        "runs": runs,
    }
    print(json.dumps({name: result[name] for name in ("medians", "times_faster_than_trl")}, indent=1))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

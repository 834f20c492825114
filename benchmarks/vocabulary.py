"""Logprobs of sampled tokens without the logits, beside a full log-softmax: one part of ``benchmarks/learner.py``.

2,048 positions, a vocabulary of 152,000 (Qwen's), 30 % of the positions trained. Both ways give the same logprobs
(asserted) and both compute the gradients of states and head. ``full`` is what a trainer does that asks the model for
logits: all positions, log-softmax, gather. ``selected`` is ours. ``chunked`` walks the trained positions 128 at a time
with recomputation, as careful trainers do. Memory is what a pass adds at its peak beyond the gradients it leaves,
read from the process (``VmHWM``), each way in a process of its own.

What can be expected: a full table costs three matrix products over 2,048 positions, ours four over 614, since it makes
the logits once more backward: 2.5 times fewer multiply-adds with a head that is trained, 5 with a frozen one, whose
gradient is gathered forward; and 3.3 for logprobs alone. What is beyond that is memory traffic. In float32 products
are nearly all of the time here, so a trained head cannot reach 4 there.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agl_trainer.logits import selected_logprobs

POSITIONS, VOCABULARY, HIDDEN, TRAINED = 2048, 152_000, 576, 0.3
WAYS = ("full", "chunked", "selected")


class Case:
    """States, a head, and which positions were sampled."""

    def __init__(self, precision: str, frozen: bool) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, precision)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype).requires_grad_(not frozen)
        self.states = torch.randn(POSITIONS, HIDDEN, dtype=dtype).requires_grad_()
        self.places = torch.randperm(POSITIONS)[: int(TRAINED * POSITIONS)].sort().values
        self.targets = torch.randint(0, VOCABULARY, (POSITIONS,))

    def logprobs(self, way: str) -> torch.Tensor:
        """Of the sampled tokens."""
        targets = self.targets[self.places]
        if way == "full":
            table = self.head(self.states).float().log_softmax(-1)
            return table.gather(-1, self.targets[:, None])[self.places, 0]
        states = self.states[self.places]
        if way == "selected":
            return selected_logprobs(self.head, states, targets, torch.ones(len(targets)))[0]

        def chunk(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return self.head(part).float().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]

        parts = zip(states.split(128), targets.split(128), strict=True)
        return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])  # pyright: ignore[reportArgumentType]

    def learn(self, way: str) -> torch.Tensor:
        """Forward and backward."""
        self.states.grad = self.head.weight.grad = None
        logprobs = self.logprobs(way)
        logprobs.mean().backward()
        return logprobs.detach()


def resident(name: str) -> int:
    """A line of ``/proc/self/status`` in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def peak(way: str, precision: str, frozen: bool) -> float:
    """Gigabytes that a pass adds at its peak."""
    case = Case(precision, frozen)
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # loads the libraries
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = resident("VmRSS")
    case.learn(way)
    kept = [x.grad for x in (case.states, case.head.weight) if x.grad is not None]
    return (resident("VmHWM") - before - sum(x.nbytes for x in kept)) / 1e9


def measure(quick: bool, with_peer: bool = True) -> dict[str, Any]:
    """Times in turns, medians; memory one process each."""
    del with_peer
    results: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        for frozen in (False, True):
            name = f"{precision}, head {'frozen' if frozen else 'trained'}"
            case = Case(precision, frozen)
            wanted = case.learn("full")
            times, busy, forward = ({way: list[float]() for way in WAYS} for _ in range(3))
            for _ in range(1 if quick else 5):
                for way in WAYS:
                    start, used = time.perf_counter(), time.process_time()
                    found = case.learn(way)
                    times[way].append(time.perf_counter() - start)
                    busy[way].append(time.process_time() - used)
                    start = time.perf_counter()
                    with torch.no_grad():
                        case.logprobs(way)
                    forward[way].append(time.perf_counter() - start)
                    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 if precision == "float32" else 0.05)
            seconds = {way: statistics.median(values) for way, values in times.items()}
            processor = {way: statistics.median(values) for way, values in busy.items()}
            alone = {way: statistics.median(values) for way, values in forward.items()}
            command = [sys.executable, __file__, precision, str(int(frozen))]
            memory = {way: float(subprocess.check_output([*command, way], text=True)) for way in WAYS}
            results[name] = {
                "seconds": seconds,
                "cpu_seconds": processor,
                "forward_seconds": alone,
                "extra_gb": memory,
                "full over selected": round(seconds["full"] / seconds["selected"], 2),
                "full over selected, cpu": round(processor["full"] / processor["selected"], 2),
                "full over selected, forward": round(alone["full"] / alone["selected"], 2),
            }
            print(name, json.dumps(results[name]), flush=True)
    return results


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(peak(sys.argv[3], sys.argv[1], sys.argv[2] == "1"))
    else:
        measure(quick=True)

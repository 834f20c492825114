"""What a person sees while it runs: a live bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from agl.hookspecs import hookimpl

PLAIN_SECONDS = 10.0


class Progress:
    """Counts finished rollouts of one phase. ``with Progress("step 3") as progress: progress(5, 64)``."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._bar: Any = None
        self._started = self._spoke = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(self.what, total=None)
        return self

    def __call__(self, done: int, total: int) -> None:
        """Report; said aloud even when nothing moves, so that a log never goes silent."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
        elif time.monotonic() - self._spoke >= PLAIN_SECONDS:
            self._spoke = time.monotonic()
            say(f"{self.what}: {done} of {total} rollouts after {self._spoke - self._started:.0f} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@hookimpl
def agl_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """One line for each step; steps up to 0 are the warm-up."""
    shown = {"reward": "reward {:.3f}", "sft_loss": "loss {:.3f}", "grad_norm": "gradient {:.3g}"}
    shown |= {"unscored": "unscored {:.0f}", "degenerate_groups": "equal groups {:.0%}"}
    parts = [text.format(metrics[name]) for name, text in shown.items() if name in metrics]
    # What should not happen is said when it did.
    odd = {"truncated_answers": "cut off", "overlong_prompts": "too long"}
    odd |= {name: name.removeprefix("outcome/") for name in metrics if name.startswith("outcome/")}
    parts += [f"{label} {metrics[name]:.0f}" for name, label in odd.items() if metrics.get(name)]
    if "seconds" in metrics:
        parts.append(f"{metrics['seconds']:.1f} s")
    if "refused" in metrics:
        parts.append("refused: a number was not finite, and no weight was changed")
    elif "loss" not in metrics:
        parts.append("nothing to learn: the rewards inside every group were equal")
    say(f"{'warm-up' if step <= 0 else 'step'} {step}: {', '.join(parts)}")


def say(text: str) -> None:
    """One line for people."""
    print(f"agl: {text}", file=sys.stderr, flush=True)

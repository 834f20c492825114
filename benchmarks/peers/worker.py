"""Processes that take turns: a benchmark starts one for each system and asks each for one piece of work at a time.

A process of its own gives every system its own libraries, threads and memory; taking turns (A B A B) lets a busy
machine disturb all of them alike. Question and answer are lines of JSON on standard input and output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]


class Worker:
    """A process that answers questions, one at a time."""

    def __init__(self, python: str | Path, module: str, *paths: Path, **settings: str) -> None:
        """Start it.

        Args:
            python: of the system's environment.
            module: of this folder; it calls `serve`.
            paths: where else it finds modules.
            settings: environment variables.
        """
        self.module = module
        known = [str(FOLDER), *map(str, paths), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(known), **settings},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a question and wait for the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.module} ended with exit status {self._process.wait()}; it wrote why above")
        return json.loads(answer)

    def close(self) -> None:
        """End it, and wait until its memory is free."""
        self._process.terminate()
        self._process.wait()


class Turns:
    """The other side: reads questions and writes answers. Whatever else the process prints goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def question(self) -> dict[str, Any]:
        """The next question; ends the process when there will be none."""
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        return json.loads(line)

    def answer(self, answer: Mapping[str, Any]) -> None:
        """Send the answer."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def serve(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer every question with ``work(question)``."""
    turns = Turns()
    while True:
        turns.answer(work(turns.question()))

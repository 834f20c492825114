"""The program in the README runs as it stands; only the trainer is another: it plays the tasks and trains nothing."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl import plugins
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import Lightning, Played, play

README = Path(__file__).parents[1] / "README.md"


def test_the_program_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, lightning: Lightning, server: ModelServer):
    program, _ = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    replies = iter([tool_call("transfer_to_solver"), tool_call("multiply", a=6, b=7), "42"])
    server.engine = ScriptedEngine(lambda *_: next(replies))
    played: list[Played] = []

    class Trainer:
        def __init__(self, agent: Any, tasks: Any, *, model: str, optimize: list[str]) -> None:
            self.agent, self.tasks, self.optimize = agent, tasks, tuple(optimize)

        def fit(self) -> None:
            async def agent(task: Any, llm: Any) -> float:
                return await self.agent(self.tasks[task["number"]], llm)

            played.extend(asyncio.run(play(agent, lightning, server, optimize=self.optimize)))

    plugins.manager()  # the plugins of the real trainer are loaded before the stand-in takes its name
    stand_in = ModuleType("agl_trainer")
    stand_in.Trainer = Trainer  # pyright: ignore
    monkeypatch.setitem(sys.modules, "agl_trainer", stand_in)
    exec(compile(program, str(README), "exec"), {"__name__": "__main__"})
    played[0].expect("triage", "solver", "solver")
    assert played[0].rollout.returned is not None and played[0].rollout.returned.total == 1.0

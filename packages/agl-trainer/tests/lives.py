"""A small run that is killed again and again, in a process of its own: ``python lives.py '{...}'``.

The process imports everything once and forks a child for each life. A child kills itself with SIGKILL at the nth
passage of a place that the test names, and the next one resumes; the last one lives to the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai  # noqa: F401  (once, before the forks)
import torch

import agl
from agl_trainer import Trainer, Warmup, checkpoint, updates
from agl_trainer.backends.transformers.backend import TransformersBackend
from agl_trainer.policy import Policy
from agl_trainer.session import Session

TASKS = [{"id": str(number), "question": f"Say {number}"} for number in range(5)]
HELD_OUT = [{"id": name, "question": f"Say {name}"} for name in "xy"]


async def agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
    """Two turns, the second of which sees the first; the reward is the share of plain ASCII."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    said = ""
    async with llm.async_client() as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=6)
            text = answer.choices[0].message.content or ""
            said += text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
            passing("call")
    passing("rollout")
    return sum(" " <= character <= "~" for character in said) / 12


def teach(task: Mapping[str, Any], agent: str, prompt: str) -> str:
    """What the warm-up imitates."""
    passing("demonstration")
    return f"Say{task['id']}"


# --------------------------------------------------------------------------------------------------------- dying

_fate: dict[str, int] = {}


def passing(place: str) -> None:
    """Die here, if it is time."""
    if place in _fate:
        _fate[place] -= 1
        if _fate[place] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def watch(owner: Any, name: str, place: str) -> None:
    """Pass ``place`` before each call of a function, and ``place end`` after it."""
    function: Callable[..., Any] = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        passing(place)
        result = function(*arguments, **named)
        passing(f"{place} end")
        return result

    setattr(owner, name, watched)


def live(model: str, output: str, settings: dict[str, Any], warm: bool, fate: dict[str, int]) -> None:
    """One life, in a child process."""
    _fate.update(fate)
    for owner, name, place in (
        (updates, "learn", "learn"),
        (Policy, "gradients", "gradients"),
        (Policy, "_apply", "apply"),
        (TransformersBackend, "update_weights", "weights"),
        (checkpoint, "to_disk", "disk"),
        (os, "rename", "rename"),
        (checkpoint, "prune", "prune"),
        (Session, "evaluate", "evaluate"),
        (Session, "_log", "log"),
        (Session, "_save", "save"),
    ):
        watch(owner, name, place)
    earlier = sorted(Path(output).glob("*-seed0"))
    trainer = Trainer(
        agent,
        TASKS,
        eval_tasks=HELD_OUT,
        warmup=Warmup(demonstrate=teach, steps=3, batch=2, learning_rate=1e-2) if warm else None,
        resume=earlier[0] if earlier else None,
        **{
            "model": model,
            "output_dir": output,
            "steps": 4,
            "tasks_per_step": 2,
            "group_size": 3,
            "max_length": 160,
            "slots": 5,
            "learning_rate": 1e-3,
            "eval_every": 2,
            "checkpoint_every": 1,
            "stall_timeout": 60,
            **settings,
        },
    )
    trainer.fit()


def main(order: dict[str, Any]) -> None:
    """All lives of a run, one after the other."""
    torch.set_num_threads(1)
    for fate in [*order["fates"], {}]:
        child = os.fork()
        if child == 0:
            try:
                live(order["model"], order["output"], order["settings"], order["warm"], fate)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if died != bool(fate) or (not fate and status != 0):
            raise SystemExit(f"fate {fate} ended with status {status}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

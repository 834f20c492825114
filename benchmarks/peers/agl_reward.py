"""agl learns the SQL task: its loop, server, gateway and embedded engine, with an ordinary agent in a process of
its own (``workers=1``)."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import openai  # noqa: F401  (imports are not part of what is measured)
import torch

from agl_trainer.loop import Trainer
from peers import sql_agent
from peers.watch import Clock, held_out_reward
from peers.worker import serve


def learn(asked: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(asked["threads"])
    curve: list[tuple[int, float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[sql_agent.FOLDER], os.environ[sql_agent.PROMPT] = folder, asked["prompt"]
        task = sql_agent.sql_task()
        clock = Clock()
        trainer = Trainer(
            sql_agent.answer,
            task.train,
            model=asked["model"],
            steps=asked["steps"],
            tasks_per_step=asked["tasks_per_step"],
            group_size=asked["group_size"],
            learning_rate=asked["learning_rate"],
            algorithm={"name": "grpo", "clip_high": 0.2},
            slots=asked["tasks_per_step"] * asked["group_size"],
            concurrency=asked["tasks_per_step"] * asked["group_size"],
            workers=1,
            seed=asked["seed"],
            output_dir=folder,
        )
        with trainer.session as session:
            ready = clock.reading
            for batch in trainer.batches():
                trainer.step(batch)
                if trainer.steps % asked["check_every"] == 0:
                    with clock.pause():
                        score = held_out_reward(task, session.policy.model, session.policy.tokenizer, asked["samples"])
                    curve.append((trainer.steps, *clock.reading, score))
                    if score >= asked["target"]:
                        break
    return {"curve": curve, "ready": ready}


if __name__ == "__main__":
    serve(learn)

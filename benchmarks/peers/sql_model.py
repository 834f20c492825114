"""A tiny model that is used to the agent's prompt: the demo's, which has seen short ones only, taught a little more.

It imitates a teacher who is mostly wrong, as the demo's did, so that it knows what an answer looks like and most of
what is right is left to find out. Always the same weights on one machine; made once, and kept in ``.nox``.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from pathlib import Path

from agl_demo import TINY_MODEL, pretrain, teacher, world
from agl_trainer.algorithms.sft import SFT
from agl_trainer.batch import layout
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from peers.environment import ROOT
from peers.sql_task import SqlTask

STEPS = 40
BATCH = 32
LEARNING_RATE = 2e-3
SEED = 0


def model_for_agents() -> Path:
    """Its folder; made when it is not there, in less than a minute."""
    with tempfile.TemporaryDirectory() as scratch:
        task = SqlTask(Path(scratch), "agent")
        name = hashlib.sha256(f"{task.system} {STEPS} {BATCH} {LEARNING_RATE} {SEED}".encode()).hexdigest()[:12]
        folder = ROOT / ".nox" / f"sql-model-{name}"
        if not (folder / "tokenizer.json").exists():
            _teach(task, folder)
    return folder


def _teach(task: SqlTask, folder: Path) -> None:
    order = random.Random(SEED)
    policy = Policy(TrainConfig.of(model=str(TINY_MODEL), learning_rate=LEARNING_RATE, seed=SEED))
    try:
        for step in range(STEPS):
            rows = []
            for item in order.sample(task.train, BATCH):
                query = item["query"]
                said = query if order.random() < teacher.RIGHT else world.corrupt(query, order)
                chat = [(message["role"], message["content"]) for message in task.messages(item["question"])]
                rows.append(pretrain.as_row(policy.tokenizer, chat, said))
            weights = token_weights(rows, "token")
            ready = [TrainRow(row, [1.0] * sum(row.sampled), own) for row, own in zip(rows, weights, strict=True)]
            for group in policy.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10, (STEPS - step) / (0.5 * STEPS))
            metrics = policy.update(layout.micro_batches(ready, 16384, "auto", policy.model), SFT())
            if step % 20 == 0 or step == STEPS - 1:
                print(f"teaching: step {step}, loss {metrics['loss']:.3f}", flush=True)
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    finally:
        policy.close()

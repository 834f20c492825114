"""TRL's GRPO trainer learns the SQL task with its own generation; runs in the environment of the released package."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from peers.sql_task import ANSWER_TOKENS, SqlTask
from peers.watch import Clock, held_out_reward
from peers.worker import serve


class Watch(TrainerCallback):
    """Scores the model now and then while the clock stands still."""

    def __init__(self, clock: Clock, task: SqlTask, tokenizer: Any, asked: dict[str, Any]) -> None:
        self.clock, self.task, self.tokenizer, self.asked = clock, task, tokenizer, asked
        self.curve: list[tuple[int, float, float, float]] = []
        self.ready = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ready = self.clock.reading

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self.asked["check_every"] == 0:
            with self.clock.pause():
                score = held_out_reward(self.task, model, self.tokenizer, self.asked["samples"])
            self.curve.append((state.global_step, *self.clock.reading, score))
            control.should_training_stop = score >= self.asked["target"]


def learn(asked: dict[str, Any]) -> dict[str, Any]:
    """One run."""
    torch.set_num_threads(asked["threads"])
    with tempfile.TemporaryDirectory() as folder:
        task = SqlTask(Path(folder), asked["prompt"])
        clock = Clock()
        tokenizer = AutoTokenizer.from_pretrained(asked["model"])
        rollouts = asked["tasks_per_step"] * asked["group_size"]
        passes = asked["passes"]
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rollouts // passes,
            gradient_accumulation_steps=passes,
            num_generations=asked["group_size"],
            max_completion_length=ANSWER_TOKENS,
            max_steps=asked["steps"],
            learning_rate=asked["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta2=0.99,  # as agl's
            bf16=False,
            gradient_checkpointing=asked["checkpointing"],
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=asked["seed"],
        )

        def reward(completions: list[Any], query: list[str], **_: Any) -> list[float]:
            return [task.reward(done[0]["content"], gold) for done, gold in zip(completions, query, strict=True)]

        known = {item["id"]: item for item in task.train}
        drawn = [known[name] for name in asked["order"]]
        rows = [{"prompt": task.messages(item["question"]), "query": item["query"]} for item in drawn]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
        )
        watch = Watch(clock, task, tokenizer, asked)
        trainer.add_callback(watch)
        trainer.train()
    names = ("trl", "transformers", "accelerate", "torch")
    return {
        "curve": watch.curve,
        "ready": watch.ready,
        "versions": {name: version(name) for name in names},
    }


if __name__ == "__main__":
    serve(learn)

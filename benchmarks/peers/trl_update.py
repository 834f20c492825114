"""TRL's GRPO trainer, one optimiser step at a time, on rows that it did not generate itself.

Runs in the environment of the released package. Everything is TRL's own loop: ``train()`` with its micro-batches,
gradient accumulation, clipping and AdamW. Only `_generate_and_score_completions` is replaced, by rows in the form that
it returns; the time it takes is not counted.
"""

from __future__ import annotations

import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

from peers.worker import Turns


def merged(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each rollout: TRL's form for agents that use tools, with a mask over what the tools said."""
    rows: dict[str, dict[str, Any]] = {}
    for call in calls:
        prompt, answer = call["prompt_ids"], call["response_ids"]
        if (row := rows.get(call["rollout"])) is None:
            rows[call["rollout"]] = {"prompt": prompt, "completion": answer, "mask": [1] * len(answer)}
            rows[call["rollout"]]["advantage"] = call["advantage"]
            continue
        known = len(row["prompt"]) + len(row["completion"])
        row["mask"] = row["mask"] + [0] * (len(prompt) - known) + [1] * len(answer)
        row["completion"] = row["completion"] + prompt[known:] + answer
    return list(rows.values())


def per_call(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each call: the form for agents whose next prompt does not begin with what went before."""
    return [
        {"prompt": c["prompt_ids"], "completion": c["response_ids"], "mask": [1] * len(c["response_ids"])}
        | {"advantage": c["advantage"]}
        for c in calls
    ]


def padded(rows: list[dict[str, Any]], pad_id: int, tools: bool) -> dict[str, torch.Tensor]:
    """What ``_generate_and_score_completions`` returns: prompts padded left, completions right."""

    def lay(lists: list[list[int]], value: int, side: str) -> torch.Tensor:
        return pad([torch.tensor(ids) for ids in lists], padding_value=value, padding_side=side)

    batch = {
        "prompt_ids": lay([row["prompt"] for row in rows], pad_id, "left"),
        "prompt_mask": lay([[1] * len(row["prompt"]) for row in rows], 0, "left"),
        "completion_ids": lay([row["completion"] for row in rows], pad_id, "right"),
        "completion_mask": lay([[1] * len(row["completion"]) for row in rows], 0, "right"),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(sum(sum(row["mask"]) for row in rows)),
    }
    if tools:
        batch["tool_mask"] = lay([row["mask"] for row in rows], 0, "right")
    return batch


def rows_at_once(count: int, width: int, budget: int) -> int:
    """The largest even share of the rows that fits the budget of padded tokens; TRL wants equal micro-batches."""
    return max(size for size in range(1, count + 1) if count % size == 0 and (size == 1 or size * width <= budget))


class OneByOne(TrainerCallback):
    """Lets the trainer take one step for each question."""

    def __init__(self, turns: Turns, facts: dict[str, Any]) -> None:
        self.turns = turns
        self.facts = facts
        self.preparing = 0.0
        self.turns.answer(facts)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turns.question()
        self.preparing = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.perf_counter() - self.started - self.preparing

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        self.turns.answer({"seconds": self.seconds, "grad_norm": float(logs["grad_norm"]), "loss": float(logs["loss"])})


def main() -> None:
    """The first question says what to train on; every other asks for one step."""
    turns = Turns()
    asked = turns.question()
    torch.set_num_threads(asked["threads"])
    rows = merged(asked["calls"]) if asked["form"] == "merged" else per_call(asked["calls"])
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    batch = padded(rows, tokenizer.pad_token_id, tools=asked["form"] == "merged")
    width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    size = rows_at_once(len(rows), width, asked["micro_batch_tokens"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=len(rows) // size,
            num_generations=len(rows),
            max_steps=1_000_000,
            learning_rate=asked["learning_rate"],
            bf16=asked["precision"] == "bfloat16",
            gradient_checkpointing=asked["gradient_checkpointing"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "not used"}] * len(rows)),
        )
        facts = {
            "tokens_computed": len(rows) * width,
            "rows": len(rows),
            "rows_at_once": size,
            "optimizer": str(config.optim),
            "versions": {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
        }
        callback = OneByOne(turns, facts)

        def instead(_: Any) -> dict[str, torch.Tensor]:
            started = time.perf_counter()
            prepared = {name: value.to(trainer.accelerator.device) for name, value in batch.items()}
            callback.preparing += time.perf_counter() - started
            return prepared

        trainer._generate_and_score_completions = instead
        trainer.add_callback(callback)
        trainer.train()


if __name__ == "__main__":
    main()

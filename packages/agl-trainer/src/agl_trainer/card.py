"""The model card that is saved beside a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agl_trainer.adapters import saved_adapters
from agl_trainer.config import TrainConfig

if TYPE_CHECKING:
    from agl_trainer.session import Result


def write(folder: Path, config: TrainConfig, result: Result) -> None:
    """Write ``README.md`` in the form of the Hugging Face hub: what it is, how it was trained, what was measured."""
    saved = saved_adapters(str(folder))
    kind = "a PEFT adapter (LoRA) for" if config.lora_rank else "a fine-tuned version of"
    if saved:
        kind = "a PEFT adapter (LoRA) for each of several agents, on"
    algorithm = config.algorithm if isinstance(config.algorithm, str) else config.algorithm["name"]
    agents = ", ".join(config.optimize) if config.optimize else "all"
    (folder / "README.md").write_text(
        f"""---
base_model: {config.model}
library_name: {"peft" if config.lora_rank else "transformers"}
tags: [agl, reinforcement-learning, {algorithm}]
---
# {folder.parent.name}

This is {kind} `{config.model}`, trained with agl: {algorithm}, {config.steps} steps of {config.tasks_per_step}
tasks with {config.group_size} rollouts each, learning rate {config.learning_rate:g}, temperature
{config.temperature:g}, seed {config.seed}. Optimised agents: {agents}.

## Held-out reward

{_rewards(result)}
{_adapters(saved)}"""
    )


def _rewards(result: Result) -> str:
    rows = [
        f"| {name} | {evaluation.reward} | {len(evaluation.scores)} | {evaluation.unscored} |"
        for name, evaluation in result.evaluations.items()
    ]
    head = ["| | mean reward [95 % interval] | tasks | unscored |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) if rows else "Not evaluated."


def _adapters(saved: dict[str, Path]) -> str:
    if not saved:
        return ""
    rows = "\n".join(f"| {agent} | `{folder.name}` |" for agent, folder in saved.items())
    return f"""
## Adapters

Each folder is an adapter that `from_pretrained` reads. All together, this folder is a `model` of agl.

| agent | folder |
|---|---|
{rows}
"""

"""The model card that is saved beside a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agl_trainer.config import TrainConfig

if TYPE_CHECKING:
    from agl_trainer.session import Result


def write(folder: Path, config: TrainConfig, result: Result) -> None:
    """Write ``README.md`` in the form of the Hugging Face hub: what it is, how it was trained, what was measured."""
    kind = "a PEFT adapter (LoRA) for" if config.lora_rank else "a fine-tuned version of"
    rows = "\n".join(
        f"| {name} | {evaluation.reward} | {len(evaluation.scores)} | {evaluation.unscored} |"
        for name, evaluation in result.evaluations.items()
    )
    table = (
        f"| | mean reward [95 % interval] | tasks | unscored |\n|---|---|---|---|\n{rows}" if rows else "Not evaluated."
    )
    agents = ", ".join(config.optimize) if config.optimize else "all"
    (folder / "README.md").write_text(
        f"""---
base_model: {config.model}
library_name: {"peft" if config.lora_rank else "transformers"}
tags: [agl, reinforcement-learning, {config.algorithm}]
---
# {folder.parent.name}

This is {kind} `{config.model}`, trained with agl: {config.algorithm}, {config.steps} steps of {config.tasks_per_step}
tasks with {config.group_size} rollouts each, learning rate {config.learning_rate:g}, temperature
{config.temperature:g}, seed {config.seed}. Optimised agents: {agents}.

## Held-out reward

{table}
"""
    )

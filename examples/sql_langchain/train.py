"""Train the text-to-SQL agent: ``python examples/sql_langchain/train.py``; ``--help`` lists the options."""

import argparse

from agl_trainer import Trainer, Warmup
from text_to_sql.agent import answer
from text_to_sql.data import curriculum, load
from text_to_sql.demonstrate import demonstrate


def main() -> None:
    """Warm up on demonstrations, then learn from rewards; evaluate on databases that training never sees."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="hub id or directory")
    arguments.add_argument("--split", default="train", choices=["train", "train_small"])
    arguments.add_argument("--joins", type=int, default=0, help="train on queries with so many joins at most")
    arguments.add_argument("--warmup-steps", type=int, default=60)
    arguments.add_argument("--steps", type=int, default=20, help="steps of reinforcement learning")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--output", default="runs/sql")
    chosen = arguments.parse_args()

    trainer = Trainer(
        answer,
        curriculum(load(chosen.split), joins=chosen.joins),
        model=chosen.model,
        optimize=["writer", "rewriter"],
        warmup=Warmup(demonstrate=demonstrate, steps=chosen.warmup_steps, batch=16),
        steps=chosen.steps,
        tasks_per_step=8,
        group_size=8,
        learning_rate=1e-4,
        lora_rank=16,
        eval_tasks=load("val"),
        seed=chosen.seed,
        output_dir=chosen.output,
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()

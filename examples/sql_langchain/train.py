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
    arguments.add_argument("--eval-tasks", type=int, default=None, help="evaluate on the first so many of val only")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--output", default="runs/sql")
    chosen = arguments.parse_args()

    result = Trainer(
        answer,
        curriculum(load(chosen.split), joins=chosen.joins),
        eval_tasks=load("val")[: chosen.eval_tasks],
        model=chosen.model,
        optimize=["writer", "rewriter"],
        # The checker is not optimised, but it has to know its two words.
        warmup=Warmup(demonstrate=demonstrate, agents=["*"], steps=chosen.warmup_steps, batch=16, learning_rate=5e-4),
        steps=chosen.steps,
        tasks_per_step=8,
        group_size=8,
        learning_rate=2e-4,
        lora_rank=16,
        precision="bfloat16",
        max_length=1024,
        slots=64,
        seed=chosen.seed,
        output_dir=chosen.output,
    ).fit()
    for name, evaluation in result.evaluations.items():
        print(f"{name}: reward {evaluation.reward}, execution match {evaluation.parts['match']:.3f}")
    print(f"gain by reinforcement learning: {result.gain}\nkept in {result.folder}")


if __name__ == "__main__":
    main()

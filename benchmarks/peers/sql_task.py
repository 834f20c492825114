"""The task that both trainers learn: write SQL for a question in one call; the reward is what a database says.

Only the standard library: the same code runs in every environment and in agents' processes.
"""

from __future__ import annotations

from pathlib import Path

from agl_demo.world import SCHEMA, build_database, matches, split

HELD_OUT = 64
SPLIT_SEED = 0
ANSWER_TOKENS = 40


class SqlTask:
    """Questions, the database, and the reward."""

    def __init__(self, folder: Path) -> None:
        kept = folder / "shop.sqlite"
        self.database = kept if kept.exists() else build_database(kept)
        self.train, self.held_out = split(HELD_OUT, SPLIT_SEED)

    def messages(self, question: str) -> list[dict[str, str]]:
        """What the model is asked."""
        return [{"role": "system", "content": f"Write SQL. {SCHEMA}"}, {"role": "user", "content": question}]

    def reward(self, answer: str, query: str) -> float:
        """1 when the answer returns what the right query returns, else 0."""
        return float(matches(self.database, answer, query))

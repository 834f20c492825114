"""The task that both trainers learn: write SQL for a question in one call; the reward is what a database says.

It comes with two prompts: a short one, and one as agents have it, with instructions, schema and examples.
Only the standard library: the same code runs in every environment and in agents' processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agl_demo.world import SCHEMA, build_database, matches, split

HELD_OUT = 64
SPLIT_SEED = 0
ANSWER_TOKENS = 40

Prompt = Literal["short", "agent"]

INSTRUCTIONS = """You answer questions about a shop's database. Write one SQL query for SQLite and nothing else.
Rules:
1. Read only: the query begins with SELECT.
2. Use only the tables and columns of the schema.
3. Text stands in single quotes.
4. To count use count, for the highest max, for the lowest min, for the average avg.
5. Do not explain the query.

Tables:
"""
EXAMPLES = 6


class SqlTask:
    """Questions, the database, and the reward."""

    def __init__(self, folder: Path, prompt: Prompt = "short") -> None:
        kept = folder / "shop.sqlite"
        self.database = kept if kept.exists() else build_database(kept)
        train, self.held_out = split(HELD_OUT, SPLIT_SEED)
        shown, rest = train[:EXAMPLES], train[EXAMPLES:]
        examples = "\n\n".join(f"Question: {item['question']}\nSQL: {item['query']}" for item in shown)
        long = prompt == "agent"
        self.train = rest if long else train
        self.system = f"{INSTRUCTIONS}{SCHEMA}\n\nExamples:\n\n{examples}" if long else f"Write SQL. {SCHEMA}"

    def messages(self, question: str) -> list[dict[str, str]]:
        """What the model is asked."""
        return [{"role": "system", "content": self.system}, {"role": "user", "content": question}]

    def reward(self, answer: str, query: str) -> float:
        """1 when the answer returns what the right query returns, else 0."""
        return float(matches(self.database, answer, query))

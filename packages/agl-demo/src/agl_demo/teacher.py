"""The teacher of the warm-up. It is mostly wrong, on purpose: reinforcement learning has to find out what is right."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agl_demo.world import corrupt

RIGHT = 0.25
"""How often a demonstrated query is right."""


class Teacher:
    """Answers the calls of all three agents; the same task and prompt always get the same answer."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, task: Mapping[str, Any], agent: str, prompt: str) -> str:
        """Writer and rewriter answer with SQL, the checker with the truth about it."""
        if agent == "checker":
            return "CORRECT" if task["query"] in prompt else "WRONG"
        order = random.Random(f"{self.seed}/{task['id']}/{prompt}")
        return task["query"] if order.random() < RIGHT else corrupt(task["query"], order)

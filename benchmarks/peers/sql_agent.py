"""The agent that agl trains on the SQL task: it asks once, and lets the database judge."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, cast

from agl import LLM
from peers.sql_task import ANSWER_TOKENS, Prompt, SqlTask

FOLDER, PROMPT = "SQL_TASK", "SQL_TASK_PROMPT"
"""Environment variables: where the database is, and which prompt is used."""


@functools.cache
def sql_task() -> SqlTask:
    """The task, in whichever process the agent runs."""
    return SqlTask(Path(os.environ[FOLDER]), cast(Prompt, os.environ[PROMPT]))


async def answer(item: dict[str, Any], llm: LLM) -> float:
    """One call, one reward."""
    task = sql_task()
    said = await llm.async_client().chat.completions.create(
        model=llm.model, messages=task.messages(item["question"]), max_tokens=ANSWER_TOKENS
    )
    return task.reward(said.choices[0].message.content or "", item["query"])

"""What is measured of a trainer: held-out reward, by the same code for all, and time without the watching."""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from peers.sql_task import ANSWER_TOKENS, SqlTask

SAMPLES = 4
"""Answers to each held-out question."""
SEED = 0


class Clock:
    """Wall-clock and processor seconds since it was made, without those that were spent on watching."""

    def __init__(self) -> None:
        self._since, self._busy_since = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds."""
        return time.perf_counter() - self._since

    @property
    def busy(self) -> float:
        """Processor seconds of all threads of this process."""
        return time.process_time() - self._busy_since

    @property
    def children(self) -> float:
        """Processor seconds of processes that have ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    @contextmanager
    def pause(self) -> Generator[None]:
        """Inside, time does not count."""
        paused, busy = time.perf_counter(), time.process_time()
        yield
        self._since += time.perf_counter() - paused
        self._busy_since += time.process_time() - busy


@torch.no_grad()
def held_out_reward(task: SqlTask, model: Any, tokenizer: Any) -> float:
    """Mean reward of answers to the held-out questions, sampled as in training: that is what training improves."""
    training, state = model.training, torch.get_rng_state()  # what is measured must not depend on being watched
    model.eval()
    torch.manual_seed(SEED)
    chats = [task.messages(item["question"]) for item in task.held_out] * SAMPLES
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    width, pad = max(map(len, prompts)), tokenizer.pad_token_id
    answers = model.generate(
        input_ids=torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        generation_config=GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=ANSWER_TOKENS,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        ),
    )
    torch.set_rng_state(state)
    model.train(training)
    texts = tokenizer.batch_decode(answers[:, width:], skip_special_tokens=True)
    pairs = zip(texts, task.held_out * SAMPLES, strict=True)
    return sum(task.reward(text, item["query"]) for text, item in pairs) / len(texts)

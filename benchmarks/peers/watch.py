"""What is measured of a trainer: held-out reward, by the same code for all, and time without the watching."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from transformers import GenerationConfig

from peers.sql_task import ANSWER_TOKENS, SqlTask

BATCH = 64
"""Answers at once."""
SEED = 0


class Clock:
    """Wall-clock and processor seconds since it was made, without those that were spent on watching."""

    def __init__(self) -> None:
        self._since, self._busy_since = time.perf_counter(), _processor_seconds()

    @property
    def reading(self) -> tuple[float, float]:
        """Wall-clock seconds, and processor seconds of this process and of those that it started and that live."""
        return time.perf_counter() - self._since, _processor_seconds() - self._busy_since

    @contextmanager
    def pause(self) -> Generator[None]:
        """Inside, time does not count."""
        paused, busy = time.perf_counter(), _processor_seconds()
        yield
        self._since += time.perf_counter() - paused
        self._busy_since += _processor_seconds() - busy


def _processor_seconds() -> float:
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@torch.no_grad()
def held_out_reward(task: SqlTask, model: Any, tokenizer: Any, samples: int) -> float:
    """Mean reward of answers to the held-out questions, sampled as in training: that is what training improves.

    Args:
        task: asks.
        model: answers.
        tokenizer: of the model.
        samples: answers to each question.
    """
    training, state = model.training, torch.get_rng_state()  # what is measured must not depend on being watched
    model.eval()
    torch.manual_seed(SEED)
    asked = task.held_out * samples
    rewards: list[float] = []
    for start in range(0, len(asked), BATCH):
        items = asked[start : start + BATCH]
        answers = _answers(model, tokenizer, [task.messages(item["question"]) for item in items])
        rewards += [task.reward(answer, item["query"]) for answer, item in zip(answers, items, strict=True)]
    torch.set_rng_state(state)
    model.train(training)
    return sum(rewards) / len(rewards)


def _answers(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]]) -> list[str]:
    """Sampled answers. What all prompts begin with is computed once: this is not measured, only waited for."""
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    known = model(input_ids=torch.tensor([prompts[0][:shared]]), use_cache=True)
    cache = known.past_key_values if hasattr(known, "past_key_values") else known.cache
    cache.batch_repeat_interleave(len(prompts))
    width, pad = max(map(len, prompts)), tokenizer.pad_token_id
    gaps = [width - len(prompt) for prompt in prompts]
    answers = model.generate(
        input_ids=torch.tensor([p[:shared] + [pad] * gap + p[shared:] for p, gap in zip(prompts, gaps, strict=True)]),
        attention_mask=torch.tensor([[1] * shared + [0] * gap + [1] * (width - shared - gap) for gap in gaps]),
        past_key_values=cache,
        generation_config=GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=ANSWER_TOKENS,
            pad_token_id=pad,
            eos_token_id=tokenizer.eos_token_id,
        ),
    )
    return tokenizer.batch_decode(answers[:, width:], skip_special_tokens=True)

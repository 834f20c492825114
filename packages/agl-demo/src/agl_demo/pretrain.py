"""Make the tiny model of ``agl demo --tiny`` from nothing: ``python -m agl_demo.pretrain FOLDER``.

A Llama of half a million weights with a tokenizer of its own learns the form of the demo's chats from the teacher of
the warm-up, who is mostly wrong. It sees training questions only, never a held-out one.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agl.records import Row, Transition
from agl.transitions import build_rows
from agl_demo.agent import Messages, checker_messages, rewriter_messages, writer_messages
from agl_demo.command import HELD_OUT, SPLIT_SEED
from agl_demo.teacher import RIGHT
from agl_demo.world import build_database, corrupt, run_query, split

VOCABULARY = 640
STEPS = 700
BATCH = 64
SEED = 0


def pretrain(folder: Path, steps: int = STEPS) -> None:
    """Write the model into ``folder``."""
    import torch

    from agl_trainer.algorithms.sft import SFT
    from agl_trainer.batch.pack import TrainRow, micro_batches
    from agl_trainer.batch.weights import token_weights
    from agl_trainer.config import TrainConfig
    from agl_trainer.policy import Policy

    with tempfile.TemporaryDirectory() as scratch:
        begin_with_nothing(Path(scratch) / "model")
        policy = Policy(TrainConfig.of(model=str(Path(scratch) / "model"), learning_rate=3e-3, seed=SEED))
        chats = demonstrations(build_database(Path(scratch) / "shop.sqlite"), random.Random(SEED))
        optimizer = policy.optimizer
        for step in range(steps):
            rows = [as_row(policy.tokenizer, *next(chats)) for _ in range(BATCH)]
            weights = token_weights(rows, "token")
            ready = [TrainRow(row, [1.0] * sum(row.sampled), weight) for row, weight in zip(rows, weights, strict=True)]
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, (steps - step) / (0.5 * steps))
            metrics = policy.update(list(micro_batches(ready, 16384)), SFT())
            if step % 50 == 0 or step == steps - 1:
                print(f"step {step}: loss {metrics['loss']:.3f}", flush=True)
        policy.model.to(torch.bfloat16).save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)


def demonstrations(database: Path, order: random.Random) -> Iterator[tuple[Messages, str]]:
    """Chats of the three agents and what the teacher says, for ever."""
    tasks, _ = split(HELD_OUT, SPLIT_SEED)

    def attempt(task: dict[str, Any]) -> str:
        return task["query"] if order.random() < RIGHT else corrupt(task["query"], order)

    while True:
        for task in order.sample(tasks, len(tasks)):
            query = attempt(task)
            yield writer_messages(task["question"]), query
            rows, error = run_query(database, query)
            if rows is not None:
                yield checker_messages(task["question"], query), "CORRECT" if query == task["query"] else "WRONG"
            if query != task["query"]:
                result = error if rows is None else str(rows[:2])
                yield rewriter_messages(task["question"], query, result), attempt(task)


def as_row(tokenizer: Any, messages: Messages, answer: str) -> Row:
    """A training row: the chat as the engine renders it, the answer as what was sampled."""
    chat = [{"role": role, "content": content} for role, content in messages]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    response = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    demonstrated = Transition(
        rollout="pretrain",
        agent="",
        call="",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=(0.0,) * len(response),
    )
    return build_rows([demonstrated])[0]


def begin_with_nothing(folder: Path) -> None:
    """Random weights, and a byte-level BPE tokenizer trained on the demo's own words."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(_words())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _words() -> list[str]:
    tasks, _ = split(HELD_OUT, SPLIT_SEED)
    texts: list[str] = []
    for task in tasks:
        for _, content in writer_messages(task["question"]) + checker_messages(task["question"], task["query"]):
            texts.append(content)
        texts += [rewriter_messages(task["question"], task["query"], "no such column: nation")[0][1], task["query"]]
    return texts


def train_tokenizer(texts: Sequence[str]) -> Any:
    """Byte-level BPE with ChatML; digits stand alone, so that every number can be copied."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from agl_trainer.testing import CHATML

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[0]
    )
    fast.chat_template = CHATML
    return fast


if __name__ == "__main__":
    pretrain(Path(sys.argv[1]))

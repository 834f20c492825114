"""Engine against trainer, as a program for any interpreter that has torch, transformers, accelerate and peft."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from agl.protocols import Sampling, Token
from agl.records import Row
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.batch.pack import TrainRow, micro_batches
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from agl_trainer.testing import tiny_model

PROMPTS = [[3 + (7 * place * seed) % 250 for place in range(5 + 4 * seed)] for seed in range(12)]


async def differences(folder: Path, **settings: Any) -> torch.Tensor:
    """Sample at three temperatures, twice each so that prefixes are reused, and compute the logprobs again."""
    policy = Policy(TrainConfig.of(model=str(folder), **settings))
    engine = TransformersEngine(policy, slots=4, max_length=512, seed=0)
    engine.start()

    async def one(place: int) -> TrainRow:
        prompt, temperature = PROMPTS[place % len(PROMPTS)], (0.5, 1.0, 1.7)[place % 3]
        tokens: list[Token] = []
        async for token in engine.generate(prompt, Sampling(max_tokens=10 + place, temperature=temperature)):
            tokens.append(token)
        seen, new = len(prompt), len(tokens)
        row = Row(
            rollout=str(place),
            agent="main",
            token_ids=(*prompt, *(token.id for token in tokens)),
            sampled=(False,) * seen + (True,) * new,
            logprobs=(0.0,) * seen + tuple(token.logprob for token in tokens),
            temperatures=(1.0,) * seen + (temperature,) * new,
            transitions=(-1,) * seen + (0,) * new,
        )
        return TrainRow(row, [0.0] * new, [0.0] * new)

    rows = await asyncio.gather(*map(one, range(2 * len(PROMPTS))))
    assert engine.counters()["reused_tokens"] > 0
    engine.stop()
    found = [(policy.logprobs(batch) - batch.rollout_logprobs).abs() for batch in micro_batches(rows, 512)]
    policy.close()
    return torch.cat(found)


class NothingDeprecated(logging.Handler):
    """Fails when the library says that we use something that it is about to remove."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise on the word."""
        assert "deprecated" not in record.getMessage(), record.getMessage()


def main() -> None:
    """Print the largest difference; fail where it is too large."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").addHandler(NothingDeprecated())
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_model(Path(scratch))
        for precision, rank in (("float32", 0), ("float32", 4), ("bfloat16", 4), ("bfloat16", 0)):
            found = asyncio.run(differences(folder, precision=precision, lora_rank=rank))
            mean, worst = float(found.mean()), float(found.max())
            print(f"parity with transformers {transformers.__version__}, {precision}, {rank=}: {mean:.1e}, {worst:.1e}")
            assert worst < 1e-4 if precision == "float32" else mean < 0.02


if __name__ == "__main__":
    main()

"""The embedded engine against the library's own ways to generate: same model, prompts and token counts, one run.

``python benchmarks/engine.py [MODEL] [--precision bfloat16]``. Reported are tokens per second and the ratio to plain
batched ``generate``, which cannot serve requests that come and go. ``generate_batch`` is transformers' continuous
batching; when it is faster than our scheduler, ours should go.

``python benchmarks/engine.py --vllm PYTHON`` holds the embedded engine against vLLM instead, started by that
interpreter as the backend starts it, with update times; figures are kept in ``benchmarks/results/engine_vllm.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from agl.protocols import Sampling
from agl_trainer import attention, canary
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.config import TrainConfig
from agl_trainer.models import SMALL_MODEL
from agl_trainer.policy import Policy

NEW_TOKENS = 48
NO_STOP: frozenset[int] = frozenset()


def prompts(policy: Policy, count: int, shared: bool) -> list[list[int]]:
    """Chats of some 60 tokens; with ``shared`` eight in a row are the same, as in a group of rollouts."""
    texts = [
        f"Tell me a story about dog number {i // 8 if shared else i} and its friends in Paris." for i in range(count)
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [policy.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def with_generate(policy: Policy, asked: list[list[int]]) -> float:
    """One padded batch, started and ended together."""
    width = max(map(len, asked))
    pad = policy.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in asked])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in asked])
    started = time.monotonic()
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    policy.model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=pad, **options)
    return len(asked) * NEW_TOKENS / (time.monotonic() - started)


def with_generate_batch(policy: Policy, asked: list[list[int]]) -> float:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, eos_token_id=-1, pad_token_id=0)
    started = time.monotonic()
    outputs = policy.model.generate_batch(inputs=asked, generation_config=config, progress_bar=False)
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    if tokens != len(asked) * NEW_TOKENS:
        errors = {str(output.error) for output in outputs.values()}
        raise RuntimeError(f"{tokens} tokens for {len(asked)} requests; errors {errors}")
    return tokens / (time.monotonic() - started)


def with_engine(policy: Policy, asked: list[list[int]]) -> float:
    """Ours, every request on its own."""
    policy.stop_ids = NO_STOP
    engine = TransformersEngine(policy, slots=64, max_length=1024, seed=0)
    engine.start()

    async def one(prompt: list[int]) -> int:
        return len([token async for token in engine.generate(prompt, Sampling(max_tokens=NEW_TOKENS))])

    async def everything() -> int:
        return sum(await asyncio.gather(*(one(prompt) for prompt in asked)))

    started = time.monotonic()
    tokens = asyncio.run(everything())
    seconds = time.monotonic() - started
    engine.stop()
    return tokens / seconds


def beside_vllm(chosen: argparse.Namespace) -> None:
    """The embedded engine and vLLM on the same prompts, each answer of `NEW_TOKENS` tokens, second of two runs.

    With a LoRA adapter of rank 1, so that both compute in the precision that their weights are kept in: the embedded
    engine with the adapter beside the base, vLLM with the two merged.
    """
    from agl_trainer.backends.vllm.backend import VllmBackend

    config = TrainConfig.of(model=chosen.model, precision=chosen.precision, max_length=1024, lora_rank=1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        policy = Policy(config, Path(folder))
        for count in (1, 8, 32):
            asked = prompts(policy, count, shared=False)
            with_engine(policy, asked)
            rows.append({"requests": count, "agl": round(with_engine(policy, asked), 1)})
        backend = VllmBackend(policy, config, python=chosen.vllm, devices=["0-1"])
        try:
            started = time.monotonic()
            runner.run(backend.start())
            start = round(time.monotonic() - started, 1)
            for row in rows:
                asked = prompts(policy, row["requests"], shared=False)
                runner.run(with_vllm(backend, asked))
                row["vllm"] = round(runner.run(with_vllm(backend, asked)), 1)
            updates: list[float] = []
            apart = [runner.run(difference(policy, backend))]
            for version in (1, 2, 3):
                policy.version = version
                with torch.no_grad():
                    for parameter in policy.parameters:
                        parameter.add_(0.01)
                started = time.monotonic()
                runner.run(backend.update_weights(version))
                updates.append(round(time.monotonic() - started, 2))
                apart.append(runner.run(difference(policy, backend)))
        finally:
            runner.run(backend.close())
    report = {"model": chosen.model, "precision": chosen.precision, "tokens per second": rows}
    report |= {"start of vllm, seconds": start, "update of all weights, seconds": updates}
    report["mean logprob difference at the start and after each update"] = apart
    print(json.dumps(report, indent=1))
    keep("engine_vllm", report)


async def difference(policy: Policy, backend: Any) -> float:
    """Mean absolute difference of logprobs between vLLM and the trainer."""
    (prompt,) = prompts(policy, 1, shared=False)
    return round(canary.difference(policy, "", prompt, await backend.probe(prompt, NEW_TOKENS)), 6)


async def with_vllm(backend: Any, asked: list[list[int]]) -> float:
    """vLLM's completions on token ids, every request on its own."""
    (replica,) = await backend.fleet.serving()
    started = time.monotonic()
    answers = await asyncio.gather(*(replica.sample("model", prompt, NEW_TOKENS) for prompt in asked))
    return sum(map(len, answers)) / (time.monotonic() - started)


def keep(name: str, figures: Any) -> None:
    """Write figures into ``benchmarks/results``."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    """Measure and print a table; the figures are kept in ``benchmarks/results/engine.json``."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("model", nargs="?", default=SMALL_MODEL)
    arguments.add_argument("--precision", default="bfloat16")
    arguments.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    chosen = arguments.parse_args()
    if chosen.vllm:
        beside_vllm(chosen)
        return
    policy = Policy(TrainConfig.of(model=chosen.model, precision=chosen.precision, lora_rank=1))
    policy.model = policy.model.get_base_model()  # the library's ways are measured without an adapter, so is ours
    ways = {"generate": with_generate, "generate_batch": with_generate_batch, "agl": with_engine}
    results: list[dict[str, Any]] = []
    for count in (1, 8, 32, 64):
        for shared in (False, True) if count > 8 else (False,):
            row: dict[str, Any] = {"requests": count, "shared prompts": shared}
            for name, way in ways.items():
                policy.model.set_attn_implementation(attention.register() if name == "agl" else "sdpa")
                try:
                    with torch.no_grad():  # its own threads refuse tensors of inference mode
                        row[name] = round(way(policy, prompts(policy, count, shared)), 1)
                except Exception as error:  # a way that does not run here is a result, too
                    row[name] = f"{type(error).__name__}: {error}"[:300]
            results.append(row)
            print(row, flush=True)
    keep("engine", results)


if __name__ == "__main__":
    main()

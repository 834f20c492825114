"""The embedded engine: its logprobs are the trainer's own, whoever shares the batch, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import (
    Cohere2Config,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from agl.errors import BackendError, ConfigError, UsageError
from agl.protocols import Sampling, Token
from agl_trainer.backends.transformers import scheduler
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.backends.transformers.slots import Slots, refuse_unsupported
from agl_trainer.batch.pack import TrainRow, micro_batches
from agl_trainer.logprobs import LogprobModel
from agl_trainer.policy import Policy

from .conftest import new_engine, new_policy, row_of, sample

EXACT = 1e-4
"""Largest difference of a logprob between engine and trainer in float32."""


def differences(policy: Policy, answers: Sequence[tuple[Sequence[int], Sequence[Token], float]]) -> torch.Tensor:
    """Engine's logprobs against the trainer's, of prompts with the answers they got at a temperature."""
    rows = [
        TrainRow(row_of(prompt, tokens, temperature), [0.0] * len(tokens), [0.0] * len(tokens))
        for prompt, tokens, temperature in answers
    ]
    found = [(policy.logprobs(batch) - batch.rollout_logprobs).abs() for batch in micro_batches(rows, 1024)]
    return torch.cat(found)


def prompt_of(seed: int, size: int = 20) -> list[int]:
    order = random.Random(seed)
    return [order.randrange(3, 259) for _ in range(size)]


# ------------------------------------------------------------------------------------------------------- parity


async def test_logprobs_equal_the_trainers_at_any_temperature_with_many_at_once(
    policy: Policy, engine: TransformersEngine
):
    """More requests than slots, of every length, some sharing a beginning; some leave before their end."""
    stem = prompt_of(0, 40)
    wanted = [
        ([*stem[: 10 * (seed % 4)], *prompt_of(seed, 1 + seed)], (0.5, 1.0, 1.7)[seed % 3], 3 + 2 * seed)
        for seed in range(24)
    ]

    async def one(place: int) -> tuple[list[int], list[Token], float]:
        prompt, temperature, size = wanted[place]
        await asyncio.sleep(0.001 * place)
        tokens: list[Token] = []
        generation = engine.generate(prompt, Sampling(max_tokens=size, temperature=temperature))
        async with aclosing(cast("AsyncGenerator[Token]", generation)) as stream:
            async for token in stream:
                tokens.append(token)
                if place % 5 == 4 and len(tokens) == 3:
                    break
        return prompt, tokens, temperature

    answers = await asyncio.gather(*map(one, range(len(wanted))))
    assert float(differences(policy, answers).max()) < EXACT
    counters = engine.counters()
    assert counters["reused_tokens"] > 0
    assert counters["prompt_tokens"] == sum(len(prompt) for prompt, _, _ in wanted)


async def test_a_conversation_computes_only_what_is_new(policy: Policy, engine: TransformersEngine):
    prompt = prompt_of(1)
    answers: list[tuple[list[int], list[Token], float]] = []
    for turn in range(4):
        tokens = await sample(engine, prompt, max_tokens=5, temperature=0.5)
        answers.append((prompt, tokens, 0.5))
        prompt = [*prompt, *(token.id for token in tokens), *prompt_of(turn, 4)]
    counters = engine.counters()
    new = counters["prompt_tokens"] - counters["reused_tokens"]
    # The last sampled token of a turn has no keys and values yet: it is computed with the next prompt.
    assert new == len(answers[0][0]) + 3 * (1 + 4)
    assert float(differences(policy, answers).max()) < EXACT


async def test_a_group_that_arrives_together_computes_its_prompt_once(engine: TransformersEngine):
    prompt = prompt_of(2, 30)
    await asyncio.gather(*(sample(engine, prompt, max_tokens=12) for _ in range(4)))
    counters = engine.counters()
    assert counters["prompt_tokens"] - counters["reused_tokens"] == 30 + 3


async def test_memory_grows_under_running_requests(policy: Policy, engine: TransformersEngine):
    started = asyncio.Event()

    async def early() -> list[Token]:
        tokens: list[Token] = []
        async for token in engine.generate(prompt_of(3), Sampling(max_tokens=120, temperature=0.5)):
            tokens.append(token)
            started.set()
        return tokens

    running = asyncio.create_task(early())
    await started.wait()
    (slots,) = (s.slots for s in engine._schedulers.values())
    before = slots.capacity
    long = prompt_of(4, 400)
    tokens = await sample(engine, long)
    assert slots.capacity > before
    answers = [(long, tokens, 1.0), (prompt_of(3), await running, 0.5)]
    assert float(differences(policy, answers).max()) < EXACT


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
async def test_in_bfloat16_engine_and_trainer_stay_close(model_folder: Path, lora_rank: int):
    """After a policy of another precision has closed: Accelerate keeps one for the process until then."""
    new_policy(model_folder).close()
    policy = new_policy(model_folder, precision="bfloat16", lora_rank=lora_rank)
    engine = new_engine(policy)
    answers = [(prompt_of(seed), await sample(engine, prompt_of(5), max_tokens=30), 1.0) for seed in (5, 5, 5)]
    engine.stop()
    found = differences(policy, answers)
    policy.close()
    assert 1e-5 < float(found.mean()) < 0.02, "rounded, and no more than rounded"


async def test_greedy_answers_are_those_of_transformers(policy: Policy, engine: TransformersEngine):
    prompts = [prompt_of(seed, 5 + seed) for seed in range(3)]
    ours = await asyncio.gather(*(sample(engine, prompt, max_tokens=20, temperature=0) for prompt in prompts))
    for prompt, tokens in zip(prompts, ours, strict=True):
        theirs = policy.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=20, do_sample=False
        )
        assert [token.id for token in tokens] == theirs[0, len(prompt) :].tolist()
    assert float(differences(policy, list(zip(prompts, ours, [1.0] * 3, strict=True))).max()) < EXACT


# ------------------------------------------------------------------------------------------------------ sampling


async def test_answers_differ_between_samples_and_repeat_whatever_arrives_when(policy: Policy):
    async def run(order: Sequence[int], slots: int) -> dict[str, list[int]]:
        engine = new_engine(policy, slots=slots, seed=7)

        async def one(name: int) -> tuple[str, list[int]]:
            labels = {"rollout": str(name)}
            first = await sample(engine, prompt_of(6), labels=labels)
            second = await sample(engine, prompt_of(6), labels=labels)
            return str(name), [token.id for token in (*first, *second)]

        answers = dict(await asyncio.gather(*map(one, order)))
        engine.stop()
        return answers

    forward = await run(range(6), 4)
    assert forward == await run(range(5, -1, -1), 2)
    assert len({tuple(ids) for ids in forward.values()}) == 6
    assert all(ids[:8] != ids[8:] for ids in forward.values()), "the second call of a rollout is no copy of the first"


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "lora"])
async def test_an_answer_is_the_same_to_the_last_bit_in_any_company(model_folder: Path, lora_rank: int):
    """A rollout that is run again after a crash meets other neighbours, free slots and reusable prefixes."""
    policy = new_policy(model_folder, lora_rank=lora_rank)
    stems = [prompt_of(seed, 7 + 30 * seed) for seed in range(3)]

    async def conversation(engine: TransformersEngine, place: int, pause: float) -> list[Token]:
        prompt, said = [*stems[place % 3], *prompt_of(place, place)], list[Token]()
        await asyncio.sleep(pause)
        for turn in range(3):
            tokens = await sample(engine, prompt, max_tokens=3 + place, seed=10 * place + turn)
            said += tokens
            prompt = [*prompt, *(token.id for token in tokens), *prompt_of(turn, 5)]
        return said

    def meet(slots: int, pauses: random.Random) -> Any:
        engine = new_engine(policy, slots=slots)
        places = pauses.sample(range(8), 8)
        return engine, places, [conversation(engine, place, 0.02 * pauses.random()) for place in places]

    found: list[dict[int, list[Token]]] = []
    for trial, slots in enumerate((1, 3, 8)):
        engine, places, talks = meet(slots, random.Random(trial))
        found.append(dict(zip(places, await asyncio.gather(*talks), strict=True)))
        engine.stop()
    for other in found[1:]:
        for place in range(8):
            assert found[0][place] == other[place], place


async def test_a_seed_of_the_request_rules_and_each_choice_has_its_own(engine: TransformersEngine):
    async def ids(seed: int) -> tuple[int, ...]:
        return tuple(token.id for token in await sample(engine, prompt_of(7), seed=seed))

    assert await ids(1) == await ids(1) != await ids(2)


def probabilities(**sampling: Any) -> list[float]:
    """Probability of each of five tokens, as the sampler reports the ones that it draws."""
    logits = torch.tensor([[2.0, 1.5, 0.0, -1.0, -3.0]])
    found = [0.0] * 5
    for step in range(2000):
        (token,), (logprob,) = scheduler.sample(logits, [(Sampling(max_tokens=1, **sampling), step / 2000)])
        assert found[token] in (0.0, math.exp(logprob))
        found[token] = math.exp(logprob)
    return found


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [({}, 5), ({"top_k": 2}, 2), ({"top_p": 0.8}, 2), ({"top_k": 3, "top_p": 0.99}, 3), ({"temperature": 0.1}, 5)],
)
def test_processed_logprobs_sum_to_one_over_what_is_kept(sampling: dict[str, Any], kept: int):
    found = probabilities(**sampling)
    # At temperature 0.1 the last tokens are too unlikely to be drawn, and have no share worth counting.
    assert sum(value > 0 for value in found) == (kept if "temperature" not in sampling else 2)
    assert sum(found) == pytest.approx(1.0, abs=1e-4)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([[2.0, 1.5, 0.0, -1.0, -3.0]])
    wanted = (logits[0] / 0.7).softmax(-1)
    drawn = Counter(
        scheduler.sample(logits, [(Sampling(max_tokens=1, temperature=0.7), (step + 0.5) / 4000)])[0][0]
        for step in range(4000)
    )
    for token, probability in enumerate(wanted.tolist()):
        assert drawn[token] / 4000 == pytest.approx(probability, abs=1e-3)


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 0.5}, {}])
def test_the_largest_random_number_draws_a_token_that_was_kept(sampling: dict[str, Any]):
    """In float32 it rounds to 1.0, which lies past the end of every distribution."""
    logits = torch.tensor([[9.0, -1.0, -200.0]])
    almost_one = math.nextafter(1.0, 0.0)
    (token,), (logprob,) = scheduler.sample(logits, [(Sampling(max_tokens=1, **sampling), almost_one)])
    assert token in (0, 1) and math.isfinite(logprob)


async def test_an_answer_ends_with_a_stop_token_or_at_its_limit(policy: Policy, engine: TransformersEngine):
    limited = await sample(engine, prompt_of(8), max_tokens=1)
    assert [token.finish_reason for token in limited] == ["length"]
    table = torch.zeros(1, 259)
    table[0, 2] = 50.0  # end of turn
    ids, _ = scheduler.sample(table, [(Sampling(max_tokens=1), 0.5)])
    assert ids == [2] and 2 in policy.stop_ids
    reasons = Counter[Any]()
    answers = (sample(engine, prompt_of(8), max_tokens=200, seed=seed, temperature=1.7) for seed in range(30))
    for tokens in await asyncio.gather(*answers):
        assert all(token.finish_reason is None and token.id != 2 for token in tokens[:-1])
        reasons[tokens[-1].finish_reason, tokens[-1].id == 2] += 1
    assert set(reasons) <= {("stop", True), ("length", False)} and reasons["stop", True] > 0


# ------------------------------------------------------------------------------------------------- frozen base


def scramble(policy: Policy) -> None:
    """Change the weights a lot."""
    generator = torch.Generator().manual_seed(3)
    with policy.lock, torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize(
    "settings", [{"unselected": "frozen"}, {"algorithm": {"name": "grpo", "kl_coef": 0.1}}, {"lora_rank": 4}]
)
async def test_the_frozen_base_stays_as_it_was_beside_the_policy(model_folder: Path, settings: dict[str, Any]):
    policy = new_policy(model_folder, **settings)
    engine = new_engine(policy)
    before = await sample(engine, prompt_of(9), seed=1)
    scramble(policy)
    engine.refresh(1)
    # Both at once: neither may see the other's keys and values.
    now, frozen, again = await asyncio.gather(
        sample(engine, prompt_of(9), seed=1),
        sample(engine, prompt_of(9), seed=1, frozen=True),
        sample(engine, prompt_of(9), seed=1),
    )
    engine.stop()
    assert [token.id for token in frozen] == [token.id for token in before]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(frozen, before, strict=True)) < EXACT
    assert [token.logprob for token in now] != [token.logprob for token in before]
    assert float(differences(policy, [(prompt_of(9), now, 1.0), (prompt_of(9), again, 1.0)]).max()) < EXACT
    (batch,) = micro_batches([TrainRow(row_of(prompt_of(9), frozen), [0.0] * len(frozen), [0.0] * len(frozen))], 1)
    assert float((policy.reference_logprobs(batch) - batch.rollout_logprobs).abs().max()) < EXACT


async def test_a_frozen_answer_is_refused_where_no_frozen_base_is_kept(engine: TransformersEngine):
    """Silence would serve the trained weights under the frozen name."""
    with pytest.raises(UsageError, match="unselected='frozen'"):
        await sample(engine, prompt_of(9), frozen=True)
    assert await sample(engine, prompt_of(9)), "and the engine lives on"


# -------------------------------------------------------------------------------------------------- new weights


async def test_new_weights_forget_what_the_old_ones_computed(policy: Policy):
    engine = new_engine(policy)
    await sample(engine, prompt_of(10))
    scramble(policy)
    engine.refresh(5)
    tokens = await sample(engine, prompt_of(10))
    engine.stop()
    assert {token.version for token in tokens} == {5}
    assert float(differences(policy, [(prompt_of(10), tokens, 1.0)]).max()) < EXACT


async def test_without_the_refresh_the_difference_shows(policy: Policy):
    """What the canary looks for: keys and values of old weights under new ones."""
    engine = new_engine(policy)
    await sample(engine, prompt_of(10))
    scramble(policy)
    tokens = await sample(engine, prompt_of(10))
    engine.stop()
    assert float(differences(policy, [(prompt_of(10), tokens, 1.0)]).mean()) > 1e-3


async def test_an_answer_under_way_goes_on_with_the_new_weights(policy: Policy):
    """An agent that was given up may still be talking while the weights change."""
    engine = new_engine(policy)
    tokens: list[Token] = []
    prompt = prompt_of(11)
    changed = False
    async for token in engine.generate(prompt, Sampling(max_tokens=200, temperature=0.5, seed=1)):
        tokens.append(token)
        if len(tokens) == 5:
            scramble(policy)
            engine.refresh(1)
            changed = True
    engine.stop()
    first = next(place for place, token in enumerate(tokens) if token.version == 1)
    assert changed and 5 <= first < len(tokens)
    known = [*prompt, *(token.id for token in tokens[:first])]
    assert float(differences(policy, [(known, tokens[first:], 0.5)]).max()) < EXACT


# ------------------------------------------------------------------------------------------------------ failures


class Broken(RuntimeError):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise Broken("out of memory, say")


@pytest.mark.parametrize("place", ["forward", "reserve"])
async def test_a_failure_reaches_everybody_who_waits(policy: Policy, monkeypatch: pytest.MonkeyPatch, place: str):
    """Ten requests on four slots: running, just admitted, waiting, and asked for later."""
    engine = new_engine(policy)
    await sample(engine, prompt_of(12))
    with policy.lock:
        asked = [asyncio.create_task(sample(engine, prompt_of(seed), max_tokens=300)) for seed in range(10)]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(Slots, place, fail)
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert all(isinstance(answer, BackendError) and "out of memory, say" in str(answer) for answer in answers), answers
    with pytest.raises(BackendError, match="out of memory, say"):
        await sample(engine, prompt_of(0))
    engine.stop()


async def test_stopping_the_engine_ends_every_wait(policy: Policy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "stop_ids", frozenset[int]())  # no answer may end by itself before
    engine = new_engine(policy)
    asked = [asyncio.create_task(sample(engine, prompt_of(seed), max_tokens=8000)) for seed in range(6)]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(engine.stop)
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert all(isinstance(answer, BackendError) and "stopped" in str(answer) for answer in answers), answers


async def test_whoever_leaves_frees_the_slot(policy: Policy):
    engine = new_engine(policy, slots=1)
    endless = asyncio.create_task(sample(engine, prompt_of(13), max_tokens=480))
    waiting = asyncio.create_task(sample(engine, prompt_of(14)))
    for _ in range(50):
        await asyncio.sleep(0.01)
        if engine.counters()["sampled_tokens"] > 3:
            break
    endless.cancel()
    assert len(await asyncio.wait_for(waiting, 10)) >= 1
    assert engine.counters()["sampled_tokens"] < 480
    engine.stop()


# ---------------------------------------------------------------------------------------------- other models


def sliding() -> list[Any]:
    return [
        Gemma2Config(num_hidden_layers=2),
        MistralConfig(sliding_window=64),
        Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1, num_hidden_layers=2),
        Cohere2Config(num_hidden_layers=4),
    ]


@pytest.mark.parametrize("config", sliding(), ids=lambda config: config.model_type)
def test_a_model_with_a_sliding_window_is_refused(config: Any):
    with pytest.raises(ConfigError, match=r"full attention|sliding"):
        refuse_unsupported(config, max_length=512)


@pytest.mark.parametrize(
    "config", [MistralConfig(sliding_window=None), Qwen2Config(sliding_window=64), Qwen3Config(), LlamaConfig()]
)
def test_a_model_with_full_attention_is_served(config: Any):
    refuse_unsupported(config, max_length=512)


def test_a_window_that_is_never_reached_is_no_window():
    refuse_unsupported(MistralConfig(sliding_window=4096), max_length=4096)


def test_an_engine_refuses_at_its_start_not_at_the_first_request(policy: Policy):
    policy.model.config.sliding_window = 64
    with pytest.raises(ConfigError, match="sliding"):
        TransformersEngine(policy, slots=2, max_length=512, seed=0)


@pytest.mark.parametrize(
    ("config", "name"),
    [(Gemma2Config(), "final_logit_softcapping"), (GraniteConfig(logits_scaling=8.0), "logits_scaling")],
)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(config: Any, name: str):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

    with pytest.raises(ConfigError, match=name):
        LogprobModel(Model())


def test_common_prefix_of_arrays():
    one, other = np.array([1, 2, 3]), np.array([1, 2, 4, 5])
    assert scheduler.common_prefix(one, other) == 2
    assert scheduler.common_prefix(one, one[:2]) == 2
    assert scheduler.common_prefix(one, one[:0]) == 0


# --------------------------------------------------------------------------------------- the newest transformers

"""Runs of a tiny model with each kind of credit: what the loop makes of turns, states, signals and equal groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import agl
from agl import scope
from agl_trainer import Trainer
from agl_trainer.tasks import epochs, read_tasks

Train = Callable[..., Trainer]

TASKS = [{"id": name, "question": f"Say {name}"} for name in "abcdef"]


async def ask(llm: agl.LLM, question: str) -> str:
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": question}], max_tokens=4
        )
    return answer.choices[0].message.content or ""


def spread(text: str) -> float:
    """A reward that differs from answer to answer."""
    return float(sum(map(ord, text)) % 101)


@pytest.fixture
def train(model_folder: Path, tmp_path: Path) -> Train:
    def trainer(agent: Any, **settings: Any) -> Trainer:
        small = {"steps": 1, "tasks_per_step": 2, "group_size": 4, "max_length": 256, "slots": 16}
        places = {"model": str(model_folder), "output_dir": str(tmp_path / "runs"), "stall_timeout": 60}
        return Trainer(agent, settings.pop("tasks", TASKS), **{**small, **places, **settings})

    return trainer


def run(trainer: Trainer) -> list[dict[str, float]]:
    with trainer.session:
        return [trainer.step(batch) for batch in trainer.batches()]


async def forgetful(task: Mapping[str, Any], llm: agl.LLM) -> float:
    """Asks the same question up to three times, so that it meets one state again and again."""
    total = 0.0
    for _ in range(3):
        text = await ask(llm, task["question"])
        total += spread(text)
        if len(text) % 2:
            break
    return total


@pytest.mark.parametrize("baseline", ["turn", "state", {"state": 0.5}])
def test_discounted_credit_by_turn_and_by_state_changes_the_weights(train: Train, baseline: Any):
    trainer = train(forgetful, baseline=baseline, discount=0.9)
    with trainer.session as session:
        rollouts = next(trainer.batches())
        scored, gains = session.judge(rollouts, trainer.algorithm)
        for item in scored:  # the return of each call is 0.9 times that of the next
            rewards = [one.reward or 0.0 for one in item.transitions]
            assert item.rollout.returned is not None and rewards[-1] == item.rollout.returned.total
            assert rewards[:-1] == pytest.approx([0.9 * reward for reward in rewards[1:]])
        assert max(len(own) for own in gains) > 1 and any(len(set(own)) > 1 for own in gains)
        metrics = trainer.step(rollouts)
        assert metrics["grad_norm"] > 0 and session.policy.version == 1
        assert metrics["agent/main/calls"] == metrics["transitions"] > 8


async def clumsy(task: Mapping[str, Any], llm: agl.LLM) -> float:
    """Every rollout earns the same; only the tools differ."""
    rollout = scope.current_rollout()
    assert rollout is not None
    failed = spread(await ask(llm, task["question"])) % 2
    rollout.emit("tool_start", "tool")
    rollout.emit("tool_error" if failed else "tool_end", "tool")
    await ask(llm, "Go on")
    return 1.0


def test_a_weighted_signal_teaches_where_outcomes_are_equal(train: Train):
    (metrics,) = run(train(clumsy, signals={"tool_error": -1.0}, baseline="turn", discount=1.0, group_size=8))
    failures = metrics["signal/tool_error"]
    assert 0 < failures < 1 and metrics["signal/tool_success"] == 1 - failures
    assert metrics["reward"] == 1.0 and metrics["agent/main/reward"] == pytest.approx(1 - failures)
    assert metrics["degenerate_groups"] < 1 and metrics["grad_norm"] > 0


def test_an_unweighted_signal_teaches_nothing(train: Train):
    (metrics,) = run(train(clumsy, group_size=8))
    assert 0 < metrics["signal/tool_error"] < 1
    assert metrics["degenerate_groups"] == 1 and "grad_norm" not in metrics


def test_equal_groups_are_refilled_in_the_order_of_the_epoch(train: Train):
    async def seldom(task: Mapping[str, Any], llm: agl.LLM) -> float:
        text = await ask(llm, task["question"])
        return spread(text) if task["id"] in "ace" else 0.0

    trainer = train(seldom, refill=5, steps=2)
    seen: list[set[str]] = []
    lines: list[dict[str, float]] = []
    with trainer.session as session:
        for batch in trainer.batches():
            seen.append({rollout.task.id for rollout in batch})
            lines.append(trainer.step(batch))
        ended = [session.services.run(session.services.client.collect(f"batch{n:05d}"))[1] for n in range(1, 13)]
    assert all(len(ids) == 2 and ids <= set("ace") for ids in seen), "each step has two groups that teach something"
    played = {rollout.id[:-2]: rollout.task.id for batch in ended for rollout in batch}  # by batch and place
    drawn = [played[place] for place in sorted(played)]
    order = [task.id for task in islice(epochs(read_tasks(TASKS), 0), len(drawn))]
    assert drawn == order, "no task is lost and none comes twice, refilled or not"
    thrown = [task for task in drawn if task not in "ace"]
    assert sum(line["refill/groups"] for line in lines) == len(thrown) > 0
    assert sum(line["refill/rollouts"] for line in lines) == 4 * len(thrown)
    assert all(line["degenerate_groups"] == 0 and line["rollouts"] == 8 and line["grad_norm"] > 0 for line in lines)


def test_groups_that_stay_equal_at_the_cap_are_counted(train: Train):
    async def equal(task: Mapping[str, Any], llm: agl.LLM) -> float:
        await ask(llm, task["question"])
        return 1.0

    (metrics,) = run(train(equal, refill=1))
    assert metrics["degenerate_groups"] == 1 and metrics["rollouts"] == 8
    assert metrics["refill/groups"] == 2 and metrics["refill/rollouts"] == 8 and metrics["refill/tokens"] >= 8


def test_answers_cut_off_and_prompts_too_long_are_counted(train: Train):
    async def wordy(task: Mapping[str, Any], llm: agl.LLM) -> float:
        text = await ask(llm, task["question"])
        if task["id"] in "ace":
            await ask(llm, "word " * 300)
        return spread(text)

    (metrics,) = run(train(wordy, max_attempts=1, tasks=TASKS[:2], tasks_per_step=2))
    assert metrics["truncated_answers"] > 0
    assert metrics["overlong_prompts"] == metrics["outcome/agent_error"] == metrics["unscored"] == 4
    assert metrics["outcome/timeout"] == metrics["outcome/infra_error"] == 0


def test_timeouts_are_counted(train: Train):
    async def slow(task: Mapping[str, Any], llm: agl.LLM) -> float:
        import asyncio

        text = await ask(llm, task["question"])
        if task["id"] == "a":
            await asyncio.sleep(60)
        return spread(text)

    (metrics,) = run(train(slow, max_attempts=1, tasks=TASKS[:2], rollout_timeout=4))
    assert metrics["outcome/timeout"] == metrics["unscored"] == 4 and metrics["transitions"] == 4

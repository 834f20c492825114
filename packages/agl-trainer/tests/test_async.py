"""Asynchronous training: rollouts go on during updates, none older than the cap, in the order that sync has too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import ConfigError
from agl.records import Call, Rollout, Task, Transition
from agl_trainer import Trainer
from agl_trainer.batch.build import Scored, staleness
from agl_trainer.config import TrainConfig

from . import test_resume as resume
from .test_loop import ask, letters, metrics_of

TASKS = [{"id": str(number), "question": f"Say {number}"} for number in range(7)]
STEPS = 6


class Diary:
    """An agent whose tool is slow now and then; it notes what ran when."""

    def __init__(self) -> None:
        self.order = random.Random(0)
        self.running = 0
        self.most = 0
        self.versions_at_start: list[int] = []
        self.session: Any = None

    async def __call__(self, task: Mapping[str, Any], llm: agl.LLM) -> float:
        self.running += 1
        self.most = max(self.most, self.running)
        self.versions_at_start.append(self.session.policy.version)
        try:
            await asyncio.sleep(self.order.choice([0.0, 0.0, 0.0, 0.4]))
            return letters(await ask(llm, task["question"])) + self.order.random() / 100
        finally:
            self.running -= 1


def run(model_folder: Path, output: Path, **settings: Any) -> tuple[Trainer, Diary, list[list[Rollout]]]:
    diary = Diary()
    small: dict[str, Any] = {"steps": STEPS, "tasks_per_step": 2, "group_size": 4, "max_length": 256, "slots": 16}
    places = {"model": str(model_folder), "output_dir": str(output), "stall_timeout": 30}
    trainer = Trainer(diary, TASKS, **{**small, **places, "learning_rate": 1e-3, **settings})
    diary.session = trainer.session
    batches: list[list[Rollout]] = []
    for batch in trainer.batches():
        batches.append(batch)
        trainer.step(batch)
    return trainer, diary, batches


@pytest.mark.slow
@pytest.mark.parametrize("cap", [1, 3])
def test_rollouts_run_ahead_and_none_is_older_than_the_cap(model_folder: Path, tmp_path: Path, cap: int) -> None:
    trainer, diary, batches = run(model_folder, tmp_path / "a", mode={"async": cap})
    steps = metrics_of(trainer.folder)
    assert [line["version"] for line in steps] == list(range(1, STEPS + 1))
    ages = [line["staleness/max"] for line in steps]
    assert max(ages) == cap, "it does run ahead, and as far as it may"
    assert ages[0] == 0 and all(line["staleness/tokens"] > 0 for line in steps if line["staleness/max"])
    for place, batch in enumerate(batches):
        versions = [call.policy_version for rollout in batch for call in rollout.calls]
        assert all(version is not None and place - cap <= version <= place for version in versions)
    assert diary.most > 8, "more rollouts were under way than one step has"
    assert len(diary.versions_at_start) == STEPS * 8, "none was played in vain, and none twice"


@pytest.mark.slow
def test_both_modes_train_on_the_same_tasks_in_the_same_order(model_folder: Path, tmp_path: Path) -> None:
    asked: list[list[list[tuple[str, str]]]] = []
    for mode in ("sync", "async"):
        trainer, diary, batches = run(model_folder, tmp_path / mode, mode=mode)
        asked.append([[(rollout.id, rollout.task.id) for rollout in batch] for batch in batches])
        if mode == "sync":
            assert all(line["staleness/max"] == 0 for line in metrics_of(trainer.folder))
            assert diary.most <= 8
    assert asked[0] == asked[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_loses_and_repeats_no_task(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(resume.KINDS, "async", ({"mode": {"async": 2}, "steps": 4, "checkpoint_every": 1}, False))
    fates: list[dict[str, int]] = [{"call": 9}, {"learn": 1}, {"apply end": 1}, {"rename end": 1}, {"call": 20}]
    whole = resume.run(model_folder, tmp_path / "whole", "async")
    killed = resume.run(model_folder, tmp_path / "killed", "async", *fates)
    assert resume.rollouts(killed) == resume.rollouts(whole)
    lines = [line for line in metrics_of(killed) if "staleness/max" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    # Rollouts that were begun before the kill may end after it, when the weights of the checkpoint serve again.
    assert all(line["staleness/max"] <= 2 for line in lines)


def test_refilled_steps_and_runs_ahead_agree_about_the_tasks(model_folder: Path, tmp_path: Path) -> None:
    """Equal rewards in every group: each step draws an extra batch, and no task is drawn twice for it."""

    async def equal(task: Mapping[str, Any], llm: agl.LLM) -> float:
        await ask(llm, task["question"])
        return 1.0

    trainer = Trainer(
        equal,
        TASKS,
        model=str(model_folder),
        output_dir=str(tmp_path),
        mode="async",
        refill=1,
        steps=3,
        tasks_per_step=2,
        group_size=2,
        max_length=256,
        stall_timeout=30,
    )
    numbers: list[int] = []
    for batch in trainer.batches():
        numbers += sorted({int(rollout.batch.removeprefix("batch")) for rollout in batch})
        trainer.step(batch)
    assert numbers == sorted(numbers)
    assert trainer.session.position.ahead == []


def test_ages_are_counted_by_token() -> None:
    def call(version: int | None, size: int) -> Transition:
        ids = tuple(range(size))
        return Transition(
            rollout="r",
            agent="main",
            call="c",
            prompt_ids=(1,),
            response_ids=ids,
            logprobs=(-1.0,) * size,
            policy_version=version,
        )

    rollout = Rollout(id="r", task=Task(id="t", data={}), batch="b", calls=(Call(id="c", rollout="r", attempt=1),))
    scored = [Scored(rollout, [call(5, 3), call(3, 1), call(None, 9)])]
    assert staleness(scored, 5) == {
        "staleness/mean": 0.5,
        "staleness/max": 2.0,
        "staleness/tokens": 1.0,
        "staleness/calls": 1.0,
    }


@pytest.mark.parametrize("wrong", ["asynchronous", {"async": 0}, {"async": True}, {"sync": 1}, 2])
def test_a_wrong_mode_is_refused_with_what_is_wanted(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"mode.*'sync', 'async', or \{'async': k\}"):
        TrainConfig.of(model="m", mode=wrong)


def test_the_cap_of_plain_async_is_two_updates() -> None:
    assert [TrainConfig.of(model="m", mode=mode).ahead for mode in ("sync", "async", {"async": 5})] == [0, 2, 5]

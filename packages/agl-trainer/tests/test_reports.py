"""Public reports about other trainers, on inputs small enough to compute by hand (reference/training.md §5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from agl.errors import CaptureError
from agl.records import Call, Choice, Reward, Rollout, Task
from agl.selection import Selection
from agl.transitions import build_rows
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.batch.build import Scored, advantages, credited, train_rows
from agl_trainer.logprobs import selected_logprobs

from .conftest import transition

CENTRED = GRPO(scale="none")


def scored(rollout: str, reward: float, calls: int, task: str = "t", size: int = 4) -> Scored:
    """A rollout whose calls do not extend one another, so that every call becomes a row."""
    record = Rollout(id=rollout, task=Task(id=task, data={}), batch="b", outcome="ok", returned=Reward.of(reward))
    prompts = [(100 + place, 7) for place in range(calls)]
    return Scored(record, [transition(prompt, [9] * size, rollout, reward=reward) for prompt in prompts])


def gains(step: Sequence[Scored], algorithm: GRPO = CENTRED) -> list[list[float]]:
    return advantages(step, algorithm, "task")


def test_slime_1414_unequal_groups_have_baselines_of_their_own():
    rewards = {"a": [1, 1, 1], "b": [0, 0, 0, 1], "c": [5, 5]}
    step = [scored(f"{task}{place}", r, 1, task) for task, group in rewards.items() for place, r in enumerate(group)]
    got = [value for (value,) in gains(step)]
    assert got == [0.0, 0.0, 0.0, -0.25, -0.25, -0.25, 0.75, 0.0, 0.0]


def test_a_group_is_divided_by_its_sample_standard_deviation():
    # 1e-4 in the divisor moves the textbook values 1.5 and -0.5 by 2e-4 of themselves
    got = GRPO().advantages([1, 0, 0, 0], ["g"] * 4)
    assert got == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3], rel=1e-12)


def test_miles_2378_a_rollout_of_two_rows_counts_once_in_the_baseline():
    assert gains([scored("a", 1.0, 2), scored("b", 0.5, 1)]) == [[0.25, 0.25], [-0.25]]


def test_agl_445_one_turn_and_nine_turns_weigh_the_same():
    step = [scored("short", 1.0, 1), scored("long", 1.0, 9)]
    rows = train_rows(step, [[1.0], [1.0] * 9], GRPO(), 512)
    total = {name: sum(sum(r.weights) for r in rows if r.row.rollout == name) for name in ("short", "long")}
    assert total == pytest.approx({"short": 0.5, "long": 0.5}, rel=1e-12)


def test_a_rollout_left_out_for_its_zero_advantage_still_counts_in_the_mean():
    step = [scored("a", 1.0, 1), scored("b", 0.0, 3), scored("c", 2.0, 1, "alone")]
    rows = train_rows(step, gains(step), GRPO(), 512)
    assert {r.row.rollout for r in rows} == {"a", "b"}
    assert sum(sum(r.weights) for r in rows) == pytest.approx(2 / 3, rel=1e-12)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_verl_314_a_group_of_one_learns_nothing(scale):
    assert GRPO(scale=scale).advantages([3.0], ["g"]) == [0.0]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -2.5])
def test_a_group_of_equal_rewards_learns_nothing(reward: float):
    """0.1 has no exact binary form: a mean of ten of them must not leave a rest that the deviation blows up."""
    assert GRPO().advantages([reward] * 10, ["g"] * 10) == [0.0] * 10


def test_art_883_a_suffix_under_a_changed_prefix_forks_with_its_own_logprobs():
    first = transition([1, 2, 3], [4, 5], logprobs=(-0.1, -0.2))
    changed = transition([1, 9, 3, 4, 5, 6], [7], logprobs=(-0.3,))
    rows = build_rows([first, changed])
    assert [row.token_ids for row in rows] == [(1, 2, 3, 4, 5), (1, 9, 3, 4, 5, 6, 7)]
    assert rows[0].logprobs[3:] == (-0.1, -0.2)
    # The 4 and 5 of the second row were observed, not sampled there: they are not trained twice.
    assert [sum(row.sampled) for row in rows] == [2, 1]
    assert rows[1].logprobs[6:] == (-0.3,)


@pytest.mark.parametrize("logprobs", [(), (-0.1,), (-0.1, -0.2, -0.3)])
def test_rllm_816_ids_without_as_many_logprobs_are_refused(logprobs: tuple[float, ...]):
    with pytest.raises(CaptureError, match=f"2 token ids but {len(logprobs)} logprobs"):
        Choice(response_ids=(1, 2), logprobs=logprobs)


def test_prime_rl_2975_a_shared_answer_is_trained_once():
    root = transition([1], [2, 3])
    left = transition([1, 2, 3, 4], [5])
    right = transition([1, 2, 3, 6], [7])
    rows = build_rows([root, left, right])
    places = [place for row in rows for place in zip(row.transitions, row.token_ids, strict=True)]
    assert sorted((index, token) for index, token in places if index >= 0) == [(0, 2), (0, 3), (1, 5), (2, 7)]


def test_trl_4159_logprobs_are_taken_after_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).double().expand(3, 3)
    temperatures = torch.full((3,), 0.5)
    got, _ = selected_logprobs(nn.Identity(), logits, torch.arange(3), temperatures)
    assert got.tolist() == pytest.approx([-0.14, -2.14, -4.14], abs=5e-3)


def test_logprobs_of_a_merged_row_are_not_mixed_between_temperatures():
    cold = transition([1], [2], temperature=0.5)
    hot = transition([1, 2, 3], [4], temperature=1.5)
    (row,) = build_rows([cold, hot])
    assert row.temperatures == (1.0, 0.5, 1.0, 1.5)


def test_a_missing_reward_is_left_out_and_not_zero():
    choice = Choice(response_ids=(5,), logprobs=(-0.5,))

    def rollout(name: str, reward: float | None) -> Rollout:
        call = Call(id=name, rollout=name, attempt=1, prompt_ids=(1,), choices=(choice,))
        returned = None if reward is None else Reward.of(reward)
        return Rollout(id=name, task=Task(id="t", data={}), batch="b", outcome="ok", returned=returned, calls=(call,))

    step = credited([rollout("a", 1.0), rollout("b", None), rollout("c", 0.5)], Selection(None))
    assert [item.rollout.id for item in step] == ["a", "c"]
    assert gains(step) == [[0.25], [-0.25]]

"""Public reports about other trainers, on inputs small enough to compute by hand (reference/training.md §5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from agl.errors import CaptureError
from agl.records import Call, Choice, Reward, Rollout, Row, Task
from agl.selection import Selection
from agl.transitions import build_rows
from agl_trainer import algorithms
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.kl import kl_divergence
from agl_trainer.batch.build import Scored, advantages, credited, train_rows
from agl_trainer.batch.pack import TrainRow, micro_batches
from agl_trainer.batch.weights import Aggregation, token_weights
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


# ------------------------------------------------------------------------- goldens of reference/training.md, §2


@pytest.mark.parametrize(
    ("chosen", "rewards", "wanted"),
    [
        ({"name": "grpo", "epsilon": 0.0}, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),  # population: 1.73 and -0.58
        ({"name": "grpo", "epsilon": 1e-6}, [0.001, 0, 0, 0], [1.497, -0.499, -0.499, -0.499]),
        ({"name": "grpo"}, [0.001, 0, 0, 0], [1.25, -0.4167, -0.4167, -0.4167]),
        ({"name": "grpo", "scale": "none"}, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ({"name": "rloo"}, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    ],
    ids=str,
)
def test_the_golden_advantages(chosen: dict[str, Any], rewards: list[float], wanted: list[float]):
    assert algorithms.make(chosen).advantages(rewards, ["g"] * 4) == pytest.approx(wanted, abs=5e-4)


def tokens(count: int, rollout: str) -> Row:
    (row,) = build_rows([transition([1], [2] * count, rollout)])
    return row


def test_trl_7206_a_mean_over_tokens_does_not_depend_on_micro_batches():
    """100 tokens of loss 2 and 900 of loss .5 are .65 in the mean; the mean of the two means is 1.25."""
    rows = [tokens(100, "a"), tokens(900, "b")]
    shares = token_weights(rows, "token")
    assert sum(shares[0]) * 2.0 + sum(shares[1]) * 0.5 == pytest.approx(0.65, rel=1e-12)


@pytest.mark.parametrize("aggregation", ["token", "constant", "rollout", "sequence"])
def test_trl_6024_and_verl_3741_shares_are_fixed_before_rows_are_spread(aggregation: Aggregation):
    """However rows fall into micro-batches or ranks, a token's share is that of the whole step."""
    rows = [tokens(size, str(size)) for size in (3, 5, 2, 7)]
    shares = token_weights(rows, aggregation, length=8)
    items = [TrainRow(row, [0.0] * len(own), own) for row, own in zip(rows, shares, strict=True)]
    flat = torch.tensor([share for own in shares for share in own], dtype=torch.float64)
    for parts in ([items], [items[:2], items[2:]], [items[:1], items[1:3], items[3:]]):
        for budget in (1, 8, 1000):
            found = torch.cat([batch.weights for part in parts for batch in micro_batches(part, budget)])
            assert sorted(found.tolist()) == sorted(flat.tolist())
    total = {"token": 1.0, "rollout": 1.0, "sequence": 1.0, "constant": 17 / (4 * 8)}[aggregation]
    assert float(flat.sum()) == pytest.approx(total, rel=1e-12)


def test_trl_4967_plain_k3_in_the_loss_pulls_along_the_forward_kl():
    """Its gradient is that of KL(reference || policy), so ours is straight-through: the value of k3, k2's gradient."""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    probability, difference = logprobs.exp().detach(), logprobs - reference
    plain = (probability * ((-difference).exp() + difference - 1)).sum()
    forward = (reference.exp() * (reference - logprobs)).sum()
    reverse = (logprobs.exp() * difference).sum()
    gradient = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (plain, forward, reverse)]
    torch.testing.assert_close(gradient[0], gradient[1], rtol=1e-10, atol=1e-14)
    ours = (probability * kl_divergence(logprobs, reference, "k3")).sum()
    torch.testing.assert_close(torch.autograd.grad(ours, logits)[0], gradient[2], rtol=1e-10, atol=1e-14)
    assert float((gradient[0] - gradient[2]).abs().max()) > 1e-2

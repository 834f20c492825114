"""The critic, and everything that is asked of the model before an optimiser step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from agl.errors import PluginError
from agl.protocols import Algorithm, StepTokens, TokenAdvantages
from agl.records import Reward, Rollout, Task
from agl.transitions import build_rows
from agl_trainer import algorithms, updates
from agl_trainer.batch.build import Scored
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy

from .conftest import new_policy, transition, weights_of

CREDITS = {"good": 1.0, "bad": -1.0}


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """Policies of several precisions in one process; a run closes its policy, these tests do not."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def policy_with(model_folder: Path, chosen: dict[str, Any], **settings: Any) -> tuple[Policy, Algorithm]:
    config = {"learning_rate": 1e-3, "algorithm": chosen, **settings}
    return new_policy(model_folder, **config), algorithms.make(chosen)


def step_rows(policy: Policy) -> list[TrainRow]:
    """Two rollouts of two turns and a fork each, on policy."""
    rows = [
        row
        for name, start in (("good", 20), ("bad", 60))
        for row in build_rows(
            [
                transition([start, 5], [start + 1, start + 2], name, call=f"{name}0"),
                transition([start, 5, start + 1, start + 2, 7], [start + 3, start + 4, 2], name, call=f"{name}1"),
                transition([start, 9], [start + 5, start + 6], name, call=f"{name}2"),
            ]
        )
    ]
    shares = token_weights(rows, "rollout")
    made = [TrainRow(row, [CREDITS[row.rollout]] * len(own), own) for row, own in zip(rows, shares, strict=True)]
    batches = updates.lay_out(policy, made, policy.config)
    size = sum(len(item.weights) for item in made)
    known = [replace(batch, old_logprobs=policy.logprobs(batch)) for batch in batches]
    logprobs = iter(updates.of_the_step(policy, known, "old_logprobs", size).tolist())
    return [
        replace(
            item,
            row=replace(item.row, logprobs=tuple(next(logprobs) if seen else 0.0 for seen in item.row.sampled)),
        )
        for item in made
    ]


def values_of(policy: Policy, rows: Sequence[TrainRow]) -> torch.Tensor:
    """What the critic expects at each sampled token of the step."""
    batches = updates.estimate(policy, updates.lay_out(policy, rows, policy.config), {"values"}, 1)
    return updates.of_the_step(policy, batches, "old_values", sum(len(item.weights) for item in rows))


KINDS = pytest.mark.parametrize("kind", ["head", "model"])


@KINDS
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}, {"precision": "bfloat16"}], ids=["full", "lora", "half"])
def test_a_critic_learns_what_to_expect(model_folder: Path, kind: str, settings: dict[str, Any]):
    rate = {"head": 3e-2, "model": 3e-3}[kind]
    chosen = {"name": "ppo", "critic": kind, "critic_learning_rate": rate, "value_clip": None}
    policy, algorithm = policy_with(model_folder, chosen, **settings)
    rows = step_rows(policy)
    assert not values_of(policy, rows).any(), "at first it expects nothing"
    told = [updates.learn(policy, rows, algorithm, policy.config, 1) for _ in range(30)]
    assert told[0]["value_loss"] == pytest.approx(0.5) and told[0]["explained_variance"] == pytest.approx(0.0)
    assert told[-1]["value_loss"] < 0.1 and told[-1]["explained_variance"] > 0.8
    expected = values_of(policy, rows)
    credit = torch.tensor([credit for item in rows for credit in item.advantages])
    assert (expected * credit > 0).all()
    assert policy.critic is not None and policy.critic.head.weight.dtype == torch.float32
    assert all(entry["grad_norm"] > 0 and entry["critic_grad_norm"] > 0 for entry in told[:3])


@KINDS
def test_in_a_warm_up_only_the_critic_learns_and_a_resume_does_not_repeat_it(model_folder: Path, kind: str):
    chosen = {"name": "ppo", "critic": kind, "value_warmup": 2}
    policy, algorithm = policy_with(model_folder, chosen)
    assert policy.critic is not None
    rows = step_rows(policy)
    start = weights_of(policy.model)

    def moved(reference: dict[str, torch.Tensor], module: Any) -> bool:
        return any(not torch.equal(value, reference[name]) for name, value in weights_of(module).items())

    for _ in range(2):
        before = weights_of(policy.critic.head)
        metrics = updates.learn(policy, rows, algorithm, policy.config, 2)
        assert metrics["grad_norm"] == 0.0 and metrics["critic_grad_norm"] > 0
        assert moved(before, policy.critic.head) and not moved(start, policy.model)
    resumed, _ = policy_with(model_folder, chosen)
    assert resumed.critic is not None
    resumed.critic.load_state_dict(policy.critic.state_dict())
    assert updates.learn(resumed, rows, algorithm, policy.config, 1)["grad_norm"] > 0
    assert moved(start, resumed.model)


def test_the_critic_has_a_learning_rate_of_its_own_and_survives_a_fresh_optimiser(model_folder: Path):
    policy, _ = policy_with(model_folder, {"name": "ppo", "critic_learning_rate": 0.5})
    assert policy.critic is not None
    for optimizer in (policy.optimizer, policy.new_optimizer(1e-3)):
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert {rates[id(p)] for p in policy.critic.parameters()} == {0.5}
        assert {rates[id(p)] for p in policy.parameters} == {1e-3}


@KINDS
def test_a_step_that_is_not_finite_leaves_the_critic_as_it_was(model_folder: Path, kind: str):
    policy, algorithm = policy_with(model_folder, {"name": "ppo", "critic": kind})
    assert policy.critic is not None
    rows = step_rows(policy)
    batches = updates.estimate(policy, updates.lay_out(policy, rows, policy.config), {"values"}, 1)
    batches, _ = updates.token_advantages(policy, rows, batches, algorithm)
    before = weights_of(policy.critic), weights_of(policy.model)
    broken = [replace(batch, returns=torch.full_like(batch.advantages, torch.nan)) for batch in batches]
    policy.update(broken, algorithm)
    for kept, module in zip(before, (policy.critic, policy.model), strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in weights_of(module).items())


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("budget", [1, 1000])
def test_values_and_advantages_reach_their_tokens_in_every_layout(model_folder: Path, layout: Any, budget: int):
    chosen = {"name": "ppo", "gae_lambda": 0.9, "gamma": 0.95, "whiten": False}
    policy, algorithm = policy_with(model_folder, chosen)
    assert policy.critic is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.critic.head.weight, std=0.3)
    rows = step_rows(policy)
    values = values_of(policy, rows)
    wanted: list[float] = [0.0] * len(values)
    rewards = updates.token_rewards(rows)
    for calls in updates.episodes(rows):
        places = [place for call in calls for place in call]
        later = following = 0.0
        for place in reversed(places):  # the formula, once more
            later = rewards[place] + 0.95 * following - float(values[place]) + 0.95 * 0.9 * later
            following, wanted[place] = float(values[place]), later
    config = TrainConfig.of(**policy.config.model_dump() | {"layout": layout, "micro_batch_tokens": budget})
    batches = updates.estimate(policy, updates.lay_out(policy, rows, config), {"values"}, 1)
    batches, _ = updates.token_advantages(policy, rows, batches, algorithm)
    got = torch.zeros(len(values), dtype=torch.float64)
    for batch in batches:
        got[batch.index] = batch.advantages
        assert batch.returns is not None and batch.old_values is not None
        torch.testing.assert_close(batch.returns, batch.advantages + batch.old_values.double(), rtol=1e-5, atol=1e-5)
    assert got.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_an_algorithm_that_loses_tokens_is_told(model_folder: Path):
    class Forgetful:
        aggregation = "token"

        def token_advantages(self, step: StepTokens) -> TokenAdvantages:
            return TokenAdvantages(step.rewards[1:])

    policy, _ = policy_with(model_folder, {"name": "grpo"})
    rows = step_rows(policy)
    with pytest.raises(PluginError, match=r"Forgetful.token_advantages gave 13 advantages for 14 sampled tokens"):
        updates.token_advantages(policy, rows, updates.lay_out(policy, rows, policy.config), Forgetful())


class Meeting:
    """Two ranks as two threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, 2, barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(30)
        values = list(self._board)
        self._barrier.wait(30)
        return values


WHITENED = [{"name": "ppo", "gae_lambda": 0.9, "kl_coef": 0.1}, {"name": "reinforce_pp", "kl_coef": 0.1}]


@pytest.mark.parametrize("chosen", WHITENED, ids=lambda chosen: chosen["name"])
def test_token_advantages_are_those_of_the_whole_step_on_every_rank(model_folder: Path, chosen: dict[str, Any]):
    """Whitening goes over all ranks, and an episode may have its rows on several."""

    def estimated(policy: Policy, rows: Sequence[TrainRow], algorithm: Algorithm) -> torch.Tensor:
        batches = updates.lay_out(policy, rows, policy.config)
        batches = updates.estimate(policy, batches, algorithms.needs(algorithm), 1)
        batches, _ = updates.token_advantages(policy, rows, batches, algorithm)
        found = torch.zeros(sum(len(item.weights) for item in rows), dtype=torch.float64)
        for batch in batches:
            found[batch.index] = batch.advantages
        return found

    algorithm = algorithms.make(chosen)
    policies = [policy_with(model_folder, chosen)[0] for _ in range(3)]
    rows = step_rows(policies[0])
    for policy in policies:
        torch.manual_seed(0)
        if policy.critic is not None:
            torch.nn.init.normal_(policy.critic.head.weight, std=0.3)
        with torch.no_grad():
            for parameter in policy.parameters:
                parameter.mul_(1.2)
    alone, *pair = policies
    whole = estimated(alone, rows, algorithm)
    barrier, board = threading.Barrier(2), [None, None]
    for rank, policy in enumerate(pair):
        policy.ranks = Meeting(rank, barrier, board)  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda policy: estimated(policy, rows, algorithm), pair))
    assert all(part.any() for part in parts) and not (parts[0] * parts[1]).any(), "each has rows of its own"
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("chosen", "passes", "asked"),
    [
        ({"name": "grpo"}, 1, {}),
        ({"name": "grpo"}, 2, {"outputs": 1}),
        ({"name": "grpo", "correction": "bypass"}, 2, {}),
        ({"name": "grpo", "kl_coef": 0.1}, 1, {"reference": 1}),
        ({"name": "grpo", "kl_coef": 0.1}, 3, {"outputs": 1, "reference": 1}),
        ({"name": "cispo", "entropy_coef": 0.1}, 1, {}),
        ({"name": "ppo"}, 1, {"outputs": 1}),
        ({"name": "ppo", "kl_coef": 0.1}, 2, {"outputs": 1, "reference": 1}),
        ({"name": "reinforce_pp"}, 1, {}),
        ({"name": "reinforce_pp", "kl_coef": 0.1}, 1, {"outputs": 1, "reference": 1}),
    ],
    ids=str,
)
def test_no_forward_is_spent_that_the_algorithm_does_not_need(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], passes: int, asked: dict[str, int]
):
    policy, algorithm = policy_with(model_folder, chosen, micro_batch_tokens=1000)
    rows = step_rows(policy)
    counted: Counter[str] = Counter()
    outputs, reference = policy.outputs, policy.reference_logprobs

    def count_outputs(*args: Any, **named: Any) -> Any:
        counted["outputs"] += 1
        return outputs(*args, **named)

    def count_reference(*args: Any) -> Any:
        counted["reference"] += 1
        return reference(*args)

    monkeypatch.setattr(policy, "outputs", count_outputs)
    monkeypatch.setattr(policy, "reference_logprobs", count_reference)
    metrics = updates.learn(policy, rows, algorithm, policy.config, passes)
    assert counted == asked
    assert metrics["grad_norm"] > 0 or chosen["name"] == "reinforce_pp"
    assert ("entropy" in metrics) == ("entropy_coef" in chosen) and ("kl" in metrics) == ("kl_coef" in chosen)


def test_kl_in_the_reward_of_whole_rollouts_is_the_sum_over_all_their_tokens(model_folder: Path):
    chosen = {"name": "rloo", "kl_coef": 0.5, "kl_in": "reward"}
    policy, algorithm = policy_with(model_folder, chosen)
    with torch.no_grad():  # away from the reference, so that there is a KL
        for parameter in policy.parameters:
            parameter.mul_(1.5)
    calls = {
        name: [
            transition([start, 5], [start + 1, start + 2], name, call=f"{name}0", reward=reward),
            transition([start, 9], [start + 5, start + 6], name, call=f"{name}1", reward=reward),
        ]
        for name, start, reward in (("good", 20, 1.0), ("bad", 60, 0.0))
    }
    task = Task(id="t", data={})
    scored = [
        Scored(Rollout(id=name, task=task, batch="b", outcome="ok", returned=Reward.of(own[0].reward)), own)
        for name, own in calls.items()
    ]
    got = updates.with_kl(policy, scored, algorithm, policy.config)
    for item in got:
        own = calls[item.rollout.id]
        kl = 0.0
        for one in own:
            (row,) = build_rows([one])
            (batch,) = updates.lay_out(policy, [TrainRow(row, [0.0] * 2, [0.5] * 2)], policy.config)
            kl += float((policy.logprobs(batch) - policy.reference_logprobs(batch)).sum())
        assert abs(kl) > 1e-3
        wanted = (own[0].reward or 0.0) - 0.5 * kl
        assert [one.reward for one in item.transitions] == pytest.approx([wanted] * 2, rel=1e-4, abs=1e-5)

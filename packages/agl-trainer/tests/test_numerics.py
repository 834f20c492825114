"""What is not finite touches nothing, is told, is kept, and its cause is found by a replay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import agl
from agl import plugins
from agl.errors import NumericsError, UsageError
from agl.hookspecs import hookimpl
from agl.protocols import LossInputs
from agl.transitions import build_rows
from agl_trainer import checkpoint, numerics, updates
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.sft import SFT
from agl_trainer.batch.pack import TrainRow
from agl_trainer.policy import Policy

from .conftest import new_policy, transition
from .test_loop import Train, bandit, metrics_of, train

__all__ = ["train"]


def rows(policy: Policy, count: int = 3) -> list[TrainRow]:
    made = [build_rows([transition(range(10, 20 + place), (30, 31, 32, 2), f"r{place}")])[0] for place in range(count)]
    return [TrainRow(row, [1.0] * 4, [0.25 / count] * 4) for row in made]


def everything(policy: Policy) -> Any:
    """All that a step could change, as a checkpoint would keep it."""
    return copy.deepcopy(checkpoint.capture(policy))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one is other


def break_parameter(policy: Policy) -> None:
    with torch.no_grad():
        policy.parameters[-1].view(-1)[7] = math.inf


class BrokenLoss(SFT):
    """NaN without any gradient that would show it."""

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        loss, metrics = super().loss(inputs)
        return loss + math.nan, metrics


class Overflow(SFT):
    """A finite loss whose gradient is too large, in micro-batches that hold a heavy token."""

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        loss, metrics = super().loss(inputs)
        large = inputs.logprobs.sum() * 1e20
        return torch.where((inputs.weights > 0.2).any(), loss + (large - large.detach()) * 1e30, loss), metrics


class Blind(SFT):
    """Its loss does not look at the logprobs that are broken."""

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return inputs.logprobs.nan_to_num(0.0, 0.0, 0.0).sum() * 0.0, {}


def large_advantage(policy: Policy) -> None:
    """Nothing: the fault is in the rows."""


FAULTS: dict[str, tuple[Any, Callable[[Policy], None], str]] = {
    "parameter": (GRPO(), break_parameter, r"loss nan"),
    "loss": (BrokenLoss(), large_advantage, r"loss nan"),
    "gradient": (Overflow(), large_advantage, r"grad_norm (inf|nan)"),
    "logprob": (Blind(), break_parameter, r"loss nan"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_a_refused_step_leaves_everything_bit_identical(model_folder: Path, settings: dict[str, Any], fault: str):
    algorithm, harm, text = FAULTS[fault]
    policy = new_policy(model_folder, learning_rate=1e-3, micro_batch_tokens=1, **settings)
    good = rows(policy)
    updates.learn(policy, good, SFT(), policy.config, 1)  # so that there are moments to lose
    harm(policy)
    bad = [*good[:-1], TrainRow(good[-1].row, [1.0] * 4, [0.3] * 4)]
    before = everything(policy)
    metrics = updates.learn(policy, bad, algorithm, policy.config, passes=2)
    assert metrics["refused"] == 1.0 and policy.bad_steps == 1
    after = everything(policy)
    after[1]["bad_steps"] = before[1]["bad_steps"]
    assert same(before[0]["optimizer"], after[0]["optimizer"]) and same(before[0]["random"], after[0]["random"])
    assert before[1] == after[1]
    for name, value in before[0]["weights"].items():
        assert torch.equal(value, after[0]["weights"][name]), name
    updates.learn(policy, bad, algorithm, policy.config, 1)
    with pytest.raises(NumericsError, match=rf"3 steps in a row were not finite \({text}.*parameters were not touched"):
        updates.learn(policy, bad, algorithm, policy.config, 1)


def test_a_refused_step_does_not_count_as_one_of_the_critics(model_folder: Path):
    policy = new_policy(model_folder, algorithm="ppo")
    assert policy.critic is not None
    algorithm = updates.algorithms.make("ppo")
    updates.learn(policy, rows(policy), algorithm, policy.config, 1)
    break_parameter(policy)
    updates.learn(policy, rows(policy), algorithm, policy.config, 1)
    assert int(policy.critic.steps) == 1


# -------------------------------------------------------------------------------------------------------- replay


def test_a_replay_finds_the_row(model_folder: Path, tmp_path: Path):
    policy = new_policy(model_folder, learning_rate=1e-3)
    updates.learn(policy, rows(policy), SFT(), policy.config, 1)
    wanted = {name: value.detach().clone() for name, value in policy.trained.items()}
    bad = rows(policy)
    bad[1] = TrainRow(bad[1].row, [1.0, math.inf, 1.0, 1.0], bad[1].weights)
    numerics.dump(tmp_path / "step", bad, policy.trained, policy, "a test")
    policy.close()
    (culprit,) = numerics.replay(tmp_path / "step")
    assert (culprit.row, culprit.rollout, culprit.agent) == (1, "r1", "main")
    assert "its advantages hold inf" in str(culprit) and "grad_norm is nan" in str(culprit)
    again = new_policy(model_folder)
    assert not all(torch.equal(value, wanted[name]) for name, value in again.trained.items()), "the dump had others"


def test_broken_weights_break_every_row(model_folder: Path, tmp_path: Path):
    policy = new_policy(model_folder)
    break_parameter(policy)
    numerics.dump(tmp_path / "step", rows(policy), policy.trained, policy, "a test")
    policy.close()
    found = numerics.replay(tmp_path / "step", SFT())
    assert [culprit.row for culprit in found] == [0, 1, 2]
    assert all("4 of 4 logprobs are not finite" in culprit.found for culprit in found)


def test_what_comes_back_is_what_was_kept(policy: Policy, tmp_path: Path):
    kept = rows(policy)
    numerics.dump(tmp_path / "step", kept, policy.trained, policy, "a test")
    owners = [{"rollout": item.row.rollout, "agent": item.row.agent} for item in kept]
    assert numerics.read_rows(tmp_path / "step", owners) == kept


def test_a_folder_without_a_refused_step_is_told(tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no refused step"):
        numerics.replay(tmp_path)


# ---------------------------------------------------------------------------------------------------- whole runs


class Reward:
    """A reward hook that returns infinity for some rollouts, as often as it is told."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken

    @hookimpl
    def agl_compute_reward(self, rollout: agl.Rollout) -> Mapping[str, float]:
        return {"mine": math.inf if rollout.id.startswith(self.broken) else 0.0}


def with_plugin(plugin: Any) -> Any:
    plugins.manager().register(plugin, "faulty")
    return plugin


@pytest.fixture(autouse=True)
def unregistered() -> Any:
    yield
    if plugins.manager().has_plugin("faulty"):
        plugins.manager().unregister(name="faulty")


def test_a_reward_that_is_infinite_refuses_the_step_and_the_run_goes_on(train: Train):
    with_plugin(Reward("batch00001-0-0"))
    trainer = train(bandit, steps=2)
    seen: list[tuple[int, float]] = []
    with trainer.session as session:
        for batch in trainer.batches():
            before = session.policy.fingerprint()
            metrics = trainer.step(batch)
            seen.append((session.policy.version, metrics.get("refused", 0.0)))
            assert (session.policy.fingerprint() == before) == bool(metrics.get("refused"))
    assert seen == [(0, 1.0), (1, 0.0)]
    first, second = metrics_of(trainer.folder)
    assert first["refused"] == 1.0 and "refused" not in second
    about = (trainer.folder / "refused" / "000001" / "refused.json").read_text()
    assert "reward part 'mine' is inf" in about
    assert numerics.replay(trainer.folder / "refused" / "000001") == [], "no row is broken, the reward was"


def test_refusals_in_a_row_stop_the_run_with_the_reason(train: Train):
    with_plugin(Reward("batch00001-0-0", "batch00002-0-0", "batch00003-1-3"))
    trainer = train(bandit, steps=9)
    with pytest.raises(NumericsError, match=r"3 steps in a row were not finite \(rollout 'batch00003-1-3': .*is inf"):
        trainer.fit()
    assert len(list((trainer.folder / "refused").iterdir())) == 3


def test_no_number_of_the_log_is_silently_zero(train: Train, monkeypatch: pytest.MonkeyPatch):
    """A loss that breaks in the second step: the line has null where a number was not finite."""
    calls: Sequence[int] = []

    def loss(self: Any, inputs: LossInputs) -> Any:
        calls.append(1)  # pyright: ignore[reportAttributeAccessIssue]
        broken = math.nan if len(calls) == 2 else 1.0
        return -(inputs.logprobs * inputs.weights * inputs.advantages).sum() * broken, {}

    monkeypatch.setattr(GRPO, "loss", loss)
    trainer = train(bandit, steps=3, micro_batch_tokens=100_000)
    trainer.fit()
    lines = metrics_of(trainer.folder)
    assert [line.get("refused") for line in lines] == [None, 1.0, None]
    assert lines[1]["loss"] is None and lines[1]["grad_norm"] is None
    assert [line["version"] for line in lines] == [1, 1, 2]

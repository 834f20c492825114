"""Records refuse what is wrong where it is made; a reward is read from whatever an agent returns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl import log
from agl.errors import CaptureError, RewardError, UsageError
from agl.records import Choice, Reward, Rollout, Task, Transition, total_tokens


class Scalar:
    """What numpy and torch return: a number behind ``item()``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("returned", "parts", "agents"),
    [
        (1, {"reward": 1.0}, {}),
        (0.5, {"reward": 0.5}, {}),
        (True, {"reward": 1.0}, {}),
        (Scalar(2), {"reward": 2.0}, {}),
        ({"right": 1, "short": -0.5}, {"right": 1.0, "short": -0.5}, {}),
        ({"right": 1, "writer": {"style": Scalar(0.25)}}, {"right": 1.0}, {"writer": {"style": 0.25}}),
        ({}, {}, {}),
        (Reward(parts={"a": 1.0}), {"a": 1.0}, {}),
    ],
)
def test_a_reward_is_read_from_what_an_agent_returned(returned: Any, parts: Any, agents: Any):
    reward = Reward.of(returned)
    assert (reward.parts, reward.agents) == (parts, agents)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("1.0", r"'reward' is '1\.0' \(str\); return a number"),
        (None, r"'reward' is None \(NoneType\)"),
        ([1.0], r"'reward' is \[1\.0\] \(list\)"),
        (1j, r"complex"),
        (math.nan, r"'reward' is nan"),
        ({"right": math.inf}, r"'right' is inf"),
        ({"right": "yes"}, r"'right' is 'yes'"),
        ({"writer": {"style": math.nan}}, r"'writer\.style' is nan"),
        ({"writer": {"style": None}}, r"'writer\.style' is None"),
        (Scalar(-math.inf), r"-inf"),
        pytest.param(10**400, r"'reward' has too many digits", id="too large"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_name(returned: Any, text: str):
    with pytest.raises(RewardError, match=text):
        Reward.of(returned)


def test_an_array_is_no_number():
    class Array:
        shape = (2,)

        def item(self) -> float:
            raise ValueError("can only convert an array of size 1")

    with pytest.raises(RewardError, match=r"'reward' is .*return a number"):
        Reward.of(Array())


@pytest.mark.parametrize("reward", [{"parts": {"a": math.nan}}, {"agents": {"w": {"a": math.inf}}}])
def test_a_reward_cannot_be_made_of_broken_numbers(reward: Any):
    with pytest.raises(RewardError, match=r"finite number"):
        Reward(**reward)


def test_an_agent_earns_the_shared_parts_and_its_own():
    reward = Reward.of({"shared": 1.0, "writer": {"a": 0.5, "b": 0.25}, "judge": {"c": -1.0}})
    assert reward.total == 0.75
    assert [reward.for_agent(name) for name in ("writer", "judge", "nobody")] == [1.75, 0.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_ids": (1, 2), "logprobs": (-1.0,)}, r"2 token ids but 1 logprobs"),
        ({"response_ids": (1,), "logprobs": (math.nan,)}, r"not finite"),
        ({"response_ids": (1,), "logprobs": (-math.inf,)}, r"not finite"),
    ],
)
def test_a_choice_has_one_finite_logprob_for_each_token(fields: Any, text: str):
    with pytest.raises(CaptureError, match=text):
        Choice(**fields)


def test_a_task_has_a_name():
    with pytest.raises(UsageError, match=r"non-empty id"):
        Task(id="", data={})


def test_records_are_frozen_and_refuse_unknown_fields():
    rollout = Rollout(id="r", task=Task(id="t", data={}), batch="b")
    with pytest.raises(AttributeError):
        rollout.outcome = "ok"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match=r"rewrd"):
        Rollout(id="r", task=rollout.task, batch="b", rewrd=1)  # pyright: ignore[reportCallIssue]


def test_rollouts_of_one_task_in_one_batch_are_a_group():
    def group(task: str, batch: str) -> str:
        return Rollout(id="r", task=Task(id=task, data={}), batch=batch).group

    assert group("t", "b") == group("t", "b")
    assert len({group("t", "b"), group("u", "b"), group("t", "c")}) == 3


def test_a_transition_without_credit_is_not_one_of_credit_zero():
    one = Transition(rollout="r", agent="a", call="c", prompt_ids=(1,), response_ids=(2, 3), logprobs=(-1.0, -1.0))
    assert one.reward is None and one.with_reward(0.0).reward == 0.0
    assert total_tokens([one, one]) == 4


def test_the_log_is_json_whatever_the_numbers(tmp_path: Path):
    log.agl_train_start(SimpleNamespace(folder=tmp_path))
    log.agl_weights_updated(3)
    metrics: Mapping[str, float] = {"loss": math.nan, "gradient": math.inf, "reward": 0.5}
    log.agl_log_metrics(7, metrics)
    log.agl_train_end(None)
    log.agl_log_metrics(8, metrics)  # belongs to no run
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    read = json.loads(line, parse_constant=refuse)
    assert read.pop("time") > 1e9
    assert read == {"step": 7, "version": 3, "loss": None, "gradient": None, "reward": 0.5}

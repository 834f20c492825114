"""Default rewards and credit, and how the answers of several plugins add up."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from agl import credit, plugins, rewards
from agl.errors import RewardError
from agl.hookspecs import hookimpl
from agl.records import Reward, Rollout, Step, Task, Transition


def rollout(returned: Any) -> Rollout:
    reward = None if returned is None else Reward.of(returned)
    return Rollout(id="r", task=Task(id="t", data={}), batch="b", returned=reward)


def transition(agent: str) -> Transition:
    return Transition(rollout="r", agent=agent, call="c", prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    manager = plugins.new_manager()
    monkeypatch.setattr(plugins, "manager", lambda: manager)
    yield lambda plugin: plugins.register(manager, plugin)


class Judges:
    """A plugin that scores with what it is given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def agl_compute_reward(
        self, rollout: Rollout
    ) -> Mapping[str, float] | Awaitable[Mapping[str, float] | None] | None:
        return self.answer


@pytest.mark.parametrize(
    ("returned", "judged", "total"),
    [
        (None, None, {}),
        ({}, None, {}),
        (1.0, None, {"reward": 1.0}),
        (None, {"judge": 0.5}, {"judge": 0.5}),
        (1.0, {"judge": 0.5}, {"reward": 1.0, "judge": 0.5}),
        (1.0, {"reward": 0.5}, {"reward": 1.5}),
        (1.0, {"judge": True}, {"reward": 1.0, "judge": 1.0}),
    ],
)
async def test_parts_of_all_plugins_are_summed_by_name(
    load: Callable[[object], None], returned: Any, judged: Any, total: dict[str, float]
):
    load(Judges(judged))
    assert await plugins.compute_reward(rollout(returned)) == total


@pytest.mark.parametrize("value", [math.nan, math.inf, "good", None])
async def test_a_plugins_part_that_is_no_number_is_refused(load: Callable[[object], None], value: Any):
    load(Judges({"judge": value}))
    with pytest.raises(RewardError, match=r"'judge' is"):
        await plugins.compute_reward(rollout(1.0))


TOOL = {"tool_success": 1.0, "tool_error": 0.0, "empty_result": 0.0}


@pytest.mark.parametrize(
    ("kind", "data", "signals"),
    [
        ("tool_end", {}, TOOL),
        ("tool_end", {"result_length": 12}, TOOL),
        ("tool_end", {"result_length": 0}, {**TOOL, "empty_result": 1.0}),
        ("tool_end", {"status": "success"}, TOOL),
        ("tool_end", {"status": "error", "result_length": 0}, {**TOOL, "tool_success": 0.0, "tool_error": 1.0}),
        ("tool_error", {"error": "ValueError"}, {"tool_error": 1.0}),
        ("model_end", {}, {"parse_failure": 0.0}),
        ("model_end", {"tool_calls": ["1"]}, {"parse_failure": 0.0}),
        ("model_end", {"unparsed": 2}, {"parse_failure": 1.0}),
        ("parser_error", {}, {"parse_failure": 1.0}),
        ("tool_start", {}, None),
        ("model_start", {}, None),
        ("model_error", {}, None),
    ],
)
def test_built_in_signals_tell_what_happened(kind: Any, data: dict[str, Any], signals: dict[str, float] | None):
    assert rewards.agl_signal_reward(Step(id="s", kind=kind, call_id="c", data=data)) == signals


def test_every_transition_receives_all_of_its_agents_reward():
    earned = rollout({"shared": 1.0, "writer": {"style": 0.5}})
    transitions = [transition("writer"), transition("judge"), transition("writer")]
    assert credit.agl_assign_credit(earned, transitions, None) == [1.5, 1.0, 1.5]
    assert credit.agl_assign_credit(rollout(None), transitions, None) is None


def test_a_plugins_credit_must_be_finite(load: Callable[[object], None]):
    class Broken:
        @hookimpl
        def agl_assign_credit(self, rollout: Rollout, transitions: Any) -> list[float]:
            return [math.nan]

    load(Broken())
    with pytest.raises(RewardError, match=r"'credit' is nan"):
        plugins.assign_credit(rollout(1.0), [transition("a")])

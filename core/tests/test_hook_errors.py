"""What a plugin gets wrong in a hook is told: which hook, whose, what it returned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agl import plugins
from agl.errors import RewardError, RunError
from agl.hookspecs import hookimpl
from agl.records import Reward, Rollout, Task, Transition

ROLLOUT = Rollout(id="r", task=Task(id="t", data={}), batch="b", returned=Reward(parts={"reward": 1.0}))
TRANSITION = Transition(rollout="r", agent="main", call="c", prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,))

Add = Callable[[Any], None]


@pytest.fixture
def add() -> Iterator[Add]:
    """Register a plugin for the time of a test."""
    added: list[Any] = []

    def register(plugin: Any) -> None:
        plugins.manager().register(plugin, "mine")
        added.append(plugin)

    yield register
    for plugin in added:
        plugins.manager().unregister(plugin)


class Raising:
    @hookimpl
    def agl_step_end(self, step: int) -> None:
        raise ValueError("broken")


def test_an_error_in_a_hook_names_the_hook_and_the_plugins(add: Add):
    add(Raising())
    with pytest.raises(ValueError, match="broken") as caught:
        plugins.manager().hook.agl_step_end(step=1, metrics={})
    (note,) = caught.value.__notes__
    assert note.startswith("raised in hook agl_step_end; plugins that implement it: ") and "mine" in note


@pytest.mark.parametrize("answer", [1.0, "x", ["reward"]])
def test_a_reward_hook_that_returns_no_parts_is_told(add: Add, answer: Any):
    class Scoring:
        @hookimpl
        def agl_compute_reward(self, rollout: Rollout) -> Any:
            return answer

    add(Scoring())
    with pytest.raises(RewardError, match=r"agl_compute_reward returned .*; return named parts"):
        asyncio.run(plugins.compute_reward(ROLLOUT))


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (5.0, RunError, r"agl_assign_credit returned 5\.0; return a list"),
        ([1.0, 2.0], RunError, r"returned 2 values for 1 transitions"),
        (["x"], RewardError, r"'credit' is 'x'"),
        ([float("nan")], RewardError, r"'credit' is nan"),
    ],
)
def test_credit_that_is_no_list_of_numbers_is_told(add: Add, answer: Any, error: type[Exception], text: str):
    class Crediting:
        @hookimpl
        def agl_assign_credit(self, rollout: Rollout) -> Any:
            return answer

    add(Crediting())
    with pytest.raises(error, match=text):
        plugins.assign_credit(ROLLOUT, [TRANSITION])

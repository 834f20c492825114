"""Credit by hand: what each call earned, its return, and the groups it is compared in."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import credit
from agl.credit import agent_rewards, anchor, call_rewards, group_key, returns_to_go, turns
from agl.errors import RewardError
from agl.records import Reward, Rollout, Task, Transition


def rollout(returned: Any, task: str = "t") -> Rollout:
    reward = None if returned is None else Reward.of(returned)
    return Rollout(id="r", task=Task(id=task, data={}), batch="b", returned=reward)


def transition(agent: str, call: str, signal: float = 0.0, prompt: tuple[int, ...] = (1,)) -> Transition:
    return Transition(
        rollout="r", agent=agent, call=call, prompt_ids=prompt, response_ids=(2,), logprobs=(-1.0,), signal=signal
    )


EARNED = rollout({"shared": 1.0, "writer": {"style": 0.5}})
CALLS = [transition("writer", "1", -0.1), transition("judge", "2"), transition("writer", "3", 0.2)]
CALLS.append(transition("writer", "4"))


def test_the_terminal_reward_counts_once_at_each_agents_last_call_and_signals_where_they_were_caused():
    assert call_rewards(EARNED, CALLS) == [-0.1, 1.0, 0.2, 1.5]


def test_identity_credits_every_call_with_all_that_its_agent_earned_signals_included():
    assert agent_rewards(EARNED, CALLS) == pytest.approx([1.6, 1.0, 1.6, 1.6], rel=1e-15)
    assert credit.agl_assign_credit(EARNED, CALLS, None) == agent_rewards(EARNED, CALLS)


@pytest.mark.parametrize(
    ("discount", "returns"),
    [
        (0.0, [-0.1, 1.0, 0.2, 1.5]),
        (0.5, [0.375, 1.0, 0.95, 1.5]),  # 0.2 + 0.5 * 1.5 = 0.95; -0.1 + 0.5 * 0.95 = 0.375
        (1.0, [1.6, 1.0, 1.7, 1.5]),
    ],
)
def test_a_discount_credits_the_return_to_go_over_the_agents_own_calls(discount: float, returns: list[float]):
    got = credit.agl_assign_credit(EARNED, CALLS, discount)
    assert got == pytest.approx(returns, rel=1e-15)


def test_choices_of_one_call_are_one_turn_and_share_its_return():
    calls = [transition("a", "1"), transition("a", "2"), transition("a", "2"), transition("a", "3")]
    assert turns(calls) == [0, 1, 1, 2]
    assert returns_to_go(call_rewards(rollout(1.0), calls), calls, 0.5) == [0.25, 0.5, 0.5, 1.0]


def test_what_is_unscored_has_no_rewards_and_no_credit():
    assert credit.agl_assign_credit(rollout(None), CALLS, 0.9) is None
    with pytest.raises(RewardError, match="'r' is unscored"):
        call_rewards(rollout(None), CALLS)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=12), st.floats(0, 1), st.randoms())
def test_how_agents_interleave_changes_nothing(made: list[tuple[str, float]], discount: float, order: Any):
    """Rewards sum to what the agent earned, and other agents' calls in between discount nothing."""
    calls = [transition(agent, str(index), signal) for index, (agent, signal) in enumerate(made)]
    queues = {agent: [one for one in calls if one.agent == agent] for agent in "abc"}
    shuffled: list[Transition] = []
    while any(queues.values()):
        shuffled.append(queues[order.choice([agent for agent in "abc" if queues[agent]])].pop(0))
    earned = rollout({"shared": 2.0, "a": {"own": -1.0}})

    def returns(some: list[Transition]) -> dict[str, float]:
        return dict(zip([t.call for t in some], returns_to_go(call_rewards(earned, some), some, discount), strict=True))

    assert returns(calls) == returns(shuffled)
    for agent in {one.agent for one in calls}:
        own = [reward for reward, one in zip(call_rewards(earned, calls), calls, strict=True) if one.agent == agent]
        whole = (1.0 if agent == "a" else 2.0) + sum(one.signal for one in calls if one.agent == agent)
        assert math.fsum(own) == pytest.approx(whole, abs=1e-12)


def test_groups_are_named_after_what_is_compared():
    one, other = transition("w", "1", prompt=(1, 2)), transition("j", "2", prompt=(1, 2))

    def key(*arguments: Any) -> str:
        return group_key(rollout(1.0), *arguments)

    assert key(one, 0, "task") == key(other, 3, "task")
    assert key(one, 0, "agent") == key(one, 3, "agent") != key(other, 0, "agent")
    assert key(one, 1, "turn") == key(transition("w", "9"), 1, "turn") != key(one, 2, "turn")
    assert key(one, 0, "state") == key(transition("w", "9", prompt=(1, 2)), 7, "state") != key(other, 0, "state")
    assert key(one, 0, "state") != key(transition("w", "9", prompt=(1, 2, 3)), 0, "state")


def test_no_two_groups_share_a_name_whatever_tasks_and_agents_are_called():
    names = ["a", "a/b", "b", "a' 'b", "/", "turn 1", "a'"]
    keys = [
        group_key(rollout(1.0, task), transition(agent, "1"), 1, baseline)
        for task, agent in itertools.product(names, names)
        for baseline in ("agent", "turn", "state")
    ]
    assert len(set(keys)) == 3 * len(names) ** 2


def test_an_anchor_is_the_whole_prompt():
    assert anchor(transition("a", "1", prompt=(1, 2))) == anchor(transition("b", "2", prompt=(1, 2)))
    prompts = [(1, 2), (2, 1), (1,), (1, 2, 0), (258,), (1, 1), (2**31 - 1,)]
    assert len({anchor(transition("a", "1", prompt=prompt)) for prompt in prompts}) == len(prompts)

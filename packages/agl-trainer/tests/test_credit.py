"""Credit and advantages by hand, and what may not change them (reference/training.md §2.7, §2.8)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import plugins
from agl.errors import ConfigError, PluginError
from agl.records import Call, Choice, Reward, Rollout, Step, Task
from agl.selection import Selection
from agl_trainer import Trainer, algorithms
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.batch.build import Scored, advantages, count, credited, learnable_groups, train_rows
from agl_trainer.batch.refill import fill

from .conftest import transition

CENTRED = GRPO(scale="none")
Plan = Sequence[tuple[str, int]]
"""The calls of a rollout: the agent, and the state (prompt token) it is made in."""


def played(name: str, reward: Any, plan: Plan, task: str = "t", discount: float | None = None) -> Scored:
    """A scored rollout with credit, of calls that do not extend one another."""
    rollout = Rollout(id=name, task=Task(id=task, data={}), batch="b", outcome="ok", returned=Reward.of(reward))
    calls = [
        transition([state], [9, 9], name, agent, call=f"{name}/{place}") for place, (agent, state) in enumerate(plan)
    ]
    return Scored(rollout, plugins.assign_credit(rollout, calls, discount))


def gains(step: Sequence[Scored], baseline: Any, algorithm: Any = CENTRED) -> list[list[float]]:
    return advantages(step, algorithm, baseline)


def approx(nested: Sequence[Sequence[float]]) -> Any:
    return [pytest.approx(own, rel=1e-12, abs=1e-12) for own in nested]


# ------------------------------------------------------------------------------------------------------- by hand


def test_turns_are_compared_with_turns_of_the_same_number():
    """AT-GRPO, returns with discount 0.5. Turn 0: 0.5, 0, 1; turn 1: 1, 0."""
    two, one = [("a", 1), ("a", 2)], [("a", 1)]
    step = [played("x", 1, two, discount=0.5), played("y", 0, two, discount=0.5), played("z", 1, one, discount=0.5)]
    assert gains(step, "turn") == approx([[0.0, 0.5], [-0.5, -0.5], [0.5]])


LOOPS = [
    # task t, discount 0.5; returns: x 0.5 1; y 0 0; z 0.25 0.5 1
    ("x", 1, [("a", 1), ("a", 2)]),
    ("y", 0, [("a", 1), ("a", 2)]),
    ("z", 1, [("a", 1), ("a", 3), ("a", 2)]),
]


@pytest.mark.parametrize("weight", [None, 1.0, 0.25, 0.0])
def test_equal_states_are_compared_beside_whole_rollouts(weight: float | None):
    """GiGPO. Rollouts 1, 0, 1; state 1: 0.5, 0, 0.25; state 2: 1, 0, 1; state 3 alone."""
    step = [played(*one, discount=0.5) for one in LOOPS]
    w = 1.0 if weight is None else weight
    whole = [1 / 3, -2 / 3, 1 / 3]
    states = [[0.25, 1 / 3], [-0.25, -2 / 3], [0.0, 0.0, 1 / 3]]
    wanted = [[whole[i] + w * s for s in own] for i, own in enumerate(states)]
    assert gains(step, "state" if weight is None else {"state": weight}) == approx(wanted)


def test_each_visit_of_a_state_counts_with_its_own_return():
    step = [played("x", 1, [("a", 1), ("a", 1)], discount=0.5), played("y", 0, [("a", 1)], discount=0.5)]
    assert gains(step, "state") == approx([[0.5 + 0.0, 0.5 + 0.5], [-0.5 - 0.5]])


def test_agents_are_measured_by_their_own_rewards():
    """Dr. MAS: one agent's rewards are 100 times the other's, and both learn as much."""
    both = [("w", 1), ("j", 2)]
    rewards = [{"w": {"own": w}, "j": {"own": 100 * j}} for w, j in ((1, 0), (0, 1), (1, 1), (0, 0))]
    step = [played(str(place), reward, both) for place, reward in enumerate(rewards)]
    assert gains(step, "agent") == approx([[0.5, -50.0], [-0.5, 50.0], [0.5, 50.0], [-0.5, -50.0]])
    scaled = gains(step, "agent", GRPO())
    assert scaled[0] == pytest.approx([0.866, -0.866], abs=1e-3)


def test_an_agent_that_speaks_often_does_not_outweigh_one_that_speaks_once():
    step = [played("x", 1, [("w", 1), ("j", 2), ("w", 3), ("w", 4)]), played("y", 0, [("w", 1)])]
    rows = train_rows(step, gains(step, "agent"), GRPO(kl_coef=0.1), 512)
    share = {name: sum(sum(r.weights) for r in rows if r.row.rollout == name) for name in "xy"}
    assert share == pytest.approx({"x": 0.5, "y": 0.5}, rel=1e-12)


def test_credits_that_differ_need_a_baseline_of_calls():
    step = [played("x", 1, [("a", 1), ("a", 2)], discount=0.5)]
    with pytest.raises(ConfigError, match=r"different credits \(0\.5 and 1\).*baseline='agent'.*'turn' or 'state'"):
        gains(step, "task")


def test_a_critic_compares_nothing_and_sees_every_calls_credit():
    step = [played("x", 1, [("a", 1), ("a", 2)], discount=0.5), played("y", 1, [("a", 1)], discount=0.5)]
    assert gains(step, "task", algorithms.make("ppo")) == [[0.5, 1.0], [1.0]]


# ------------------------------------------------------------------------------------------------- what may not matter

BASELINES = st.sampled_from(["task", "agent", "turn", "state"])


def random_step(order: random.Random, discount: float | None) -> list[Scored]:
    step: list[Scored] = []
    for place in range(order.randrange(2, 7)):
        plan = [(order.choice("ab"), order.randrange(3)) for _ in range(order.randrange(1, 6))]
        step.append(played(str(place), order.randrange(3), plan, order.choice("tu"), discount))
    return step


@given(st.integers(0, 10_000), BASELINES)
def test_the_order_of_rollouts_changes_no_advantage(seed: int, baseline: Any):
    order = random.Random(seed)
    step = random_step(order, 0.5 if baseline in ("turn", "state") else None)
    shuffled = order.sample(range(len(step)), len(step))
    before = gains(step, baseline, GRPO())
    after = gains([step[place] for place in shuffled], baseline, GRPO())
    assert after == approx([before[place] for place in shuffled])


@given(st.integers(0, 10_000), st.sampled_from(["task", "agent"]))
def test_more_calls_in_a_rollout_change_nobody_elses_advantage(seed: int, baseline: Any):
    """miles#2378, AGL#445: a rollout that forks or is split into more calls counts once all the same."""
    order = random.Random(seed)
    step = random_step(order, None)
    first = step[0]
    again = [replace(one, call=f"{one.call}/again", prompt_ids=(99, *one.prompt_ids)) for one in first.transitions]
    forked = [replace(first, transitions=[*first.transitions, *again]), *step[1:]]
    before, after = gains(step, baseline, GRPO()), gains(forked, baseline, GRPO())
    assert after == approx([before[0] + before[0], *before[1:]])


@given(st.integers(0, 10_000), BASELINES)
def test_how_calls_merge_into_rows_changes_no_advantage(seed: int, baseline: Any):
    order = random.Random(seed)
    step = random_step(order, 0.9 if baseline in ("turn", "state") else None)
    own = gains(step, baseline)
    rows = train_rows(step, own, GRPO(kl_coef=0.1), 512)
    wanted = sorted(gain for item in own for gain in item for _ in range(2))  # two tokens in each answer
    assert sorted(gain for item in rows for gain in item.advantages) == pytest.approx(wanted, abs=1e-12)


# --------------------------------------------------------------------------------------------------------- signals


def with_tools(weights: dict[str, float], discount: float | None = None) -> Scored:
    """Two answers that call a tool each and a last one; the first tool fails, the second finds nothing."""
    choice = Choice(response_ids=(5,), logprobs=(-0.1,))
    calls = [
        Call(id=f"g{n}", call_id=f"c{n}", rollout="r", attempt=1, prompt_ids=(n,), choices=(choice,), started=float(n))
        for n in range(3)
    ]
    data = [{"tool_calls": ["t0"]}, {"tool_calls": ["t1"], "unparsed": 1}, {}]
    steps = [Step(id=f"m{n}", kind="model_end", call_id=f"c{n}", data=data[n], time=n + 0.5) for n in range(3)]
    steps.append(Step(id="e", kind="tool_error", call_id="x", data={"tool_call_id": "t0"}, time=0.7))
    empty = {"tool_call_id": "t1", "result_length": 0}
    steps.append(Step(id="n", kind="tool_end", call_id="y", data=empty, time=1.7))
    rollout = Rollout(
        id="r",
        task=Task(id="t", data={}),
        batch="b",
        outcome="ok",
        returned=Reward.of(1.0),
        calls=tuple(calls),
        steps=tuple(steps),
    )
    (scored,) = credited([rollout], Selection(None), discount=discount, signals=weights)
    return scored


WEIGHTS = {"tool_error": -0.5, "empty_result": -0.25, "tool_success": 0.125, "parse_failure": -1.0}


def test_signals_are_off_by_default_and_counted_all_the_same():
    scored = with_tools({})
    assert [one.reward for one in scored.transitions] == [1.0, 1.0, 1.0]
    counted = {"tool_error": 1.0, "empty_result": 1.0, "tool_success": 1.0, "parse_failure": 1.0}
    assert scored.signals == counted
    metrics = count([scored.rollout], [scored], [[0.0] * 3])
    assert {name: metrics[f"signal/{name}"] for name in counted} == counted
    assert metrics["reward"] == 1.0, "signals are no outcome"


def test_a_weighted_signal_goes_to_the_call_that_caused_it():
    scored = with_tools(WEIGHTS, 1.0)
    assert [one.signal for one in scored.transitions] == [-0.5, 0.125 - 0.25 - 1.0, 0.0]
    assert [one.reward for one in scored.transitions] == [-0.625, -0.125, 1.0]


def test_without_a_discount_all_calls_of_the_agent_share_its_signals():
    assert [one.reward for one in with_tools(WEIGHTS).transitions] == [-0.625] * 3


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"discount": 0.9}, ConfigError, r"discount=0\.9 .*baseline='task' compares whole rollouts; use .*'turn'"),
        ({"discount": 0.9, "baseline": "agent"}, ConfigError, r"baseline='agent' compares whole rollouts"),
        ({"discount": 1.5, "baseline": "turn"}, ConfigError, r"setting 'discount' = 1\.5: .*less than or equal to 1"),
        ({"baseline": "step"}, ConfigError, r"setting 'baseline' = 'step': .*'task', 'agent', 'turn', 'state', or"),
        ({"baseline": {"state": -1.0}}, ConfigError, r"setting 'baseline.*weight w of 0 or more"),
        ({"baseline": {"turn": 1.0}}, ConfigError, r"setting 'baseline.*\{'state': w\}"),
        ({"signals": {"tool_eror": 1.0}}, PluginError, r"no signal is named 'tool_eror'; did you mean 'tool_error'\?"),
        ({"signals": {"x": 1.0}}, PluginError, r"known: empty_result, parse_failure, tool_error, tool_success"),
        ({"refill": -1}, ConfigError, r"setting 'refill' = -1"),
        ({"refill": 1, "algorithm": "ppo"}, ConfigError, r"refill=1 .*critic"),
        ({"group_size": 1}, ConfigError, r"group_size=1: 'grpo' compares rollouts .*group_size=8, or .*'reinforce_pp'"),
        ({"group_size": 1, "algorithm": "rloo", "baseline": "agent"}, ConfigError, r"group_size=1: 'rloo'"),
        (
            {"group_size": 1, "algorithm": {"name": "reinforce_pp", "group_baseline": True}},
            ConfigError,
            r"group_size=1: 'reinforce_pp'",
        ),
    ],
)
def test_settings_that_cannot_work_are_told_before_anything_is_loaded(
    settings: dict[str, Any], error: type[Exception], text: str
):
    with pytest.raises(error, match=text):
        Trainer(lambda task, llm: 0.0, [{"id": "1"}], model="nowhere", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"discount": 0.9, "baseline": "turn"},
        {"discount": 0.0, "baseline": "state"},
        {"discount": 0.9, "baseline": {"state": 0.5}},
        {"discount": 0.9, "algorithm": "ppo"},
        {"signals": WEIGHTS},
        {"group_size": 1, "algorithm": "ppo"},
        {"group_size": 1, "algorithm": "reinforce_pp"},
        {"group_size": 1, "baseline": "state"},  # an agent may be in one state twice
        {"group_size": 1, "steps": 0},
    ],
)
def test_settings_that_work_together_are_taken(settings: dict[str, Any]):
    Trainer(lambda task, llm: 0.0, [{"id": "1"}], model="nowhere", **settings)


# -------------------------------------------------------------------------------------------------------- counting


def test_everything_that_is_left_out_is_counted():
    long = Choice(response_ids=(5,), logprobs=(-0.1,), finish_reason="length")
    done = Choice(response_ids=(5, 6), logprobs=(-0.1, -0.1), finish_reason="stop")
    text = "the prompt has 300 tokens and 1 more are to be sampled, but this model's context length is 256 tokens"
    common = {"rollout": "r", "attempt": 1, "prompt_ids": (1,)}
    calls = (
        Call(id="a", choices=(long,), **common),
        Call(id="b", choices=(done,), **common),
        Call(id="c", state="error", error=text, **common),
        Call(id="d", state="error", error="upstream refused", **common),
    )

    def ended(name: str, outcome: Any, reward: float | None = None) -> Rollout:
        returned = None if reward is None else Reward.of(reward)
        task = Task(id="t", data={})
        return Rollout(id=name, task=task, batch="b", outcome=outcome, returned=returned, calls=calls)

    rollouts = [ended("1", "ok", 1.0), ended("2", "ok", 1.0), ended("3", "ok"), ended("4", "timeout")]
    rollouts += [ended("5", "infra_error"), ended("6", "infra_error"), ended("7", "agent_error")]
    scored = credited(rollouts, Selection(None))
    metrics = count(rollouts, scored, gains(scored, "task"))
    wanted = {"rollouts": 7, "unscored": 5, "degenerate_groups": 1, "transitions": 4, "response_tokens": 1.5}
    wanted |= {"truncated_answers": 2, "overlong_prompts": 7, "outcome/timeout": 1, "outcome/infra_error": 2}
    wanted |= {"outcome/agent_error": 1, "outcome/truncated": 0, "reward": 1, "reward/reward": 1}
    wanted |= {"agent/main/reward": 1, "agent/main/advantage": 0, "agent/main/calls": 4, "agent/main/tokens": 6}
    assert metrics == wanted


def test_every_agent_has_metrics_of_its_own():
    both = [("w", 1), ("j", 2), ("w", 3)]
    step = [played("x", {"w": {"own": 2.0}}, both), played("y", {"j": {"own": 1.0}}, both)]
    metrics = count([one.rollout for one in step], step, gains(step, "agent"))
    assert {name: value for name, value in metrics.items() if name.startswith("agent/")} == {
        "agent/w/reward": 1.0,
        "agent/w/advantage": 1.0,
        "agent/w/calls": 4.0,
        "agent/w/tokens": 8.0,
        "agent/j/reward": 0.5,
        "agent/j/advantage": 0.5,
        "agent/j/calls": 2.0,
        "agent/j/tokens": 4.0,
    }


# ---------------------------------------------------------------------------------------------------------- refill


class Epoch:
    """Plays tasks in order; the reward of rollout 0 and 1 of each is what the table says."""

    def __init__(self, rewards: dict[int, tuple[float | None, float | None]]) -> None:
        self.rewards = rewards
        self.asked: list[int] = []
        self.next = 0

    def __call__(self, groups: int) -> list[Rollout]:
        self.asked.append(groups)
        tasks = range(self.next, self.next + groups)
        self.next += groups
        return [self.rollout(task, sample) for task in tasks for sample in (0, 1)]

    def rollout(self, task: int, sample: int) -> Rollout:
        reward = self.rewards.get(task, (1.0, 1.0))[sample]
        returned = None if reward is None else Reward.of(reward)
        call = Call(id="c", rollout="r", attempt=1, choices=(Choice(response_ids=(5, 6), logprobs=(-1.0, -1.0)),))
        name = Task(id=str(task), data={})
        return Rollout(id=f"{task}-{sample}", task=name, batch="b", outcome="ok", returned=returned, calls=(call,))


def judge(rollouts: Sequence[Rollout]) -> tuple[list[Scored], list[list[float]]]:
    scored = credited(rollouts, Selection(None))
    return scored, gains(scored, "task")


def test_groups_that_teach_nothing_are_replaced_by_the_next_tasks():
    epoch = Epoch({1: (0.0, 1.0), 3: (None, None), 4: (1.0, 0.0), 5: (0.0, 1.0)})
    rollouts, thrown = fill(epoch, judge, 3, refill=9)
    assert epoch.asked == [3, 2, 1], "as many as are missing, each task once and in order"
    assert [rollout.task.id for rollout in rollouts] == ["1", "1", "4", "4", "5", "5"]
    wanted = {"batches": 2, "groups": 3, "rollouts": 6, "unscored": 2, "tokens": 12}
    assert thrown == {f"refill/{name}": value for name, value in wanted.items()}
    assert learnable_groups(*judge(rollouts)) == {"b/1", "b/4", "b/5"}


def test_at_the_cap_the_step_is_filled_up_with_groups_that_teach_nothing():
    rollouts, thrown = fill(Epoch({0: (0.0, 1.0)}), judge, 3, refill=2)
    assert [rollout.task.id for rollout in rollouts] == ["0", "0", "5", "5", "6", "6"]
    assert thrown["refill/groups"] == 4 and thrown["refill/batches"] == 2
    scored, own = judge(rollouts)
    assert count(rollouts, scored, own)["degenerate_groups"] == pytest.approx(2 / 3)


def test_without_refill_nothing_is_judged_or_thrown_away():
    def never(rollouts: Sequence[Rollout]) -> Any:
        raise AssertionError

    epoch = Epoch({})
    rollouts, thrown = fill(epoch, never, 3, refill=0)
    assert len(rollouts) == 6 and thrown == {} and epoch.asked == [3]


def test_a_full_batch_is_not_refilled():
    epoch = Epoch({0: (0.0, 1.0), 1: (1.0, 0.0)})
    _, thrown = fill(epoch, judge, 2, refill=3)
    assert epoch.asked == [2] and set(thrown.values()) == {0.0}


def test_frozen_agents_are_context_and_never_trained():
    choice = Choice(response_ids=(5,), logprobs=(-0.1,))
    calls = tuple(
        Call(id=name, rollout="r", attempt=1, agent=name, prompt_ids=(1,), choices=(choice,)) for name in ("w", "j")
    )
    task = Task(id="t", data={})
    rollout = Rollout(id="r", task=task, batch="b", outcome="ok", returned=Reward.of(1.0), calls=calls)
    (scored,) = credited([rollout], Selection(["w"]))
    assert [one.agent for one in scored.transitions] == ["w"]
    metrics = count([rollout], [scored], [[0.0]])
    assert "agent/w/calls" in metrics and "agent/j/calls" not in metrics

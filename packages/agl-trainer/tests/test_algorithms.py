"""What every algorithm keeps to: pure advantages, right gradients, settings that are refused with a reason."""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from agl import plugins
from agl.errors import ConfigError, NumericsError, RewardError
from agl.protocols import Algorithm, LossInputs, StepTokens
from agl.transitions import build_rows
from agl_trainer import algorithms
from agl_trainer.algorithms.corrections import call_means, call_sums, correction_weights
from agl_trainer.algorithms.policy_gradient import PolicyGradient
from agl_trainer.algorithms.ppo import PPO
from agl_trainer.algorithms.reinforce_pp import ReinforcePP
from agl_trainer.algorithms.returns import discounted_returns, gae, whiten
from agl_trainer.batch.pack import TrainRow
from agl_trainer.config import TrainConfig
from agl_trainer.updates import episodes, token_rewards

from .conftest import transition

GROUPED: list[dict[str, Any]] = [
    {"name": "grpo"},
    {"name": "grpo", "scale": "batch"},
    {"name": "grpo", "scale": "none"},
    {"name": "rloo"},
    {"name": "reinforce_pp", "group_baseline": True},
    {"name": "gspo"},
    {"name": "cispo"},
]
"""Those that compare the members of a group."""
SCALED = [chosen | {"epsilon": 0.0} for chosen in (*GROUPED[:2], *GROUPED[5:])]
"""Those that divide by the spread of rewards."""
grouped = pytest.mark.parametrize("chosen", GROUPED, ids=lambda chosen: "-".join(map(str, chosen.values())))
scaled = pytest.mark.parametrize("chosen", SCALED, ids=lambda chosen: "-".join(map(str, chosen.values())))
rewards = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=1, max_size=12)
anything = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


def groups_of(count: int, sizes: int = 3) -> list[str]:
    return [str(place % max(1, count // sizes)) for place in range(count)]


def advantages(chosen: dict[str, Any], values: Sequence[float], groups: Sequence[str]) -> list[float]:
    return list(made(tuple(chosen.items())).advantages(values, groups))


@cache
def made(settings: tuple[tuple[str, Any], ...]) -> Algorithm:
    return algorithms.make(dict(settings))


# --------------------------------------------------------------------------------------------------- advantages


@grouped
@given(values=rewards)
def test_advantages_of_a_group_sum_to_zero(chosen: dict[str, Any], values: list[float]):
    groups = groups_of(len(values))
    got = advantages(chosen, values, groups)
    for group in set(groups):
        own = [gain for gain, name in zip(got, groups, strict=True) if name == group]
        assert abs(math.fsum(own)) <= 1e-9 * (1 + max(map(abs, own)))


@grouped
@given(values=rewards, seed=st.integers(0, 1000))
def test_the_order_of_rollouts_does_not_matter(chosen: dict[str, Any], values: list[float], seed: int):
    groups = groups_of(len(values))
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)
    got = advantages(chosen, values, groups)
    moved = advantages(chosen, [values[place] for place in order], [groups[place] for place in order])
    assert moved == pytest.approx([got[place] for place in order], rel=1e-12, abs=1e-12)


@grouped
@given(values=rewards, shift=st.floats(-100, 100))
def test_a_shift_of_all_rewards_does_not_matter(chosen: dict[str, Any], values: list[float], shift: float):
    groups = groups_of(len(values))
    got = advantages(chosen, values, groups)
    assert advantages(chosen, [value + shift for value in values], groups) == pytest.approx(got, rel=1e-6, abs=1e-6)


@scaled
@given(values=rewards, factor=st.floats(1e-6, 1e6))
def test_the_scale_of_rewards_does_not_matter_where_they_are_divided_by_their_spread(
    chosen: dict[str, Any], values: list[float], factor: float
):
    groups = groups_of(len(values))
    got = advantages(chosen, values, groups)
    assert advantages(chosen, [value * factor for value in values], groups) == pytest.approx(got, rel=1e-9, abs=1e-9)


@grouped
@given(values=anything)
def test_finite_rewards_give_finite_advantages(chosen: dict[str, Any], values: list[float]):
    assert all(math.isfinite(gain) for gain in advantages(chosen, values, ["g"] * len(values)))
    assert all(math.isfinite(gain) for gain in advantages(chosen, values, groups_of(len(values), 2)))


@grouped
@pytest.mark.parametrize(
    "values",
    [
        [1e300, -1e300, 1e300],
        [sys.float_info.max, -sys.float_info.max],
        [5e-324, 0.0, 0.0],
        [1e-310, 2e-310],
        [1e300, 1.0, 0.0],
        [-0.0, 0.0],
    ],
)
def test_extreme_rewards_are_told_apart_or_equal_but_never_nan(chosen: dict[str, Any], values: list[float]):
    got = advantages(chosen, values, ["g"] * len(values))
    assert all(math.isfinite(gain) for gain in got)
    best, worst = values.index(max(values)), values.index(min(values))
    assert got[best] >= got[worst]


@grouped
@pytest.mark.parametrize("values", [[3.0], [0.1] * 7, [0.1 + 0.2, 0.3], [1e300] * 3, [1e16, 1e16 + 2], []])
def test_a_group_of_one_and_equal_rewards_have_no_advantage(chosen: dict[str, Any], values: list[float]):
    """Sums of parts that should be equal differ in the last bit: that is no difference to learn from."""
    assert advantages(chosen, values, ["g"] * len(values)) == [0.0] * len(values)


@pytest.mark.parametrize("chosen", [*GROUPED, {"name": "ppo"}, {"name": "reinforce_pp"}], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_value(chosen: dict[str, Any], wrong: float):
    with pytest.raises(RewardError, match=rf"reward {wrong!r} in group 'b'"):
        advantages(chosen, [1.0, wrong, 0.0], ["a", "b", "b"])


# -------------------------------------------------------------------------------------------- along an episode


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=20), gamma=st.floats(0, 1))
def test_gae_with_lambda_one_is_the_return_minus_the_value(values: list[float], gamma: float):
    rewards = [0.1 * place for place in range(len(values))]
    wanted = [ret - value for ret, value in zip(discounted_returns(rewards, gamma), values, strict=True)]
    assert gae(rewards, values, gamma, 1.0) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=20), gamma=st.floats(0, 1))
def test_gae_with_lambda_zero_is_the_temporal_difference(values: list[float], gamma: float):
    rewards = [0.1 * place for place in range(len(values))]
    after = [*values[1:], 0.0]
    wanted = [r + gamma * later - v for r, v, later in zip(rewards, values, after, strict=True)]
    assert gae(rewards, values, gamma, 0.0) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(numbers=st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), min_size=2, max_size=30))
def test_whitened_numbers_have_mean_zero_and_variance_one(numbers: list[float]):
    assume(max(numbers) - min(numbers) > 0.1)
    got = torch.tensor(whiten(numbers), dtype=torch.float64)
    assert float(got.mean()) == pytest.approx(0.0, abs=1e-9) and float(got.var()) == pytest.approx(1.0, rel=1e-4)


def test_equal_numbers_whiten_to_zero_and_others_than_numbers_are_refused():
    assert whiten([0.1] * 5) == [0.0] * 5 and whiten([]) == [] and whiten([7.0]) == [0.0]
    with pytest.raises(NumericsError, match="nan"):
        whiten([1.0, math.nan])


def forked() -> list[TrainRow]:
    """Calls 0 and 2 of an agent in one row, its call 1 in a row that forked off, and another agent's call."""
    first = transition([1], [2, 3], call="c0")
    aside = transition([9, 9], [4], call="c1")
    last = transition([1, 2, 3, 5], [6, 7], call="c2")
    other = transition([8], [8, 8], agent="critic", call="c3")
    credit = {0: 6.0, 1: 3.0, 2: 2.0, 3: -1.0}
    return [
        TrainRow(row, [credit[call] for call in row.transitions if call >= 0], [0.1] * sum(row.sampled))
        for row in build_rows([first, aside, last, other])
    ]


def test_an_episode_is_an_agents_calls_in_the_order_of_time_whatever_rows_they_stand_in():
    rows = forked()
    assert [item.row.transitions for item in rows] == [(-1, 0, 0, -1, 2, 2), (-1, -1, 1), (-1, 3, 3)]
    assert episodes(rows) == [[range(0, 2), range(4, 5), range(2, 4)], [range(5, 7)]]


def test_a_calls_reward_is_its_credit_over_the_next_ones_so_that_the_outcome_counts_once():
    assert token_rewards(forked()) == [0.0, 3.0, 0.0, 2.0, 1.0, 0.0, -1.0]
    same = [replace(item, advantages=[5.0] * len(item.advantages)) for item in forked()]
    assert token_rewards(same) == [0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 5.0]


def test_without_discount_and_bootstrap_a_tokens_advantage_is_its_calls_credit_minus_its_value():
    rows = forked()
    values = [0.5, -0.25, 1.0, 2.0, 0.0, 0.75, -0.5]
    step = StepTokens(
        rewards=token_rewards(rows),
        episodes=[[place for call in calls for place in call] for calls in episodes(rows)],
        values=values,
    )
    found = PPO(whiten=False).token_advantages(step)
    credit = [credit for item in rows for credit in item.advantages]
    assert found.advantages == pytest.approx([c - v for c, v in zip(credit, values, strict=True)])
    assert found.returns == pytest.approx(credit)


def test_verl_7278_returns_pass_over_observed_tokens():
    """Mask 1 0 1, gamma .5, a last reward of 1: the observed token neither resets nor decays."""
    merged = build_rows([transition([1], [2]), transition([1, 2, 3], [4])])
    rows = [TrainRow(row, [1.0, 1.0], [0.5, 0.5]) for row in merged]
    assert [row.row.sampled for row in rows] == [(False, True, False, True)]
    (calls,) = episodes(rows)
    places = [place for call in calls for place in call]
    assert discounted_returns([token_rewards(rows)[place] for place in places], 0.5) == [0.5, 1.0]


def test_kl_in_the_reward_is_taken_off_token_by_token():
    step = StepTokens(rewards=[0.0, 1.0], episodes=[[0, 1]], kl=[0.5, -0.25], values=[0.0, 0.0])
    found = PPO(kl_coef=0.1, whiten=False).token_advantages(step)
    assert found.advantages == pytest.approx([1.0 - 0.05 + 0.025, 1.0 + 0.025])
    assert ReinforcePP(kl_coef=0.1).token_advantages(step).advantages == pytest.approx(whiten(found.advantages))


# ------------------------------------------------------------------------------------------------------- losses

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "dual_clip": 1.5},
    "grpo-bypass": {"name": "grpo", "correction": "bypass"},
    "grpo-sequence": {"name": "grpo", "correction": "sequence"},
    "grpo-icepop": {"name": "grpo", "correction": "icepop"},
    "grpo-sequence-mask": {"name": "grpo", "correction": "sequence_mask"},
    "grpo-geometric": {"name": "grpo", "correction": "geometric", "correction_bounds": [0.9, 1.1]},
    "grpo-kl-k2": {"name": "grpo", "kl_coef": 0.3},
    "grpo-entropy": {"name": "grpo", "entropy_coef": 0.2},
    "grpo-off-policy": {"name": "grpo", "off_policy_threshold": 0.05},
    "rloo": {"name": "rloo"},
    "reinforce_pp": {"name": "reinforce_pp"},
    "ppo": {"name": "ppo", "value_coef": 0.7},
    "ppo-free-values": {"name": "ppo", "value_clip": None},
    "gspo": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "cispo": {"name": "cispo"},
}


def inputs(seed: int) -> tuple[LossInputs, torch.Tensor]:
    """Random inputs, and the logits that logprobs, entropies and values hang on (``[N, 5]``)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 0.3) -> torch.Tensor:
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    logits = normal(9, 5, size=1.0).requires_grad_()
    table = logits.log_softmax(-1)
    logprobs = table[:, 0]
    near = logprobs.detach()
    return (
        LossInputs(
            logprobs=logprobs,
            old_logprobs=near + normal(9),
            rollout_logprobs=near + normal(9),
            advantages=normal(9, size=1.0),
            weights=torch.rand(9, generator=generator, dtype=torch.float64),
            calls=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]),
            ref_logprobs=near + normal(9),
            entropies=-(table.exp() * table).sum(-1),
            values=logits[:, 1],
            old_values=logits[:, 1].detach() + normal(9),
            returns=normal(9, size=1.0),
        ),
        logits,
    )


def moved(given: LossInputs, logits: torch.Tensor) -> LossInputs:
    """The same inputs with other logits; what a loss holds constant stays."""
    table = logits.log_softmax(-1)
    return replace(given, logprobs=table[:, 0], entropies=-(table.exp() * table).sum(-1), values=logits[:, 1])


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith(("gspo", "cispo", "grpo-off"))])
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_that_of_the_loss(name: str, seed: int):
    """Central differences in float64. Losses that hold a part of themselves constant have tests of their own."""
    algorithm = algorithms.make(LOSSES[name])
    given, logits = inputs(seed)
    loss, _ = algorithm.loss(given)
    (gradient,) = torch.autograd.grad(loss, logits)
    base = logits.detach()
    for place in range(base.numel()):
        step = torch.zeros_like(base)
        step.view(-1)[place] = 1e-6
        up, down = (float(algorithm.loss(moved(given, base + sign * step))[0].detach()) for sign in (1, -1))
        assert float(gradient.view(-1)[place]) == pytest.approx((up - down) / 2e-6, rel=1e-5, abs=1e-8)


def of_calls(numbers: torch.Tensor, calls: torch.Tensor) -> list[torch.Tensor]:
    return [numbers[calls == call] for call in range(int(calls.max()) + 1)]


@pytest.mark.parametrize("seed", range(4))
def test_gspo_has_the_gradient_of_its_sequence_objective(seed: int):
    """With one advantage and one share for a call, the token form is the sequence form (2507.18071, eq. 5 and 14)."""
    given, logits = inputs(seed)
    calls = given.calls
    given = replace(
        given,
        advantages=torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[calls],
        weights=torch.tensor([0.1, 0.2, 0.05], dtype=torch.float64)[calls],
    )
    algorithm = algorithms.make({"name": "gspo", "clip_low": 0.05, "clip_high": 0.1, "correction": "none"})
    loss, _ = algorithm.loss(given)
    wanted = torch.zeros((), dtype=torch.float64)
    for ratio, gain, share in zip(
        of_calls(given.logprobs - given.old_logprobs, calls),
        of_calls(given.advantages, calls),
        of_calls(given.weights, calls),
        strict=True,
    ):
        s = ratio.mean().exp()
        wanted = wanted - share.sum() * torch.minimum(s * gain[0], s.clamp(0.95, 1.1) * gain[0])
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_the_golden_ratio_of_gspo():
    """reference/training.md: log ratios .1, -.05, .02 make s = 1.0236."""
    one = torch.ones(3, dtype=torch.float64)
    log_ratio = torch.tensor([0.1, -0.05, 0.02], dtype=torch.float64)
    given = LossInputs(log_ratio, 0 * one, 0 * one, one, one / 3, torch.zeros(3, dtype=torch.long))
    loss, metrics = algorithms.make({"name": "gspo", "clip_high": 0.2}).loss(given)
    assert float(loss) == pytest.approx(-1.0236, abs=5e-5) and float(metrics["clipped"]) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_cispo_keeps_the_gradient_of_tokens_whose_weight_it_clips(seed: int):
    given, logits = inputs(seed)
    algorithm = algorithms.make({"name": "cispo", "clip_low": 0.1, "clip_high": 0.1, "correction": "none"})
    loss, metrics = algorithm.loss(given)
    assert float(metrics["clipped"]) > 0
    held = (given.logprobs - given.old_logprobs).exp().clamp(0.9, 1.1).detach()
    plain = -(given.weights * held * given.advantages * given.logprobs).sum()
    (wanted,) = torch.autograd.grad(plain, logits, retain_graph=True)
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-15)


def one_token(ratio: float, advantage: float, **settings: Any) -> float:
    """The loss of one token."""
    one = torch.ones(1, dtype=torch.float64)
    given = LossInputs(math.log(ratio) * one, 0 * one, 0 * one, advantage * one, one, torch.zeros(1, dtype=torch.long))
    return float(algorithms.make({"name": "grpo", **settings}).loss(given)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss"),
    [
        (1.1, 1.0, {}, -1.1),
        (1.5, 1.0, {}, -1.28),  # clip-higher
        (0.5, 1.0, {}, -0.5),  # a good token that became unlikely is not clipped
        (0.5, -1.0, {}, 0.8),
        (5.0, -1.0, {}, 5.0),
        (5.0, -1.0, {"dual_clip": 3.0}, 3.0),
        (5.0, 1.0, {"dual_clip": 3.0}, -1.28),
    ],
)
def test_the_clip_of_one_token(ratio: float, advantage: float, settings: dict[str, Any], loss: float):
    assert one_token(ratio, advantage, **settings) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        ("token", [1, 2, 1.105]),
        ("icepop", [1, 0, 1.105]),
        ("none", [1, 1, 1]),
        ("bypass", [1, 1, 1]),
        ("sequence", [2, 2, 2]),
        ("sequence_mask", [0, 0, 0]),
        ("geometric", [0, 0, 0]),
    ],
)
def test_the_golden_corrections(correction: Any, wanted: list[float]):
    """reference/training.md: w = 1, 4.48, 1.105; their product 4.953, their geometric mean 1.705."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    rollout = torch.tensor([-1.0, -3.5, -0.6], dtype=torch.float64)
    calls = torch.zeros(3, dtype=torch.long)
    got, _ = correction_weights(correction, old - rollout, calls)
    assert got.tolist() == pytest.approx(wanted, abs=1e-3)
    assert float(call_sums(old - rollout, calls).exp()) == pytest.approx(4.953, abs=1e-3)
    assert float(call_means(old - rollout, calls).exp()) == pytest.approx(1.705, abs=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_nothing_is_clipped_or_corrected_and_all_have_the_same_pull(name: str):
    """The first pass of every algorithm is the policy gradient: ``-A grad log pi``."""
    given, logits = inputs(0)
    same = given.logprobs.detach()
    given = replace(given, old_logprobs=same, rollout_logprobs=same, ref_logprobs=same)
    algorithm = algorithms.make(LOSSES[name])
    loss, metrics = algorithm.loss(given)
    assert float(metrics["clipped"]) == float(metrics["corrected"]) == float(metrics["mismatch_kl"]) == 0.0
    plain = -(given.weights * given.advantages * given.logprobs).sum()
    if isinstance(algorithm, PolicyGradient) and algorithm.entropy_coef:
        assert given.entropies is not None
        plain = plain - algorithm.entropy_coef * (given.weights * given.entropies).sum()
    columns = slice(1) if isinstance(algorithm, PPO) else slice(None)  # the value hangs on another logit
    got, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, plain))
    if isinstance(algorithm, PPO):
        got, wanted = got[:, columns], wanted[:, columns]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)


def test_a_ratio_beyond_all_bounds_stays_finite():
    for log_ratio in (-800.0, 800.0):
        one = torch.ones(2, dtype=torch.float64)
        for name in ("grpo", "gspo", "cispo", "rloo"):
            variable = (log_ratio * one).requires_grad_()
            given = LossInputs(variable, 0 * one, -log_ratio * one, -one, one, torch.zeros(2, dtype=torch.long))
            loss, metrics = algorithms.make(name).loss(given)
            loss.backward()
            assert variable.grad is not None and torch.isfinite(variable.grad).all() and torch.isfinite(loss)
            assert all(torch.isfinite(value) for value in metrics.values())


# ----------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"name": "grpo", "kl_estimator": "k1"}, "gradient 0 in expectation.*kl_in='reward'"),
        ({"name": "rloo", "kl_in": "reward", "kl_estimator": "k3"}, "kl_in='reward' is k1"),
        ({"name": "rloo", "kl_in": "reward", "kl_unbiased": True}, "kl_in='reward' is k1"),
        ({"name": "grpo", "scale": "grup"}, "scale = 'grup': Input should be 'group', 'batch' or 'none'"),
        ({"name": "grpo", "clip_low": -1}, "clip_low = -1: .*greater than or equal to 0"),
        ({"name": "grpo", "clip_low": math.nan}, "clip_low = nan"),
        ({"name": "grpo", "dual_clip": 0.5}, "dual_clip = 0.5: .*greater than 1"),
        ({"name": "grpo", "correction": "none", "correction_bounds": [0, 2]}, "has no correction_bounds"),
        ({"name": "grpo", "correction_bounds": [2, 0.5]}, "0 <= low < high"),
        ({"name": "grpo", "clip_hihg": 0.3}, "no setting 'clip_hihg'; did you mean 'clip_high'"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip = 3.0: Input should be None"),
        ({"name": "ppo", "critic": "none"}, "critic = 'none': Input should be 'head' or 'model'"),
        ({"name": "ppo", "gamma": 1.5}, "gamma = 1.5: .*less than or equal to 1"),
        ({"clip_low": 0.1}, "has no name"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_reason(chosen: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        algorithms.make(chosen)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"clip_high": 0.3}, r"unknown setting 'clip_high': .*algorithm=\{'name': 'grpo', 'clip_high': 0.3\}"),
        ({"algorithm": "ppo", "gae_lambda": 0.9}, r"algorithm=\{'name': 'ppo', 'gae_lambda': 0.9\}"),
        ({"gae_lambda": 0.9}, r"algorithm=\{'name': 'ppo', 'gae_lambda': 0.9\}"),
        ({"algorithm": {"name": "gspo"}, "scale": "none"}, r"algorithm=\{'name': 'gspo', 'scale': 'none'\}"),
        ({"learning_rat": 0.9}, r"unknown setting 'learning_rat'; did you mean 'learning_rate'"),
    ],
)
def test_a_setting_of_the_algorithm_at_the_top_is_told_where_it_belongs(settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        TrainConfig.of(model="m", **settings)


@pytest.mark.parametrize(
    ("chosen", "needs"),
    [
        ({"name": "grpo"}, {"old_logprobs"}),
        ({"name": "grpo", "correction": "bypass"}, set()),
        ({"name": "grpo", "kl_coef": 0.1}, {"old_logprobs", "ref_logprobs"}),
        ({"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"}, {"old_logprobs", "kl"}),
        ({"name": "cispo", "entropy_coef": 0.1}, {"old_logprobs", "entropies"}),
        ({"name": "ppo"}, {"old_logprobs", "values"}),
        ({"name": "ppo", "kl_coef": 0.1}, {"old_logprobs", "values", "kl"}),
    ],
)
def test_the_model_is_asked_for_nothing_else(chosen: dict[str, Any], needs: set[str]):
    assert algorithms.needs(algorithms.make(chosen)) == needs


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo"])
def test_the_file_of_an_algorithm_has_its_formula_its_paper_and_when_to_use_it(name: str):
    module = inspect.getmodule(plugins.algorithms().find(name))
    text = (module and module.__doc__) or ""
    assert ".. math::" in text and "arXiv" in text and "Use " in text

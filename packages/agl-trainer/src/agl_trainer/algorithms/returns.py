"""Returns and advantages along an episode: pure functions on the sampled tokens only, in the order of time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agl.errors import NumericsError
from agl.protocols import StepTokens
from agl_trainer.algorithms.baselines import Spread

VARIANCE_EPSILON = 1e-8
"""Added to the variance, as verl and OpenRLHF do."""


def rewards_with_kl(step: StepTokens, kl_coef: float) -> list[float]:
    """Reward of each token minus ``kl_coef`` times its k1, when KL is in the reward."""
    if step.kl is None:
        return list(step.rewards)
    return [reward - kl_coef * kl for reward, kl in zip(step.rewards, step.kl, strict=True)]


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    r""":math:`R_t = r_t + \gamma R_{t+1}`."""
    result: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        result.append(later)
    return result[::-1]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, gae_lambda: float) -> list[float]:
    r"""Generalised advantage estimates (arXiv 1506.02438, eq. 16); the value after the last token is 0.

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad A_t = \delta_t + \gamma\lambda A_{t+1}
    """
    result: list[float] = []
    later = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * gae_lambda * later
        next_value = value
        result.append(later)
    return result[::-1]


def whiten(numbers: Sequence[float]) -> list[float]:
    """Mean 0 and sample variance 1 over all tokens of the step; 0 where there is no spread."""
    if not numbers:
        return []
    if wrong := next((number for number in numbers if not math.isfinite(number)), None):
        raise NumericsError(f"an advantage is {wrong!r}; the critic's values or the logprobs are not finite")
    spread = Spread(numbers)
    scale = math.hypot(spread.deviation, math.sqrt(VARIANCE_EPSILON) / spread.unit)
    return [x / scale for x in spread.centred]

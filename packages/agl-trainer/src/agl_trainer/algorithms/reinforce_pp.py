r"""REINFORCE++: token-level returns, whitened over the whole batch, without a critic.

With the reward of each sampled token :math:`r_t` (a call's at its last one, minus :math:`\beta k_1` when KL is in the
reward; Hu et al., arXiv 2501.03262)

.. math:: R_t = r_t + \gamma R_{t+1}, \qquad A_t = \frac{R_t - \mathrm{mean}}{\mathrm{std}}

over all sampled tokens of the step. Its baseline form, ``group_baseline=True``, first subtracts from each reward the
mean of its group. The loss is PPO-clip. Use the plain form when a task has one rollout (``group_size=1``), the baseline
form when rewards of different tasks lie far apart; for both, batches should be large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs, StepTokens, TokenAdvantages
from agl_trainer.algorithms.baselines import centred, finite
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, NotNegative, PolicyGradient
from agl_trainer.algorithms.returns import discounted_returns, rewards_with_kl, whiten
from agl_trainer.algorithms.surrogates import ppo_clip


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class ReinforcePP(PolicyGradient):
    """REINFORCE++ with its settings."""

    clip_high: NotNegative = 0.2
    """How far the ratio may rise above 1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """A term of the loss, or subtracted from the reward of each token."""
    group_baseline: bool = False
    """Subtract from each reward the mean of its group (REINFORCE++-baseline)."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount from one sampled token to the next."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """The rewards themselves, or what they are above the mean of their group."""
        return centred(values, groups) if self.group_baseline else finite(values, groups)

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Whitened returns of each token; see the formula above."""
        rewards = rewards_with_kl(step, self.kl_coef)
        result = [0.0] * len(rewards)
        for places in step.episodes:
            for place, value in zip(places, discounted_returns([rewards[p] for p in places], self.gamma), strict=True):
                result[place] = value
        return TokenAdvantages(whiten(result))

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """PPO-clip on the ratio of each token."""
        log_ratio = self.log_ratio(inputs)
        return self.total(
            inputs, *ppo_clip(log_ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        )

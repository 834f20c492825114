r"""RLOO: REINFORCE with a leave-one-out baseline.

For the unique rollouts of a group of G (Ahmadian et al., arXiv 2402.14740, eq. 8)

.. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \ne i} r_j = \frac{G}{G-1} (r_i - \mathrm{mean}_g)

and GRPO's clipped loss, which on the first pass is REINFORCE's. A group of one has advantage 0. Use it instead of GRPO
when rewards have a scale that means something: an unbiased baseline, and easy or hard tasks are not blown up. With
``kl_in="reward"`` the KL of the whole rollout is subtracted from its reward, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs
from agl_trainer.algorithms.baselines import by_group, times
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, PolicyGradient
from agl_trainer.algorithms.surrogates import ppo_clip


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class RLOO(PolicyGradient):
    """RLOO with its settings."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """Advantage of each unit against the others of its group; see the formula above."""
        result = [0.0] * len(values)
        for places, spread in by_group(values, groups):
            factor = len(places) / max(1, len(places) - 1)
            for place, x in zip(places, spread.centred, strict=True):
                result[place] = times(factor * x, spread.unit)
        return result

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """PPO-clip on the ratio of each token."""
        log_ratio = self.log_ratio(inputs)
        return self.total(
            inputs, *ppo_clip(log_ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        )

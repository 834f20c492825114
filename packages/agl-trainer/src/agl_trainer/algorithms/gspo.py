r"""GSPO: one ratio for each call instead of one for each token.

.. math:: s_i = \exp\Big(\frac1{|y_i|} \sum_t \log\rho_{i,t}\Big), \qquad
          \ell = -\min\left(s_i A,\ \mathrm{clip}(s_i, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right)

in the token form, in which each token has the gradient of its own logprob (Zheng et al., arXiv 2507.18071, eqs. 5, 7
and 14). Advantages are GRPO's. A sequence is a call: what one sampling produced, whatever row it stands in. Use it for
mixture-of-experts models and several passes, where ratios of single tokens are noise. The clip is much narrower than
PPO's. The paper's mean over sequences is ``aggregation="sequence"``; ours by default is over rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs
from agl_trainer.algorithms.baselines import relative
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, NotNegative, PolicyGradient
from agl_trainer.algorithms.surrogates import ppo_clip, sequence_log_ratio


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class GSPO(PolicyGradient):
    """GSPO with its settings."""

    clip_low: NotNegative = 3e-4
    """How far the ratio of a call may fall below 1."""
    clip_high: NotNegative = 4e-4
    """How far it may rise above 1."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, or of all rewards of the step, or not at all."""
    epsilon: NotNegative = 1e-4
    """Added to the standard deviation."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """GRPO's: of each unit against its group."""
        return relative(values, groups, self.scale, self.epsilon)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """PPO-clip on the ratio of each call; see the formula above."""
        log_ratio = sequence_log_ratio(self.log_ratio(inputs), inputs.calls)
        return self.total(
            inputs, *ppo_clip(log_ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        )

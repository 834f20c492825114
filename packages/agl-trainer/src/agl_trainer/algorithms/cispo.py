r"""CISPO: clip the importance weight, never the gradient.

.. math:: \ell = -\,\mathrm{sg}\left[\mathrm{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high})\right] A \log\pi_\theta

(MiniMax-M1, arXiv 2506.13585, eq. 4; ScaleRL, 2510.13786, uses it too). Advantages are GRPO's. Rare tokens that
PPO-clip would silence in later passes keep learning. Use it with several passes or stale rollouts. By default the
weight has no lower bound and is at most 5; the papers average over tokens (``aggregation="token"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs
from agl_trainer.algorithms.baselines import relative
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, NotNegative, PolicyGradient
from agl_trainer.algorithms.surrogates import cispo


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class CISPO(PolicyGradient):
    """CISPO with its settings."""

    clip_low: NotNegative = 1.0
    """How far the weight may fall below 1; 1 is no bound."""
    clip_high: NotNegative = 4.0
    """How far it may rise above 1."""
    dual_clip: None = None
    """Not offered: the weight is bounded already."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, or of all rewards of the step, or not at all."""
    epsilon: NotNegative = 1e-4
    """Added to the standard deviation."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """GRPO's: of each unit against its group."""
        return relative(values, groups, self.scale, self.epsilon)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """The weighted logprob of each token; see the formula above."""
        log_ratio = self.log_ratio(inputs)
        return self.total(inputs, *cispo(log_ratio, inputs.logprobs, inputs.advantages, self.clip_low, self.clip_high))

r"""GRPO: group-relative advantages with a clipped, importance-corrected policy gradient.

For the unique rollouts :math:`i` of a group :math:`g` (Shao et al., arXiv 2402.03300, eq. 3)

.. math:: A_i = \frac{r_i - \mathrm{mean}_g}{\mathrm{std}_g + \varepsilon}

with the sample standard deviation (n-1). A group of one, or one whose rewards are all equal, has advantage 0.
For each sampled token, with :math:`\rho = \pi_\theta/\pi_{old}`,

.. math:: \ell = -\min\left(\rho A,\ \mathrm{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right)

Use it whenever several rollouts of a task can be compared. Other papers are settings of it:

* Dr. GRPO (2503.20783): ``scale="none", aggregation="constant"``.
* DAPO (2503.14476): ``clip_high=0.28, aggregation="token"`` and the refilling of degenerate groups.
* Lite PPO (2508.08221): ``scale="batch", aggregation="token"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs
from agl_trainer.algorithms.baselines import relative
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, NotNegative, PolicyGradient
from agl_trainer.algorithms.surrogates import ppo_clip


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class GRPO(PolicyGradient):
    """GRPO with its settings."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group, or of all rewards of the step, or not at all."""
    epsilon: NotNegative = 1e-4
    """Added to the standard deviation; TRL's (verl's is 1e-6)."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """Advantage of each unit against its group; see the formula above."""
        return relative(values, groups, self.scale, self.epsilon)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """PPO-clip on the ratio of each token; see the formula above."""
        log_ratio = self.log_ratio(inputs)
        return self.total(
            inputs, *ppo_clip(log_ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        )

r"""GRPO: group-relative advantages with a clipped, importance-corrected policy gradient.

For the unique rollouts :math:`i` of a group :math:`g` (Shao et al., arXiv 2402.03300, eq. 3)

.. math:: A_i = \frac{r_i - \mathrm{mean}_g}{\mathrm{std}_g + \varepsilon}

with the sample standard deviation (n-1). A group of one, or one whose rewards are all equal, has advantage 0.
For each sampled token, with :math:`\rho = \pi_\theta/\pi_{old}` and the truncated importance weight
:math:`w = \min(\pi_{old}/\pi_{rollout}, C)` held constant (token-level TIS, C = 2),

.. math:: \ell = -\,w \min\left(\rho A,\ \mathrm{clip}(\rho, 1-\epsilon_{low}, 1+\epsilon_{high}) A\right)
          + \beta\, \mathrm{KL}

Weights fix how tokens add up (`agl_trainer.batch.weights`). Where we differ from agentlightning 1.0 on purpose:
a rollout weighs 1/n_rollouts, not 1/n_rows. Use it whenever several rollouts of a task can be compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from agl.protocols import LossInputs
from agl_trainer.batch.weights import Aggregation

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does."""
BOUND = 20.0
"""Log ratios are held within this, as verl and OpenRLHF do: beyond it one token would drown a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO:
    """GRPO with its settings."""

    clip_low: float = 0.2
    """How far the ratio may fall below 1."""
    clip_high: float = 0.28
    """How far it may rise above 1 (clip-higher, arXiv 2503.14476)."""
    tis_cap: float = 2.0
    """Largest weight that corrects for the sampler's other arithmetic or older weights."""
    kl_coef: float = 0.0
    """Strength of the pull towards the reference model; 0 needs no reference."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """k2: half the squared log ratio, whose gradient is that of the reverse KL. k3: the value of Schulman's k3 with
    the gradient of k2 (straight-through)."""
    scale: Literal["group", "none"] = "group"
    """Divide by the group's standard deviation, or not (Dr. GRPO, arXiv 2503.20783)."""
    aggregation: Aggregation = "rollout"
    """Every rollout weighs the same, or every call, or every sampled token."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """Advantage of each unit against its group; see the formula above."""
        members: dict[str, list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            members[group].append(index)
        result = [0.0] * len(values)
        for indices in members.values():
            rewards = [values[index] for index in indices]
            mean = math.fsum(rewards) / len(rewards)
            if len(rewards) < 2 or max(rewards) == min(rewards):
                continue
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            divisor = deviation + EPSILON if self.scale == "group" else 1.0
            for index in indices:
                result[index] = (values[index] - mean) / divisor
        return result

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The weighted sum over tokens, and weighted sums to log; see the formula above."""
        ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-BOUND, BOUND).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        objective = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        mismatch = (inputs.old_logprobs - inputs.rollout_logprobs).clamp(-BOUND, BOUND)
        correction = mismatch.exp().clamp(max=self.tis_cap).detach()
        loss = -(inputs.weights * correction * objective).sum()
        metrics = {
            "clipped": (inputs.weights * (ratio * inputs.advantages > clipped * inputs.advantages)).sum(),
            # k3 of the rollout policy against the trained one, which the samples come from
            "mismatch_kl": (inputs.weights * (mismatch.exp() - 1 - mismatch)).sum(),
            "tis_capped": (inputs.weights * (mismatch.exp() > self.tis_cap)).sum(),
        }
        if self.kl_coef and inputs.ref_logprobs is not None:
            kl = kl_divergence(inputs.logprobs, inputs.ref_logprobs, self.kl_estimator)
            loss = loss + self.kl_coef * (inputs.weights * kl).sum()
            metrics["kl"] = (inputs.weights * kl).sum()
        return loss, {name: value.detach() for name, value in metrics.items()}


def kl_divergence(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) whose gradient is the reverse KL's (arXiv 2512.21852)."""
    difference = logprobs - reference
    k2 = difference.square() / 2
    if estimator == "k2":
        return k2
    k3 = (-difference).exp() + difference - 1
    return k3.detach() + k2 - k2.detach()

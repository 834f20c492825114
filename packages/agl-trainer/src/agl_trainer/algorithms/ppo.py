r"""PPO: a critic says what to expect, token by token.

With the reward of each sampled token :math:`r_t` (a call's at its last one, minus :math:`\beta k_1` when KL is in the
reward), the critic's :math:`V_t` and :math:`t+1` the next *sampled* token of the agent: tool results and other observed
tokens have no value, and nothing decays across them (Schulman et al., arXiv 1707.06347 and 1506.02438)

.. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \quad A_t = \delta_t + \gamma\lambda A_{t+1}, \quad R_t = A_t + V_t

Advantages are whitened over the sampled tokens of the step, after the returns R were taken. The loss is PPO-clip and

.. math:: \ell_V = \tfrac12 \max\left((V-R)^2, (\mathrm{clip}(V, V_{old} \pm \epsilon_V) - R)^2\right)

All calls of an agent in a rollout are one episode. With gamma = lambda = 1 the advantage of a token is its call's
credit minus the value, so credit of every kind (the whole return, discounted, per step) is what the critic learns to
expect. Use it when a task cannot be repeated, when rewards come in the middle, or when single tokens of long rollouts
deserve different credit. It costs a critic and one more forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs, StepTokens, TokenAdvantages
from agl_trainer.algorithms.baselines import finite
from agl_trainer.algorithms.policy_gradient import SETTINGS, Metrics, Need, NotNegative, PolicyGradient
from agl_trainer.algorithms.returns import gae, rewards_with_kl, whiten
from agl_trainer.algorithms.surrogates import ppo_clip

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class PPO(PolicyGradient):
    """PPO with its settings."""

    clip_high: NotNegative = 0.2
    """How far the ratio may rise above 1."""
    kl_in: Literal["loss", "reward"] = "reward"
    """A term of the loss, or subtracted from the reward of each token."""
    gamma: Share = 1.0
    """Discount from one sampled token to the next."""
    gae_lambda: Share = 1.0
    """Below 1 trusts the critic more and single returns less."""
    whiten: bool = True
    """Bring advantages to mean 0 and variance 1 over the step."""
    critic: Literal["head", "model"] = "head"
    """A value head on the policy's last states, or a model of its own that begins as the policy."""
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Of the head, or of the whole value model, which wants about 1e-5."""
    value_coef: NotNegative = 0.1
    """Weight of the value loss, which a head shares with the policy."""
    value_clip: NotNegative | None = 0.2
    """How far a value may move in one step before its loss stops to pull; None does not clip."""
    value_warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the beginning in which only the critic learns."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the model must be asked for."""
        return super().needs | frozenset[Need](("values",))

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """The rewards themselves: the critic is the baseline, and comes in with `token_advantages`."""
        return finite(values, groups)

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        """Advantage and return of each token; see the formula above."""
        assert step.values is not None
        rewards = rewards_with_kl(step, self.kl_coef)
        advantages = [0.0] * len(rewards)
        for places in step.episodes:
            own = gae([rewards[p] for p in places], [step.values[p] for p in places], self.gamma, self.gae_lambda)
            for place, value in zip(places, own, strict=True):
                advantages[place] = value
        returns = [advantage + value for advantage, value in zip(advantages, step.values, strict=True)]
        return TokenAdvantages(whiten(advantages) if self.whiten else advantages, returns)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """PPO-clip on the ratio of each token, and the value loss."""
        log_ratio = self.log_ratio(inputs)
        loss, metrics = self.total(
            inputs, *ppo_clip(log_ratio, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)
        )
        assert inputs.values is not None and inputs.old_values is not None and inputs.returns is not None
        errors, clipped = value_loss(inputs.values, inputs.old_values, inputs.returns, self.value_clip)
        error = (inputs.weights * errors).sum()
        told = {"value_loss": error.detach(), "value_clipped": (inputs.weights * clipped).sum()}
        return loss + self.value_coef * error, metrics | told


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each token, and which are clipped (``[N]`` each); see the formula above."""
    error = (values - returns).square()
    if clip is None:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held_error = (held - returns).square()
    return torch.maximum(error, held_error) / 2, held_error > error

r"""What the policy-gradient algorithms share: settings, and how a surrogate becomes the loss of a step.

.. math:: L = \sum_t \omega_t \left( w_t\, \ell_t + \beta\, \mathrm{KL}_t - \eta\, H_t \right)

:math:`\ell` is the algorithm's surrogate (`surrogates`), :math:`\omega` a token's share of the step
(`agl_trainer.batch.weights`), :math:`w` the correction for the sampler's other arithmetic or older weights
(`corrections`), KL the pull towards the reference (`kl`), H the entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from agl.protocols import LossInputs
from agl_trainer.algorithms.corrections import BOUND, Correction, call_means, correction_weights
from agl_trainer.algorithms.kl import kl_divergence
from agl_trainer.batch.weights import Aggregation

Need = Literal["old_logprobs", "ref_logprobs", "kl", "entropies", "values"]
"""What an algorithm may ask the model for; see `agl.protocols.Algorithm`."""
Metrics = Mapping[str, torch.Tensor]
NotNegative = Annotated[float, Field(ge=0)]
SETTINGS = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class PolicyGradient:
    """Settings of every policy-gradient algorithm."""

    clip_low: NotNegative = 0.2
    """How far the ratio may fall below 1."""
    clip_high: NotNegative = 0.28
    """How far it may rise above 1 (clip-higher, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio of bad tokens (arXiv 1912.09729, usually 3): the two-sided clip of INTELLECT-2."""
    correction: Correction = "token"
    """How to correct for the sampler; see `agl_trainer.algorithms.corrections`."""
    correction_bounds: tuple[float, float] | None = None
    """Lowest and highest correction; default: the usual ones of the kind."""
    off_policy_threshold: NotNegative | None = None
    """Leave out calls with bad advantages whose mean ``log pi_rollout - log pi`` exceeds this (DeepSeek-V3.2)."""
    kl_coef: NotNegative = 0.0
    """Strength of the pull towards the reference model; 0 needs no reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Default: k2 in the loss, k1 in the reward. k3 has the gradient of k2; see `agl_trainer.algorithms.kl`."""
    kl_unbiased: bool = False
    """Weigh the KL in the loss by the ratio, which is right when a step has several passes (DeepSeek-V3.2)."""
    entropy_coef: float = 0.0
    """Strength of the entropy bonus."""
    aggregation: Aggregation = "rollout"
    """Every rollout weighs the same, or every call, or every sampled token, or sums over a constant length."""

    def __post_init__(self) -> None:
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1' has gradient 0 in expectation as a term of the loss: it would pull nowhere. Use "
                "'k2', 'k3', or kl_in='reward'"
            )
        if self.kl_in == "reward" and (self.kl_estimator not in (None, "k1") or self.kl_unbiased):
            raise ValueError(
                f"kl_in='reward' is k1 of each token; kl_estimator={self.kl_estimator!r} and "
                f"kl_unbiased={self.kl_unbiased!r} belong to kl_in='loss'"
            )
        if self.correction_bounds is not None and self.correction in ("none", "bypass"):
            raise ValueError(f"correction={self.correction!r} has no correction_bounds")
        low, high = self.correction_bounds or (0.0, 1.0)
        if not 0 <= low < high:
            raise ValueError(f"correction_bounds={self.correction_bounds!r} must be 0 <= low < high")

    @property
    def needs(self) -> frozenset[Need]:
        """What the model must be asked for."""
        asked: dict[Need, bool] = {
            "old_logprobs": self.correction != "bypass",
            "ref_logprobs": self.kl_coef > 0 and self.kl_in == "loss",
            "kl": self.kl_coef > 0 and self.kl_in == "reward",
            "entropies": self.entropy_coef != 0,
        }
        return frozenset(name for name, wanted in asked.items() if wanted)

    def log_ratio(self, inputs: LossInputs) -> torch.Tensor:
        """``log pi - log pi_old``; with bypass the rollout's logprobs are the old ones."""
        old = inputs.rollout_logprobs if self.correction == "bypass" else inputs.old_logprobs
        return inputs.logprobs - old

    def total(
        self, inputs: LossInputs, surrogate: torch.Tensor, clipped: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of the formula above, and weighted sums to log.

        Args:
            inputs: of a micro-batch.
            surrogate: ``[N]`` loss of each token.
            clipped: ``[N]`` which of them were clipped.
        """
        weights = inputs.weights
        mismatch = inputs.old_logprobs - inputs.rollout_logprobs
        correction, corrected = correction_weights(self.correction, mismatch, inputs.calls, self.correction_bounds)
        if self.off_policy_threshold is not None:
            drift = call_means(inputs.rollout_logprobs - inputs.logprobs.detach(), inputs.calls)[inputs.calls]
            stray = (inputs.advantages < 0) & (drift > self.off_policy_threshold)
            correction = correction * ~stray
            corrected = corrected | stray
        loss = (weights * correction * surrogate).sum()
        bounded = mismatch.clamp(-BOUND, BOUND)
        metrics = {
            "clipped": (weights * clipped).sum(),
            # k3 of the rollout policy against the trained one, which the samples come from
            "mismatch_kl": (weights * (bounded.exp() - 1 - bounded)).sum(),
            "corrected": (weights * corrected).sum(),
        }
        if "ref_logprobs" in self.needs:
            assert inputs.ref_logprobs is not None
            kl = kl_divergence(inputs.logprobs, inputs.ref_logprobs, self.kl_estimator or "k2")
            if self.kl_unbiased:
                kl = kl * self.log_ratio(inputs).detach().clamp(-BOUND, BOUND).exp()
            metrics["kl"] = (weights * kl).sum()
            loss = loss + self.kl_coef * metrics["kl"]
        if "entropies" in self.needs:
            assert inputs.entropies is not None
            metrics["entropy"] = (weights * inputs.entropies).sum()
            loss = loss - self.entropy_coef * metrics["entropy"]
        return loss, {name: value.detach() for name, value in metrics.items()}

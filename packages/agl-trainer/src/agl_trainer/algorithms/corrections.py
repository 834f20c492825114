r"""Corrections for a sampler that is not quite the policy: other kernels, other precision, older weights.

With :math:`w = \pi_{old}/\pi_{rollout}` of a token and bounds (low, high):

========================  =========================================================================  ============
``token``                 :math:`w` held within the bounds (token TIS, fengyao.notion.site/off-policy-rl)    0, 2
``sequence``              :math:`\prod w` of the call, held within the bounds (sequence TIS)                  0, 2
``icepop``                :math:`w` inside the bounds, else 0 (IcePop)                                        0.5, 2
``sequence_mask``         :math:`\prod w` of the call inside the bounds, else 0 (MIS)                         0, 3
``geometric``             1 if :math:`\exp(\overline{\log w})` of the call is inside the bounds, else 0       0.99, 1.01
``bypass``                1; the rollout's logprobs are the old ones, and no forward is spent on others
``none``                  1
========================  =========================================================================  ============
"""

from __future__ import annotations

from typing import Literal

import torch

Correction = Literal["token", "sequence", "icepop", "sequence_mask", "geometric", "bypass", "none"]
BOUNDS: dict[str, tuple[float, float]] = {
    "token": (0.0, 2.0),
    "sequence": (0.0, 2.0),
    "icepop": (0.5, 2.0),
    "sequence_mask": (0.0, 3.0),
    "geometric": (0.99, 1.01),
}
BOUND = 20.0
"""Log ratios are held within this, as verl and OpenRLHF do: beyond it one token would drown a whole step."""


def correction_weights(
    kind: Correction, log_weights: torch.Tensor, calls: torch.Tensor, bounds: tuple[float, float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor of each token (``[N]``, without gradient), and which tokens are outside the bounds.

    Args:
        kind: see above.
        log_weights: ``[N]``, ``log pi_old - log pi_rollout``.
        calls: ``[N]`` which call each token belongs to, from 0.
        bounds: lowest and highest; default: those above.
    """
    log_weights = log_weights.detach()
    if kind in ("none", "bypass"):
        return torch.ones_like(log_weights), torch.zeros_like(log_weights, dtype=torch.bool)
    low, high = bounds or BOUNDS[kind]
    if kind in ("sequence", "sequence_mask"):
        log_weights = call_sums(log_weights, calls)[calls]
    elif kind == "geometric":
        log_weights = call_means(log_weights, calls)[calls]
    weights = log_weights.clamp(-BOUND, BOUND).exp()
    outside = (weights < low) | (weights > high)
    if kind in ("token", "sequence"):
        return weights.clamp(low, high), outside
    kept = torch.ones_like(weights) if kind == "geometric" else weights
    return kept * ~outside, outside


def call_sums(numbers: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens of each call."""
    return numbers.new_zeros(len(calls.bincount())).index_add(0, calls, numbers)


def call_means(numbers: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each call."""
    return call_sums(numbers, calls) / calls.bincount().clamp(min=1)

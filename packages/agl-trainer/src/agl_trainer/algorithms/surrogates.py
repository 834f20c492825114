r"""Losses of single tokens: what an algorithm minimises before weights, corrections and pulls.

Each takes :math:`\log\rho = \log\pi_\theta - \log\pi_{old}` and the advantages A (``[N]`` each) and returns the losses
and which tokens are clipped (``[N]`` each).
"""

from __future__ import annotations

import torch

from agl_trainer.algorithms.corrections import BOUND, call_means

Surrogate = tuple[torch.Tensor, torch.Tensor]


def ppo_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None = None
) -> Surrogate:
    r""":math:`\max(-\rho A, -\mathrm{clip}(\rho, 1-low, 1+high) A)`, for A < 0 at most :math:`-dual\,A`.

    Sources: PPO (arXiv 1707.06347, eq. 7), clip-higher (2503.14476, eq. 10), dual-clip (1912.09729, eq. 5).
    """
    ratio = log_ratio.clamp(-BOUND, BOUND).exp()
    plain = -ratio * advantages
    held = -ratio.clamp(1 - low, 1 + high) * advantages
    loss, clipped = torch.maximum(plain, held), held > plain
    if dual is not None:
        most = -dual * advantages
        capped = (advantages < 0) & (loss > most)
        loss, clipped = torch.where(capped, most, loss), clipped | capped
    return loss, clipped


def cispo(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> Surrogate:
    r""":math:`-\mathrm{sg}[\mathrm{clip}(\rho, 1-low, 1+high)]\, A \log\pi` (arXiv 2506.13585, eq. 4)."""
    ratio = log_ratio.detach().clamp(-BOUND, BOUND).exp()
    held = ratio.clamp(1 - low, 1 + high)
    return -held * advantages * logprobs, held != ratio


def sequence_log_ratio(log_ratio: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    r"""GSPO's :math:`\log s_i = \overline{\log\rho}` of each token's call, in the token form.

    Its value is the call's mean and its gradient the token's own, :math:`\mathrm{sg}[\log s_i] + \log\pi -
    \mathrm{sg}[\log\pi]` (arXiv 2507.18071, eqs. 7 and 14).
    """
    means = call_means(log_ratio.detach(), calls)[calls]
    return means + log_ratio - log_ratio.detach()

r"""Estimates of KL(policy || reference) from single tokens, whose gradients are right (arXiv 2512.21852).

With :math:`d = \log\pi - \log\pi_{ref}`: :math:`k_1 = d`, :math:`k_2 = d^2/2`, :math:`k_3 = e^{-d} + d - 1`. Under
samples of the policy k1 and k3 have the right value, but the gradient of the KL is :math:`d\nabla\log\pi`, that of
**k2**:

* k1 in the loss has gradient :math:`\nabla\log\pi`, which is 0 in expectation. It belongs in the reward.
* k3 in the loss has gradient :math:`(1 - e^{-d})\nabla\log\pi`: that of the forward KL(reference || policy). So our k3
  is straight-through: the value of k3, the gradient of k2. (Times the ratio it is what DeepSeek-V3.2 calls unbiased.)
"""

from __future__ import annotations

from typing import Literal

import torch


def kl_divergence(
    logprobs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """``[N]`` estimates, all with the gradient of the reverse KL."""
    difference = logprobs - reference
    k2 = difference.square() / 2
    if estimator == "k2":
        return k2
    value = difference if estimator == "k1" else (-difference).exp() + difference - 1
    return value.detach() + k2 - k2.detach()

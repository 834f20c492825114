r"""Supervised fine-tuning on demonstrations: the loss of the warm-up.

.. math:: \ell = -\log \pi_\theta(a_t \mid s_t)

averaged over the demonstrated tokens. Advantages play no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from agl.protocols import LossInputs
from agl_trainer.batch.weights import Aggregation


class SFT:
    """Imitate what was demonstrated."""

    aggregation: Aggregation = "token"
    needs: frozenset[str] = frozenset()

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        """1 for everyone: a demonstration is right by definition."""
        return [1.0] * len(values)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The weighted negative logprob."""
        loss = -(inputs.weights * inputs.logprobs).sum()
        return loss, {"sft_loss": loss.detach()}

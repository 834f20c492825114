"""The critic: what return to expect from each state that predicts a sampled token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from agl.errors import ConfigError
from agl.protocols import Algorithm


class Critic(nn.Module):
    """A value head in at least float32, on the policy's trunk or one of its own. At first it expects 0 everywhere."""

    steps: torch.Tensor
    """Training steps it has learned in; kept with its weights, so that a warm-up is not repeated after a resume."""

    def __init__(self, hidden: int, trunk: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        """None: the policy's."""
        self.head = nn.Linear(hidden, 1, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """``[N, H]`` last states to ``[N]`` values, whatever precision the trunk computes in."""
        with torch.autocast(states.device.type, enabled=False):
            return self.head(states.to(self.head.weight.dtype))[:, 0]


def make_critic(model: Any, algorithm: Algorithm) -> Critic:
    """The critic that an algorithm asks for by its setting ``critic``: ``head`` (the default) or ``model``.

    Args:
        model: the policy's; a value model begins as a copy of it, its adapter included.
        algorithm: which needs values.

    Raises:
        ConfigError: another kind of critic.
    """
    kind = getattr(algorithm, "critic", "head")
    if kind not in ("head", "model"):
        raise ConfigError(f"critic={kind!r} is neither 'head' nor 'model'")
    own = copy.deepcopy(model) if kind == "model" else model
    plain = own.get_base_model() if hasattr(own, "get_base_model") else own
    weight = plain.get_output_embeddings().weight
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return Critic(weight.shape[-1], plain.get_decoder() if kind == "model" else None, dtype).to(weight.device)

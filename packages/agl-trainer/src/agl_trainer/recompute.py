"""Activation checkpointing: a layer's inner activations are computed again in the backward pass, not kept."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from agl.errors import ConfigError


def checkpointed_layers(module: nn.Module) -> list[Any]:
    """Prepare every layer that transformers can compute again; see `recomputing`.

    Raises:
        ConfigError: there is none, so the setting would do nothing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError("activation_checkpointing=True: no layer of this model can be computed again; leave it out")
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return layers


@contextmanager
def recomputing(layers: Sequence[Any]) -> Generator[None]:
    """Inside, these layers keep only their inputs.

    transformers looks at ``training`` of the layer itself. Its parts stay as they are, so that nothing is dropped
    out; and outside the engine may use its cache, which such a layer would throw away.
    """
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False

"""FSDP2: weights, gradients and optimiser state in shards, one for each rank (torch's ``fully_shard``).

The settings are those of Accelerate's FSDP2 plugin, the sharding is ours: Accelerate (1.15) shards only on
accelerators and silently trains by data parallelism on CPUs; this way both run the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from agl.errors import ConfigError
from agl_trainer.logprobs import LogprobModel


def shard(module: LogprobModel, device: torch.device, ranks: int, *, reshard: bool, offload: bool) -> None:
    """Shard in place: each decoder layer is gathered when it computes, everything else as one.

    Args:
        module: with the same weights on all ranks.
        device: of this rank.
        ranks: how many there are.
        reshard: free a layer's whole weights after its forward pass, and gather them again for the backward pass.
        offload: keep shards in the memory of the CPU.
    """
    names = set(getattr(module.model, "_no_split_modules", None) or ())
    layers = [part for part in module.model.modules() if type(part).__name__ in names]
    if not layers:
        raise ConfigError(f"FSDP2 shards by decoder layers, and {type(module.model).__name__!r} does not name its own")
    mesh = init_device_mesh(device.type, (ranks,))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
    # Left to itself the root would keep its whole weights after a forward pass that no backward pass follows.
    fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy)


def collect(sharded: Sequence[Any], whole: Sequence[torch.Tensor] | None) -> None:
    """Copy whole parameters out of their shards; all ranks take part, those that keep nothing give None."""
    with torch.no_grad():
        for place, parameter in enumerate(sharded):
            gathered = parameter.full_tensor()
            if whole is not None:
                whole[place].copy_(gathered)


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard, or the tensor itself where it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fill(tensor: Any, whole: torch.Tensor) -> None:
    """Copy a whole tensor into this one, or into this rank's shard of it."""
    if hasattr(tensor, "to_local"):
        whole = distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements)
    tensor.copy_(whole)


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor; all ranks take part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

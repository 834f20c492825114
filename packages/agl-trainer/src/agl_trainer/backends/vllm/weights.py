"""The policy's weights as folders that vLLM reads: the whole model, or the base and its adapters."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from agl_trainer.adapters import FROZEN, SHARED, folder_name
from agl_trainer.policy import Policy

MODEL = "model"
"""What vLLM calls the model that it was started with: the policy, or the base below its adapters."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What every replica is to serve."""

    version: int
    folder: Path
    """A ``from_pretrained`` directory: the policy, or the base below its adapters."""
    adapters: Mapping[str, Path]
    """PEFT folders by the name under which they are served; empty where the policy is one whole model."""


class Exporter:
    """Writes each version into a folder of its own."""

    def __init__(self, policy: Policy, root: Path, *, apart: bool) -> None:
        """Prepare.

        Args:
            policy: whose weights are written.
            root: made anew; whatever an earlier process left there is removed.
            apart: write adapters beside their base, not merged into it.
        """
        self.policy = policy
        self.root = root
        self.apart = apart
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)

    def write(self, version: int) -> Weights:
        """Write the present weights."""
        folder = self.root / f"v{version}"
        with self.policy.lock, torch.no_grad():
            if not self.apart:
                return Weights(version, self._write_model(folder, merged=True), {})
            base = self.root / "base"
            if not base.exists():
                self._write_model(base, merged=False)
            assert self.policy.adapters is not None
            self.policy.adapters.save(folder, self.policy.tokenizer)
            names = self.policy.adapters.of
            adapters = {name: folder / folder_name(agent) for agent, name in names.items()} or {SHARED: folder}
            return Weights(version, base, adapters)

    def forget(self, keep: set[Path]) -> None:
        """Remove versions that nobody reads any more."""
        for folder in self.root.glob("v*"):
            if folder not in keep:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _write_model(self, folder: Path, *, merged: bool) -> Path:
        policy = self.policy
        model = policy.model if policy.adapters is None else policy.model.get_base_model()
        kind = getattr(torch, policy.config.precision)
        tensors = {name: value.to(kind) for name, value in whole(policy, merged=merged).items()}
        model.save_pretrained(folder, state_dict=tensors)
        policy.tokenizer.save_pretrained(folder)
        return folder


def whole(policy: Policy, *, merged: bool) -> dict[str, torch.Tensor]:
    """Weights of the whole model by the names of its checkpoint, its one adapter merged into them or left out."""
    if policy.adapters is None:
        return dict(policy.model.state_dict())
    model = policy.model.get_base_model()
    tensors = {
        name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name
    }
    if merged:
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                base: Any = module.get_base_layer()
                adapted: Any = module
                tensors[f"{name}.weight"] = base.weight.float() + adapted.get_delta_weight(SHARED).float()
    return tensors


def served_as(policy: Policy, agent: str, *, frozen: bool, apart: bool) -> str:
    """The name under which vLLM serves what answers an agent."""
    if not apart:
        return MODEL
    name = policy.weights_of(agent, frozen=frozen)
    return MODEL if name == FROZEN else name

"""Weight transfer by files: vLLM reads a folder of safetensors that the trainer wrote, into the running model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing needs to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are."""

    folder: str


class FileWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Works on every device: tensors are mapped from the file and copied to where the model is."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Layers are put back into the form that checkpoints have."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read the folder; the base class would wait for an accelerator, which a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of every file."""
        self.model.load_weights(_tensors(Path(update_info.folder)))

    def finish_weight_update(self) -> None:
        """Layers are packed again as the device wants them."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # vLLM 0.32 leaves a tied head on CPU with a packed copy of the old embedding.
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors; does this machine see the trainer's files?")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)

"""Settings of the backend ``vllm``, and the command line and environment of a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agl.errors import ConfigError
from agl.plugins import nearest
from agl_trainer.config import TrainConfig

INSIDE = Path(__file__).parent / "inside"
"""Code that runs in vLLM's interpreter."""
CPU_CACHE_BYTES = 2**30
"""Memory for keys and values on a CPU; left to itself vLLM takes most of the machine's."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves room for."""

OWNED = (
    *("uds", "host", "port", "model", "served_model_name", "dtype", "max_model_len", "seed", "enable_lora"),
    *("logprobs_mode", "generation_config", "weight_transfer_config", "middleware"),
)
"""Arguments of vLLM that are not the user's to choose: they follow from the trainer's settings, or must be so."""

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""Beginnings of variables by which a launcher tells the trainer's ranks of each other; vLLM would join them."""

SECRETS = ("AGL_KEY", "AGL_VLLM_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")
"""Variables that a server has no use for."""


class VllmOptions(BaseModel):
    """Settings of ``backend={"name": "vllm", ...}``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    urls: list[str] = []
    """Servers that run already, such as ``http://127.0.0.1:8001``; empty starts our own."""
    replicas: int = Field(1, ge=1)
    """How many servers to start; each holds the whole model."""
    devices: list[str] = []
    """For each replica what it may use: GPUs (``"1"``, ``"2,3"``) or, without GPUs, CPU cores (``"0-7"``)."""
    python: str | None = None
    """The interpreter of the environment that has vLLM; None takes this one."""
    arguments: dict[str, str | int | float | bool] = {}
    """vLLM's own arguments, such as {tool_call_parser: hermes, gpu_memory_utilization: 0.5}."""
    start_timeout: float = Field(900.0, gt=0)
    """Seconds that a server may take to start."""

    @model_validator(mode="after")
    def _check(self) -> VllmOptions:
        if self.urls and self.model_fields_set & {"replicas", "devices", "python", "arguments"}:
            raise ValueError("urls names servers that run already; what starts them cannot be set beside it")
        if wrong := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"urls {wrong!r}: write URLs that start with http:// or https://")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"{len(self.devices)} devices for {self.replicas} replicas; name one for each")
        if wrong := [name for name in self.arguments if name.replace("-", "_") in OWNED]:
            raise ValueError(f"arguments {wrong!r}: agl sets them; leave them out")
        return self

    @classmethod
    def of(cls, **settings: Any) -> VllmOptions:
        """Validate.

        Raises:
            ConfigError: it names the setting that is wrong.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from None


def _explain(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"backend 'vllm' has no setting {name!r}{nearest(name, list(VllmOptions.model_fields))}"
    if not name:
        return f"backend 'vllm': {problem['ctx']['error']}"
    return f"backend 'vllm': {name} = {problem['input']!r}: {problem['msg']}"


def command(python: str | None, model: str | Path, arguments: Mapping[str, Any]) -> list[str]:
    """How a server is started; True is a flag, False its ``--no-`` form."""
    line = [python or sys.executable, str(INSIDE / "agl_vllm" / "serve.py"), str(model)]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                line.append(f"--{flag}")
            case False:
                line.append(f"--no-{flag}")
            case _:
                line += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return line


def environment(python: str | None) -> dict[str, str]:
    """The variables of a server: ours without what concerns the trainer alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER) and name not in SECRETS}
    inherited = os.environ.get("PYTHONPATH") if python is None else None
    kept["PYTHONPATH"] = os.pathsep.join([str(INSIDE), *([inherited] if inherited else [])])
    if plugins := os.environ.get("VLLM_PLUGINS"):  # a list of those that may load
        kept["VLLM_PLUGINS"] = f"{plugins},agl"
    return kept


def on_devices(devices: str | None, gpu: bool) -> dict[str, str]:
    """Variables that keep a server to some GPUs or cores."""
    if devices is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES" if gpu else "VLLM_CPU_OMP_THREADS_BIND": devices}


def room_for(rank: int) -> int:
    """The smallest rank that vLLM can reserve room for and that holds this one.

    Raises:
        ConfigError: there is none.
    """
    if rank > LORA_RANKS[-1]:
        raise ConfigError(f"lora_rank={rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}")
    return next(room for room in LORA_RANKS if room >= rank)


def tool_arguments(arguments: Mapping[str, Any], parser: str | None) -> dict[str, Any]:
    """Arguments that let the model call tools: the user's parser, or the one that fits the chat template."""
    chosen = arguments.get("tool_call_parser", arguments.get("tool-call-parser", parser))
    return {} if chosen is None else {"enable_auto_tool_choice": True, "tool_call_parser": chosen}


def several(names: Sequence[str]) -> int:
    """How many adapters a server keeps ready."""
    return max(1, len(names))


def check(config: TrainConfig, **settings: Any) -> VllmOptions:
    """Settings of this backend, checked beside the others.

    Raises:
        ConfigError: it names the setting that is wrong.
    """
    chosen = VllmOptions.of(**settings)
    if config.unselected == "frozen" and not config.lora_rank:
        raise ConfigError(
            "unselected='frozen' with the backend 'vllm' needs LoRA, whose base stays in the server: set lora_rank, or "
            "serve the frozen model by a vLLM of its own, unselected={base_url, model}"
        )
    if config.lora_rank:
        room_for(config.lora_rank)
    return chosen

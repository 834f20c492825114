"""LoRA adapters on one base: one that all agents share, or one for each agent.

An adapter is always chosen explicitly (`Adapters.use`), by the trainer for each micro-batch and by the engine for
each decode step. So all of them stay trainable, and one that took no part in a step has no gradient and does not move.
"""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from agl.errors import ConfigError
from agl_trainer.config import TrainConfig

SHARED = "default"
"""PEFT's name of the only adapter; also the name of a policy without one."""
FROZEN = "frozen"
"""The base below the adapters."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "adapters.json"
"""Marks a folder that holds an adapter for each agent."""


class Adapters:
    """The adapters of one model, by the agents that they belong to.

    With ``adapters="agent"`` each agent of ``optimize`` trains an adapter of its own. When the model is a folder that
    an earlier run saved, they go on from there, and agents of that folder that are not selected keep their adapter
    untouched. Any other agent has none: it is the base.
    """

    def __init__(self, base: Any, config: TrainConfig) -> None:
        """Put adapters on a base.

        Args:
            base: a causal language model of transformers; it is changed in place.
            config: ``lora_rank``, ``adapters``, ``optimize``, ``seed`` and ``model`` are read.
        """
        self.model: Any = None
        """The base with its adapters."""
        self.of: dict[str, str] = {}
        """PEFT's name of each agent's adapter; empty when all share one."""
        self._beginnings: dict[str, str] = {}
        """PEFT's name of what each adapter was at the start, of agents that had one then."""
        self.trained: tuple[str, ...] = ()
        """Agents whose adapters are trained; empty when all share one."""
        if config.adapters == "shared":
            self._add(base, SHARED, config)
        else:
            saved = saved_adapters(config.model)
            self.trained = tuple(dict.fromkeys(config.optimize or ()))
            for agent in dict.fromkeys([*saved, *self.trained]):
                name = self.of[agent] = f"agent-{folder_name(agent)}"
                # Initial weights depend on the agent's name, not on which others are selected beside it.
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(zlib.crc32(f"{config.seed}/{agent}".encode()))
                    self._add(base, name, config, saved.get(agent))
                if agent in saved:
                    self._beginnings[agent] = name
                    if agent in self.trained:
                        self._beginnings[agent] = f"beginning-{folder_name(agent)}"
                        self._add(base, self._beginnings[agent], config, saved[agent])
        trained = [self.of[agent] for agent in self.trained] or [SHARED]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(any(f".{adapter}." in name for adapter in trained))
        self._layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]

    def _add(self, base: Any, name: str, config: TrainConfig, saved: Path | None = None) -> None:
        rank = config.lora_rank
        lora: Any = (
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            if saved is None
            else PeftConfig.from_pretrained(str(saved))
        )
        lora.base_model_name_or_path = base.name_or_path
        if self.model is None:
            self.model = get_peft_model(base, lora, adapter_name=name)
        else:
            self.model.add_adapter(name, lora)
        if saved is not None:
            found = set_peft_model_state_dict(self.model, load_file(saved / WEIGHTS), adapter_name=name)
            if lacking := [key for key in found.missing_keys if f".{name}." in key]:
                raise ConfigError(
                    f"the adapter in {saved} is not one of {base.name_or_path!r}: it lacks {lacking[0]!r}"
                )

    def name(self, agent: str, frozen: bool) -> str:
        """What answers an agent: its adapter, or what that began as."""
        if frozen:
            return self._beginnings.get(agent, FROZEN)
        return self.of.get(agent, FROZEN) if self.of else SHARED

    @contextmanager
    def use(self, name: str) -> Generator[None]:
        """Inside, the model has this adapter alone, or none (`FROZEN`).

        PEFT's own ``set_adapter`` and ``disable_adapter`` walk over every parameter to change ``requires_grad``: on a
        small model that takes longer than a decode step.
        """
        before = [layer._active_adapter for layer in self._layers]  # pyright: ignore[reportPrivateUsage]
        chosen = [] if name == FROZEN else [name]
        for layer in self._layers:
            layer._active_adapter = chosen  # pyright: ignore[reportPrivateUsage]
        try:
            yield
        finally:
            for layer, old in zip(self._layers, before, strict=True):
                layer._active_adapter = old  # pyright: ignore[reportPrivateUsage]

    def parameters(self, agent: str) -> list[Any]:
        """Of one agent's adapter."""
        return [parameter for name, parameter in self.model.named_parameters() if f".{self.of[agent]}." in name]

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Write PEFT folders: ``folder`` itself, or one for each agent below it and an index."""
        if not self.of:
            _save(self.model, SHARED, folder)
            tokenizer.save_pretrained(folder)
            return
        for agent, name in self.of.items():
            _save(self.model, name, folder / folder_name(agent))
            tokenizer.save_pretrained(folder / folder_name(agent))
        tokenizer.save_pretrained(folder)
        base = self.model.peft_config[next(iter(self.of.values()))].base_model_name_or_path
        index = {"base_model": base, "agents": {agent: folder_name(agent) for agent in self.of}}
        (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False))


def _save(model: Any, name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # An adapter never touches the embeddings; left to guess, peft would look for the base's on the hub.
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    lora = copy.copy(model.peft_config[name])
    lora.inference_mode = True
    lora.save_pretrained(str(folder))


def folder_name(agent: str) -> str:
    """The agent's name where it is a plain file name, else what is left of it and a checksum of the whole."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", agent):
        return agent
    return f"{re.sub('[^A-Za-z0-9_-]+', '_', agent)[:48]}-{zlib.crc32(agent.encode()):08x}"


def saved_adapters(model: str) -> dict[str, Path]:
    """Folder of each agent's adapter; empty when ``model`` is no folder of several."""
    index = Path(model) / INDEX
    if not index.is_file():
        return {}
    agents: Mapping[str, str] = json.loads(index.read_text())["agents"]
    return {agent: index.parent / folder for agent, folder in agents.items()}


def refuse_other_settings(config: TrainConfig) -> None:
    """Settings must fit the adapters that the model folder holds.

    Raises:
        ConfigError: it names the setting that fits.
    """
    try:
        saved = saved_adapters(config.model)
        ranks = {agent: json.loads((folder / CONFIG).read_text())["r"] for agent, folder in saved.items()}
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"model={config.model!r}: its {INDEX} or an adapter cannot be read: {error}") from error
    if saved and config.adapters != "agent":
        one = next(iter(saved.values()))
        raise ConfigError(
            f"model={config.model!r} holds an adapter for each of the agents {list(saved)!r}; to train them on, set "
            f"adapters='agent' and optimize; to begin with one of them, set model={str(one)!r}"
        )
    for agent, rank in ranks.items():
        if rank != config.lora_rank:
            raise ConfigError(
                f"lora_rank={config.lora_rank}: the adapter of agent {agent!r} in {config.model!r} has rank {rank}; "
                f"set lora_rank={rank}"
            )

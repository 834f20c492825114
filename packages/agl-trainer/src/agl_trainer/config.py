"""Every setting of a training run. Unknown names are errors that name the nearest one."""

from __future__ import annotations

from typing import Any, Literal

from agl.errors import ConfigError
from agl.plugins import nearest
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Endpoint(BaseModel):
    """An OpenAI-compatible endpoint of the user's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    base_url: str = Field(pattern="^https?://")
    """Ends in ``/v1``."""
    model: str
    api_key: str | None = Field(None, repr=False)


class TrainConfig(BaseModel):
    """Settings of `agl_trainer.Trainer`; the same names stand in ``train.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # what is trained
    model: str
    """A Hugging Face id or a directory with a causal language model and a chat template."""
    optimize: list[str] | None = None
    """Names or globs of the agents to train; None trains all."""
    unselected: Literal["policy", "frozen"] | Endpoint = "policy"
    """Who answers the other agents: the policy, its frozen beginning, or {base_url, api_key, model}."""

    # how much
    steps: int = Field(20, ge=0)
    """Optimiser steps of reinforcement learning."""
    tasks_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    """Rollouts of each task; they share a baseline."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step; each is an optimiser step of its own."""

    # algorithm
    algorithm: str = "grpo"
    baseline: Literal["task", "agent"] = "task"
    """What a reward is compared with: other rollouts of the task, or of the task and agent."""
    aggregation: Literal["rollout", "token"] = "rollout"
    scale: Literal["group", "none"] = "group"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    tis_cap: float = Field(2.0, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3"] = "k2"
    signal_weight: float = 0.0
    """Weight of the mean signal reward (tool success and failure) of a rollout; 0 is off."""

    # optimiser
    learning_rate: float = Field(1e-5, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; otherwise a LoRA adapter of this rank on all linear layers."""
    precision: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = Field(2048, ge=1)
    """Padded tokens in one forward and backward pass."""

    # sampling
    temperature: float = Field(1.0, gt=0)
    eval_temperature: float | None = Field(None, ge=0)
    """None evaluates at the training temperature, which is what training improves."""
    max_length: int = Field(2048, ge=16)
    """Longest prompt and answer together, in tokens."""

    # where it runs
    backend: str = "transformers"
    slots: int = Field(32, ge=1)
    """Sequences that the embedded backend decodes at once."""
    workers: int = Field(0, ge=0)
    """Worker processes that run agents; 0 runs them in this process."""
    concurrency: int = Field(64, ge=1)
    """Rollouts that one process runs at once."""
    rollout_timeout: float = Field(600.0, gt=0)
    stall_timeout: float = Field(600.0, gt=0)
    """Seconds without any finished rollout after which training ends with a diagnosis."""
    max_attempts: int = Field(2, ge=1)
    server_url: str | None = None
    """A Lightning server that runs already (its key in AGL_KEY); None starts one."""

    # evaluation and records
    eval_every: int = Field(0, ge=0)
    """Evaluate on the held-out tasks after so many steps; 0 only before and after."""
    eval_samples: int = Field(1, ge=1)
    """Rollouts of each held-out task."""
    seed: int = 0
    output_dir: str = "runs"
    trackers: list[str] = []
    """Trackers of Accelerate besides the local log: tensorboard, wandb, trackio, mlflow, ..."""

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Validate.

        Raises:
            ConfigError: unknown names come with the nearest known one, bad values with what is wanted.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError(
                "; ".join(_explain(problem, list(cls.model_fields)) for problem in error.errors())
            ) from None


def _explain(problem: Any, names: list[str]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}{nearest(name, names)}"
    if problem["type"] == "missing":
        return f"setting {name!r} is missing"
    return f"setting {name!r} = {problem['input']!r}: {problem['msg']}"

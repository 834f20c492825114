"""Every setting of a training run. Unknown names are errors that name the nearest one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from agl.credit import Baseline
from agl.errors import ConfigError
from agl.plugins import nearest


def _path_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


Place = Annotated[str, BeforeValidator(_path_as_text)]
"""A path, as text or as ``pathlib`` writes it."""


def _baseline(value: Any) -> Any:
    if isinstance(value, str) and value in get_args(Baseline):
        return value
    if isinstance(value, dict) and list(value) == ["state"]:
        weight = value["state"]
        if isinstance(weight, (int, float)) and 0 <= weight < math.inf:
            return {"state": float(weight)}
    raise ValueError("Input should be 'task', 'agent', 'turn', 'state', or {'state': w} with a weight w of 0 or more")


AHEAD = 2
"""Updates by which rollouts of ``mode="async"`` may lag behind, unless ``{"async": k}`` says how many."""


def _mode(value: Any) -> Any:
    if value in ("sync", "async"):
        return value
    if isinstance(value, dict) and list(value) == ["async"]:
        ahead = value["async"]
        if isinstance(ahead, int) and not isinstance(ahead, bool) and ahead >= 1:
            return {"async": ahead}
    raise ValueError("Input should be 'sync', 'async', or {'async': k} with a cap of k >= 1 updates")


class Endpoint(BaseModel):
    """An OpenAI-compatible endpoint of the user's own."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )

    base_url: str = Field(pattern="^https?://")
    """Ends in ``/v1``."""
    model: str
    api_key: str | None = Field(None, repr=False)


class TrainConfig(BaseModel):
    """Settings of `agl_trainer.Trainer`; the same names stand in ``train.toml``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True, allow_inf_nan=False
    )

    # what is trained
    model: Place
    """A Hugging Face id or a directory with a causal language model and a chat template."""
    optimize: list[str] | None = None
    """Names or globs of the agents to train; None trains all."""
    unselected: Literal["policy", "frozen"] | Endpoint = "policy"
    """Who answers the other agents: the policy, its frozen beginning, or {base_url, api_key, model}."""

    # how much
    steps: int = Field(20, ge=0)
    """Optimiser steps of reinforcement learning."""
    tasks_per_step: int = Field(8, ge=1)
    """Groups in one optimiser step."""
    group_size: int = Field(8, ge=1)
    """Rollouts of each task; they share a baseline."""
    refill: int = Field(0, ge=0)
    """Extra batches in a step, at most, that replace groups without any advantage (DAPO's dynamic sampling)."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step; each is an optimiser step of its own."""

    mode: Annotated[Literal["sync", "async"] | dict[str, int], PlainValidator(_mode)] = "sync"
    """sync: the weights of a step play its rollouts. async: rollouts go on during updates, up to 2 steps ahead of
    training ({async: k}: up to k), so none is ever more than so many updates old."""

    # algorithm
    algorithm: str | dict[str, Any] = "grpo"
    """A name that a plugin registered, or {name, ...} with that algorithm's own settings."""
    baseline: Annotated[Baseline | dict[str, float], PlainValidator(_baseline)] = "task"
    """What a credit is compared with: rollouts of the task; of the task and agent; calls of the same agent and number
    (turn); rollouts and, beside them, calls in equal states ({state: w} gives these a weight other than 1)."""
    discount: float | None = Field(None, ge=0, le=1)
    """Credits each call with its discounted return, for baseline turn or state; None credits an agent's calls alike."""
    signals: dict[str, float] = {}
    """Weights of intermediate rewards: tool_success, tool_error, empty_result, parse_failure, and those of plugins."""

    # optimiser
    learning_rate: float = Field(1e-5, gt=0)
    """Of AdamW. LoRA wants about ten times more than full training."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over ``steps``: not at all, or towards 0. The warm-up keeps its own."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights; otherwise a LoRA adapter of this rank on all linear layers."""
    adapters: Literal["shared", "agent"] = "shared"
    """Whether the agents of `optimize` share their weights, or each trains a LoRA adapter of its own on one base."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. With LoRA its frozen weights are kept in it; full training keeps float32 weights."""
    micro_batch_tokens: int = Field(2048, ge=1)
    """Tokens in one forward and backward pass, padding included. A longer row gets a pass of its own."""
    layout: Literal["auto", "tree", "packed", "padded"] = "auto"
    """How rows are laid out: with shared prefixes computed once, end to end, or padded; auto takes the cheapest."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more work."""

    # sampling
    temperature: float = Field(1.0, gt=0)
    """Forced on every call to the policy in training."""
    eval_temperature: float | None = Field(None, ge=0)
    """None evaluates at the training temperature, which is what training improves."""
    max_length: int = Field(2048, ge=16)
    """Longest prompt and answer together, in tokens."""

    # where it runs
    backend: str | dict[str, Any] = "transformers"
    """What generates: transformers (in this process), vllm (docs/vllm.md), a plugin's; or {name, ...} with settings."""
    slots: int = Field(32, ge=1)
    """Sequences that the embedded backend decodes at once."""
    workers: Annotated[int, Field(ge=0)] | Literal["external"] = 0
    """Worker processes that run agents; 0 runs them in this process, external waits for `agl worker` elsewhere."""
    concurrency: int = Field(64, ge=1)
    """Rollouts that one process runs at once."""
    rollout_timeout: float = Field(600.0, gt=0)
    """Seconds that one rollout may take."""
    stall_timeout: float = Field(600.0, gt=0)
    """Seconds without any finished rollout after which training ends with a diagnosis."""
    max_attempts: int = Field(2, ge=1)
    """How often a rollout is tried before it counts as failed."""
    server_url: str | None = Field(None, pattern="^https?://")
    """A Lightning server that runs already (its key in AGL_KEY); None starts one."""

    # evaluation and records
    eval_every: int = Field(0, ge=0)
    """Evaluate on the held-out tasks after so many steps; 0 only before and after."""
    eval_samples: int = Field(1, ge=1)
    """Rollouts of each held-out task."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Order of tasks, sampling, new weights."""
    checkpoint_every: int = Field(10, ge=0)
    """Keep a checkpoint after so many steps, and at the end; with 0 a resumed run computes every step anew."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the last ones are kept, besides the one with the best held-out reward."""
    output_dir: Place = "runs"
    """Each run makes a folder in it."""
    trackers: list[str] = []
    """Trackers of Accelerate besides the local log: tensorboard, wandb, trackio, mlflow, ..."""

    @model_validator(mode="after")
    def _check_adapters(self) -> TrainConfig:
        if self.adapters == "agent":
            if not self.lora_rank:
                raise ValueError(
                    "adapters='agent' gives each agent a LoRA adapter, and lora_rank is 0; set lora_rank=16"
                )
            if not self.optimize:
                raise ValueError("adapters='agent' needs the agents' names, such as optimize=['writer', 'judge']")
            if patterns := [name for name in self.optimize if set("*?[") & set(name)]:
                raise ValueError(
                    f"adapters='agent' makes the adapters at the start, so optimize must name every agent, and "
                    f"{patterns!r} are patterns; write the names"
                )
        return self

    @property
    def ahead(self) -> int:
        """Steps whose rollouts may be under way beside the present one's: the cap of their staleness in updates."""
        return self.mode["async"] if isinstance(self.mode, dict) else AHEAD if self.mode == "async" else 0

    def decay(self, step: int) -> float:
        """Share of the learning rate that is left after ``step`` of all steps, by ``lr_schedule``."""
        done = step / max(1, self.steps)
        match self.lr_schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - done
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * done))

    def public(self) -> dict[str, Any]:
        """All settings as JSON, without secrets."""
        settings = self.model_dump(mode="json")
        if isinstance(self.unselected, Endpoint):
            del settings["unselected"]["api_key"]
        return settings

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Validate.

        Raises:
            ConfigError: unknown names come with the nearest known one, bad values with what is wanted.
        """
        try:
            return cls(**settings)
        except ValidationError as error:
            known = list(cls.model_fields)
            chosen = settings.get("algorithm", cls.model_fields["algorithm"].default)
            name = chosen.get("name") if isinstance(chosen, dict) else chosen
            raise ConfigError("; ".join(_explain(problem, known, str(name)) for problem in error.errors())) from None


def _explain(problem: Any, names: list[str], algorithm: str) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if not name:  # of settings together; the text names them
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        from agl_trainer import algorithms  # it imports torch, which a good configuration does not wait for

        if owner := algorithms.with_setting(name, algorithm):
            return (
                f"unknown setting {name!r}: it belongs to the algorithm; write algorithm={{'name': {owner!r}, "
                f"{name!r}: {problem['input']!r}}}"
            )
        return f"unknown setting {name!r}{nearest(name, names)}"
    if problem["type"] == "missing":
        return f"setting {name!r} is missing"
    return f"setting {name!r} = {problem['input']!r}: {problem['msg']}"


def as_markdown() -> str:
    """The page ``docs/configuration.md``."""
    lines = [
        "# Configuration",
        "",
        "<!-- made by: python -m agl_trainer.config -->",
        "",
        "Keyword arguments of `agl_trainer.Trainer`, and keys of the file that `agl train` reads. The file also has",
        "`agent` (`module:function` or `file.py:function`), `tasks` and `eval_tasks` (JSONL files), and a table",
        "`[warmup]` with `demonstrate`, `agents`, `tasks`, `steps`, `batch` and `learning_rate`. Paths are relative to",
        "the file.",
        "",
        "| setting | default | |",
        "|---|---|---|",
    ]
    for name, field in TrainConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default!r}`"
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")

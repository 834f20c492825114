"""The policy: model, adapter, optimiser, and the step that changes them. The only file that imports accelerate."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from agl.errors import BackendError, ConfigError, NumericsError
from agl.protocols import Algorithm, LossInputs
from agl_trainer import algorithms, models
from agl_trainer.batch.pack import MicroBatch
from agl_trainer.config import TrainConfig
from agl_trainer.logprobs import LogprobModel, TokenOutputs

BAD_STEPS = 3
"""Steps in a row without a finite gradient after which training stops."""


class Policy:
    """The model being trained. Generation and training share its weights and take turns by `lock`."""

    def __init__(self, config: TrainConfig, folder: Path | None = None) -> None:
        self.config = config
        half = config.precision == "bfloat16"
        mixed = half and not config.lora_rank  # full training keeps float32 weights and computes in bfloat16
        try:
            self.accelerator = Accelerator(
                mixed_precision="bf16" if mixed else "no",
                log_with=list[Any](config.trackers) or None,
                project_dir=str(folder) if folder else None,
            )
        except ValueError as error:
            raise ConfigError(f"trackers={config.trackers!r}: {error}") from error
        # Accelerate passes over a tracker whose package is missing.
        if lacking := {*config.trackers} - {"all"} - {str(tracker) for tracker in self.accelerator.log_with}:
            raise ConfigError(f"trackers={config.trackers!r}: the packages of {sorted(lacking)!r} are not installed")
        set_seed(config.seed)
        model, self.tokenizer = models.load(config.model, "float32" if mixed else config.precision)
        self._frozen_copy: Any = None
        self._needs_reference = bool(getattr(algorithms.make(config.algorithm), "kl_coef", 0.0))
        if config.lora_rank:
            model = _with_lora(model, config.lora_rank)
        elif self._needs_reference or config.unselected == "frozen":
            self._frozen_copy = copy.deepcopy(model).requires_grad_(False).eval().to(self.accelerator.device)
        # Dropout would make the trained probabilities differ from the sampled ones.
        self.model: Any = model.eval()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = self.new_optimizer(config.learning_rate)
        self._logprobs: Any = self.accelerator.prepare(LogprobModel(self.model))
        self.lock = threading.RLock()
        self.version = 0
        self.stop_ids = frozenset(_stop_ids(model, self.tokenizer))
        self._bad_steps = 0

    def new_optimizer(self, learning_rate: float) -> Any:
        """A fresh AdamW over what is trained; the warm-up's moments do not leak into reinforcement learning."""
        optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
        return self.accelerator.prepare(optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that training computes in; the engine generates in the same."""
        return self.accelerator.autocast()

    # ------------------------------------------------------------------------------------------ frozen beginning

    @property
    def keeps_frozen(self) -> bool:
        """Whether there is a frozen beginning: a copy, or the base below a LoRA adapter."""
        return self._frozen_copy is not None or self.config.lora_rank > 0

    @property
    def frozen_model(self) -> Any:
        """The module to call inside `frozen`."""
        return self.model if self._frozen_copy is None else self._frozen_copy

    def frozen(self) -> AbstractContextManager[Any]:
        """Inside, `frozen_model` is the model as it was before training."""
        return self.model.disable_adapter() if self.config.lora_rank else nullcontext()

    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprobs under the frozen beginning, without gradient."""
        with torch.no_grad(), self.frozen(), self.autocast():
            module = self._logprobs if self._frozen_copy is None else LogprobModel(self._frozen_copy)
            return _forward(module, batch).logprobs

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprobs under the present weights, without gradient."""
        batch = batch.to(self.accelerator.device)
        with self.lock, torch.no_grad():
            return _forward(self._logprobs, batch).logprobs

    # ----------------------------------------------------------------------------------------------- learning

    def update(self, batches: Sequence[MicroBatch], algorithm: Algorithm) -> dict[str, float]:
        """One optimiser step over all micro-batches; returns what the loss and the optimiser have to tell.

        Args:
            batches: their token weights sum to 1 over all ranks (or less, when rollouts were left out).
            algorithm: whose loss is minimised.

        Raises:
            NumericsError: too many steps in a row had no finite gradient. Parameters are never touched by one.
        """
        totals: dict[str, torch.Tensor] = {}
        with self.lock:
            self.optimizer.zero_grad()
            for index, batch in enumerate(batches):
                last = index == len(batches) - 1
                sync = nullcontext() if last else self.accelerator.no_sync(self._logprobs)
                with sync:
                    loss, metrics = self._loss(batch.to(self.accelerator.device), algorithm)
                    # Data-parallel averaging divides by the ranks; the weights already did.
                    self.accelerator.backward(loss * self.accelerator.num_processes)
                for name, value in {"loss": loss.detach(), **metrics}.items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
            norm = float(self.accelerator.clip_grad_norm_(self.parameters, self.config.max_grad_norm) or 0.0)
            self._apply(norm)
        summed: Any = self.accelerator.reduce(torch.stack(list(totals.values())), reduction="sum")
        return dict(zip(totals, summed.tolist(), strict=True)) | {"grad_norm": norm}

    def _loss(self, batch: MicroBatch, algorithm: Algorithm) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        outputs: TokenOutputs = _forward(self._logprobs, batch)
        logprobs, dtype = outputs.logprobs, outputs.logprobs.dtype
        return algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
                rollout_logprobs=batch.rollout_logprobs.to(dtype),
                advantages=batch.advantages.to(dtype),
                weights=batch.weights.to(dtype),
                calls=batch.calls,
                ref_logprobs=self.reference_logprobs(batch) if self._needs_reference else None,
                entropies=outputs.entropies,
                values=outputs.values,
            )
        )

    def _apply(self, norm: float) -> None:
        if not torch.isfinite(torch.tensor(norm)):
            self.optimizer.zero_grad()
            self._bad_steps += 1
            if self._bad_steps >= BAD_STEPS:
                raise NumericsError(
                    f"{self._bad_steps} steps in a row had a gradient that is not finite ({norm}); parameters were not "
                    "touched. Lower learning_rate, or use precision='float32'"
                )
            return
        self._bad_steps = 0
        before = self.fingerprint()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if norm > 0 and self.fingerprint() == before:
            raise BackendError(
                f"an optimiser step with gradient norm {norm:.3g} changed no weight: learning_rate "
                f"{self.optimizer.param_groups[0]['lr']!r} is too small for {self.parameters[0].dtype}"
            )

    def fingerprint(self) -> str:
        """A hash over samples of all trained parameters; equal weights give equal hashes."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            flat = parameter.detach().reshape(-1)
            digest.update(flat[:: max(1, flat.numel() // 256)].float().cpu().numpy().tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------------------------------------ keeping

    def save(self, folder: Path) -> None:
        """Write what ``from_pretrained`` reads: the model, or the PEFT adapter."""
        if self.accelerator.is_main_process:
            with self.lock:
                # An adapter never touches the embeddings; left to guess, peft would look for the base's on the hub.
                options = {"save_embedding_layers": False} if self.config.lora_rank else {}
                self.model.save_pretrained(folder, **options)
            self.tokenizer.save_pretrained(folder)

    def start_trackers(self, name: str) -> None:
        """Begin to report to Accelerate's trackers, if any were asked for."""
        if self.config.trackers:
            simple = {k: v for k, v in self.config.model_dump().items() if isinstance(v, (int, float, str, bool))}
            self.accelerator.init_trackers(name, config=simple)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report to Accelerate's trackers."""
        if self.config.trackers:
            self.accelerator.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the trackers; the next policy of this process may have another precision."""
        if self.config.trackers:
            self.accelerator.end_training()
        AcceleratorState._reset_state()  # one for the process, and it refuses to change


def _forward(module: Any, batch: MicroBatch) -> TokenOutputs:
    return module(batch.token_ids, batch.position_ids, batch.ends, batch.sources, batch.targets, batch.temperatures)


def _with_lora(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def _stop_ids(model: Any, tokenizer: Any) -> Iterable[int]:
    """Every token that ends an answer: models may have several."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}

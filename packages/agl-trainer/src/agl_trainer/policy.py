"""The policy: model, adapter, optimiser, and the step that changes them. The only file that imports accelerate."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.distributed.fsdp import CPUOffloadPolicy

from agl.errors import BackendError, ConfigError, NumericsError
from agl.protocols import Algorithm, LossInputs
from agl.records import Row
from agl_trainer import algorithms, models, sharding
from agl_trainer.adapters import FROZEN, SHARED, Adapters, refuse_other_settings
from agl_trainer.batch.pack import MicroBatch, TrainRow, micro_batches
from agl_trainer.config import TrainConfig
from agl_trainer.critic import make_critic
from agl_trainer.logprobs import LogprobModel, TokenOutputs
from agl_trainer.ranks import Ranks
from agl_trainer.recompute import checkpointed_layers, recomputing

BAD_STEPS = 3
"""Steps in a row that were refused after which training stops."""


@cache
def join() -> Ranks:
    """Meet the other processes of this run, where `accelerate launch` or `torchrun` started several.

    Raises:
        ConfigError: Accelerate would fall back to something else than what was asked of the launcher.
    """
    for name, plain, advice in _LAUNCHED:
        if (asked := os.environ.get(name, plain)).lower() != plain:
            raise ConfigError(f"the launcher set {name}={asked!r}, which agl does not use: {advice}")
    state = PartialState(cpu=os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true")
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    # `accelerate launch --cpu --num_processes 2` (1.15) sets an address to meet at and then starts one process.
    lonely = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ
    if lonely or state.num_processes != wanted:
        raise ConfigError(
            f"the launcher was asked for {'several' if lonely else wanted} processes, but Accelerate made a run of "
            f"{state.num_processes} (distributed_type {state.distributed_type.value}). Without a GPU start them with "
            "`ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 ...` or `ACCELERATE_USE_CPU=true accelerate launch "
            "--multi_gpu --num_processes 2 ...`"
        )
    if state.num_processes == 1:
        return Ranks()
    # Rank 0 collects rollouts for as long as they take; the others wait for it here, not on the accelerator.
    group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
    return Ranks(state.process_index, state.num_processes, group)


_LAUNCHED = (
    ("ACCELERATE_USE_DEEPSPEED", "false", "use FSDP2 (docs/scale.md)"),
    ("ACCELERATE_USE_MEGATRON_LM", "false", "use FSDP2 (docs/scale.md)"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", "ranks share the rows of a step; leave parallelism_config out"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", "micro_batch_tokens decides; set gradient_accumulation_steps to 1"),
    ("ACCELERATE_DYNAMO_BACKEND", "no", "rows differ in length, and torch.compile would compile each; leave it out"),
)
"""Settings of the launcher that would change nothing, or change what the loss means."""


def _fsdp(config: TrainConfig, ranks: Ranks, device: torch.device) -> FullyShardedDataParallelPlugin | None:
    """Accelerate's FSDP2 settings, where the launcher asks for FSDP.

    Raises:
        ConfigError: for what we would not do as asked.
    """

    def on(name: str) -> bool:
        return os.environ.get(name, "false").lower() == "true"

    if not on("ACCELERATE_USE_FSDP"):
        return None
    wrap = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
    refused = {
        "it needs fsdp_version: 2": os.environ.get("FSDP_VERSION") != "2",
        "it shards over several processes; start at least two": ranks.size == 1,
        "it shards by decoder layers: set fsdp_auto_wrap_policy to TRANSFORMER_BASED_WRAP": wrap == "SIZE_BASED_WRAP"
        or "FSDP_TRANSFORMER_CLS_TO_WRAP" in os.environ,
        "every rank loads the model itself: set fsdp_cpu_ram_efficient_loading to false": on(
            "FSDP_CPU_RAM_EFFICIENT_LOADING"
        ),
        "agl's own setting is activation_checkpointing=True: set fsdp_activation_checkpointing to false": on(
            "FSDP_ACTIVATION_CHECKPOINTING"
        ),
        "on CPUs there is nothing to offload: set fsdp_offload_params to false": on("FSDP_OFFLOAD_PARAMS")
        and device.type == "cpu",
        "the embedded engine keeps the whole base of an adapter anyway, so lora_rank goes with data parallelism (no "
        "FSDP); to serve a sharded model by vLLM is planned": config.lora_rank > 0,
        "a critic is not sharded yet; use data parallelism, or an algorithm without one": "values"
        in algorithms.needs(algorithms.make(config.algorithm)),
    }
    if wrong := [advice for advice, applies in refused.items() if applies]:
        raise ConfigError(f"the launcher asks for FSDP: {'; '.join(wrong)} (docs/scale.md)")
    return FullyShardedDataParallelPlugin()


class Policy:
    """The model being trained. Generation and training share its weights and take turns by `lock`."""

    def __init__(self, config: TrainConfig, folder: Path | None = None) -> None:
        self.config = config
        self.folder = folder
        half = config.precision == "bfloat16"
        mixed = half and not config.lora_rank  # full training keeps float32 weights and computes in bfloat16
        self.ranks = join()
        if (asked := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", "bf16" if half else "no"):
            raise ConfigError(
                f"the launcher asks for mixed_precision={asked!r}, but precision={config.precision!r} decides: set it "
                "to 'bfloat16', or mixed_precision to 'no'"
            )
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
        fsdp = _fsdp(config, self.ranks, self.accelerator.device)
        set_seed(config.seed)
        refuse_other_settings(config)
        model, self.tokenizer = models.load(config.model, "float32" if mixed else config.precision)
        self._frozen_copy: Any = None
        algorithm = algorithms.make(config.algorithm)
        needs = algorithms.needs(algorithm)
        self.adapters = Adapters(model, config) if config.lora_rank else None
        if self.adapters is not None:
            model = self.adapters.model
        elif needs & {"ref_logprobs", "kl"} or config.unselected == "frozen":
            self._frozen_copy = copy.deepcopy(model).requires_grad_(False).eval().to(self.accelerator.device)
        # Dropout would make the trained probabilities differ from the sampled ones.
        self.model: Any = model.eval()
        self.sharded = fsdp is not None
        # Rank 0 generates with, and saves, whole weights of its own.
        trained = copy.deepcopy(model) if self.sharded and self.ranks.leads else model
        self.model.to(self.accelerator.device)
        self.critic = make_critic(self.model, algorithm) if "values" in needs else None
        self._critic_parameters = [p for p in self.critic.parameters() if p.requires_grad] if self.critic else []
        self._critic_rate = float(getattr(algorithm, "critic_learning_rate", config.learning_rate))
        self._logprobs = LogprobModel(trained, self.critic)
        self._recomputed = checkpointed_layers(self._logprobs) if config.activation_checkpointing else []
        if fsdp is not None:
            device, offload = self.accelerator.device, isinstance(fsdp.cpu_offload, CPUOffloadPolicy)
            reshard = bool(fsdp.reshard_after_forward)
            sharding.shard(self._logprobs, device, self.ranks.size, reshard=reshard, offload=offload)
        self.parameters = [p for p in trained.parameters() if p.requires_grad]
        self.optimizer = self.new_optimizer(config.learning_rate)
        self.lock = threading.RLock()
        self.version = 0
        self.stop_ids = frozenset(_stop_ids(model, self.tokenizer))
        self.bad_steps = 0
        """Steps in a row that were refused."""

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """Every parameter that the optimiser changes, by name; shards of it where it is sharded."""
        named = [*self._logprobs.model.named_parameters()]
        if self.critic is not None:
            named += [(f"critic.{name}", parameter) for name, parameter in self.critic.named_parameters()]
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """What else learning changes, by name."""
        return {} if self.critic is None else {f"critic.{name}": value for name, value in self.critic.named_buffers()}

    def new_optimizer(self, learning_rate: float) -> Any:
        """A fresh AdamW over what is trained; the warm-up's moments do not leak into reinforcement learning."""
        groups: list[dict[str, Any]] = [{"params": self.parameters}]
        if self._critic_parameters:
            groups.append({"params": self._critic_parameters, "lr": self._critic_rate})
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def scale_learning_rate(self, factor: float) -> None:
        """Set every learning rate to this share of what it began with."""
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that training computes in; the engine generates in the same."""
        return self.accelerator.autocast()

    # ---------------------------------------------------------------------------------------- whose weights answer

    @property
    def keeps_frozen(self) -> bool:
        """Whether there is a frozen beginning: a copy, or the base below LoRA adapters."""
        return self._frozen_copy is not None or self.adapters is not None

    @property
    def agents(self) -> tuple[str, ...]:
        """Agents that train an adapter of their own; empty where all share their weights."""
        return self.adapters.trained if self.adapters is not None else ()

    def weights_of(self, agent: str, *, frozen: bool = False) -> str:
        """Name of the weights that answer an agent, for `using`.

        Args:
            agent: it matters only where each agent has an adapter of its own.
            frozen: as they were before training.
        """
        if self.adapters is not None:
            return self.adapters.name(agent, frozen)
        return FROZEN if frozen else SHARED

    def module_of(self, weights: str) -> Any:
        """The module that holds these weights; call it inside `using`."""
        return self._frozen_copy if self.adapters is None and weights == FROZEN else self.model

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Inside, the module computes with these weights. Hold the lock."""
        return nullcontext() if self.adapters is None else self.adapters.use(weights)

    def reference_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprobs under the frozen beginning, without gradient."""
        batch = batch.to(self.accelerator.device)
        with self.lock, torch.no_grad(), self.using(self.weights_of(batch.agent, frozen=True)):
            module = self._logprobs if self._frozen_copy is None else LogprobModel(self._frozen_copy)
            return self._forward(module, batch).logprobs

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Logprobs under the present weights, without gradient."""
        return self.outputs(batch).logprobs

    def outputs(self, batch: MicroBatch, *, values: bool = False) -> TokenOutputs:
        """Logprobs under the present weights, and values of the present critic, without gradient."""
        batch = batch.to(self.accelerator.device)
        with self.lock, torch.no_grad(), self.using(self.weights_of(batch.agent)):
            return self._forward(self._logprobs, batch, values=values)

    def all_outputs(self, batches: Sequence[MicroBatch], *, values: bool = False) -> list[TokenOutputs]:
        """`outputs` of each micro-batch of this rank; all ranks ask together, however many they have."""
        missing = self._missing(batches)
        found = [self.outputs(batch, values=values) for batch in batches]
        with self.lock, torch.no_grad():
            self._keep_company(missing)
        return found

    def _forward(self, module: LogprobModel, batch: MicroBatch, **asked: bool) -> TokenOutputs:
        with self.autocast():
            return module(
                batch.token_ids,
                batch.position_ids,
                batch.ends,
                batch.sources,
                batch.targets,
                batch.temperatures,
                **asked,
            )

    # ----------------------------------------------------------------------------------------------- learning

    def update(
        self, batches: Sequence[MicroBatch], algorithm: Algorithm, *, only_critic: bool = False
    ) -> dict[str, float]:
        """One optimiser step over all micro-batches; returns what the loss and the optimiser have to tell.

        Ranks add up their gradients once, after the last micro-batch: each may have any number of them, or none.

        Args:
            batches: of this rank; token weights sum to 1 over all ranks (or less, when rollouts were left out).
            algorithm: whose loss is minimised.
            only_critic: leave the policy as it is.

        Raises:
            NumericsError: too many steps in a row were refused. What is not finite never touches a parameter or moment.
            RunError: another rank failed.
        """
        with self.lock:
            metrics = self.gradients(batches, algorithm, only_critic=only_critic)
            watched = ("loss", "grad_norm", "critic_grad_norm")
            broken = [f"{name} {metrics[name]}" for name in watched if not math.isfinite(metrics.get(name, 0.0))]
            if broken:
                self.refuse(", ".join(broken))
                return metrics | {"refused": 1.0}
            self._apply(metrics["grad_norm"])
        return metrics

    def gradients(
        self, batches: Sequence[MicroBatch], algorithm: Algorithm, *, only_critic: bool = False
    ) -> dict[str, float]:
        """Gradients over all micro-batches, clipped and left in the parameters; arguments and result as of `update`."""
        totals: dict[str, torch.Tensor] = {}
        self.optimizer.zero_grad()
        missing = self._missing(batches)
        # Ranks with shards meet inside every forward pass, and so cannot meet here when one of them fails.
        with nullcontext() if self.sharded else self.ranks.together(), recomputing(self._recomputed):
            for batch in batches:
                with self.using(self.weights_of(batch.agent)):
                    loss, metrics = self._loss(batch.to(self.accelerator.device), algorithm)
                    # FSDP2 averages over ranks; the weights of tokens did already.
                    (loss * self.ranks.size if self.sharded else loss).backward()
                whose = {f"agent/{batch.agent}/loss": loss.detach()} if batch.agent else {}
                for name, value in {"loss": loss.detach(), **whose, **metrics}.items():
                    totals[name] = totals.get(name, torch.zeros_like(value)) + value
            self._keep_company(missing)
        norms = {"grad_norm": 0.0} if only_critic else self._sum_and_clip_policy()
        if self._critic_parameters:  # clipped apart, so that a critic that errs does not hold the policy back
            norms["critic_grad_norm"] = self._sum_and_clip(self._critic_parameters)
        if only_critic:
            for parameter in self.parameters:
                parameter.grad = None
        return self.ranks.total({name: float(value) for name, value in totals.items()}) | norms

    def _sum_and_clip_policy(self) -> dict[str, float]:
        """As `_sum_and_clip`, each agent's adapter by itself.

        Agents' gradients differ in scale. With one norm for all, an agent with large ones would shrink the steps of
        the others (Dr. MAS, arXiv 2602.08847, finds the same of shared advantage normalisation).
        """
        if self.adapters is None or not self.agents:
            return {"grad_norm": self._sum_and_clip(self.parameters)}
        norms = {
            f"agent/{agent}/grad_norm": self._sum_and_clip(self.adapters.parameters(agent)) for agent in self.agents
        }
        return {"grad_norm": math.hypot(*norms.values()), **norms}

    def _sum_and_clip(self, parameters: Sequence[torch.nn.Parameter]) -> float:
        """Add up gradients over ranks and scale them down to ``max_grad_norm``; returns their norm before."""
        if not self.sharded:
            self.ranks.add_up(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        return float(sharding.full(norm))

    def _missing(self, batches: Sequence[MicroBatch]) -> int:
        """How many passes of other ranks this one must take part in: shards are gathered by all at once."""
        return max(self.ranks.gather(len(batches))) - len(batches) if self.sharded else 0

    def _keep_company(self, missing: int) -> None:
        for _ in range(missing):
            logprobs = self._forward(self._logprobs, _NOTHING.to(self.accelerator.device)).logprobs
            if logprobs.requires_grad:
                (0 * logprobs.sum()).backward()

    def _loss(self, batch: MicroBatch, algorithm: Algorithm) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        needs = algorithms.needs(algorithm)
        asked = {name: name in needs for name in ("entropies", "values")}
        outputs = self._forward(self._logprobs, batch, **asked)
        logprobs, dtype = outputs.logprobs, outputs.logprobs.dtype
        # A clip could hide it from the loss; a sum that is not finite refuses the step.
        finite = torch.where(logprobs.detach().isfinite().all(), 0.0, math.nan)
        loss, metrics = algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
                rollout_logprobs=batch.rollout_logprobs.to(dtype),
                advantages=batch.advantages.to(dtype),
                weights=batch.weights.to(dtype),
                calls=batch.calls,
                ref_logprobs=batch.ref_logprobs,
                entropies=outputs.entropies,
                values=outputs.values,
                old_values=batch.old_values,
                returns=None if batch.returns is None else batch.returns.to(dtype),
            )
        )
        return loss + finite.to(loss.dtype), metrics

    def refuse(self, reason: str) -> None:
        """Make no step of the present gradients.

        Raises:
            NumericsError: it was one refusal too many in a row.
        """
        self.optimizer.zero_grad()
        self.bad_steps += 1
        if self.bad_steps >= BAD_STEPS:
            raise NumericsError(
                f"{self.bad_steps} steps in a row were not finite ({reason}); parameters were not touched. Replay the "
                "batches that are kept in the run's folder, lower learning_rate, or use precision='float32'"
            )

    def _apply(self, grad_norm: float) -> None:
        self.bad_steps = 0
        before = self.fingerprint()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.collect()
        first = self.optimizer.param_groups[0]
        fading = first["lr"] < first["initial_lr"] / 100  # the end of a schedule may be too small to be seen
        if grad_norm > 0 and not fading and self.fingerprint() == before:
            raise BackendError(
                f"an optimiser step with gradient norm {grad_norm:.3g} changed no weight: learning_rate "
                f"{first['lr']!r} is too small for {self.parameters[0].dtype}"
            )

    def collect(self) -> None:
        """Rank 0 generates with whole weights: make them those of the shards. All ranks take part."""
        if self.sharded:
            sharding.collect(self.parameters, list(self.model.parameters()) if self.ranks.leads else None)

    def fingerprint(self) -> str:
        """A hash over samples of all trained parameters; equal weights give equal hashes. All ranks ask together."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            flat = sharding.local(parameter.detach()).reshape(-1)
            digest.update(flat[:: max(1, flat.numel() // 256)].float().cpu().numpy().tobytes())
        digests = self.ranks.gather(digest.hexdigest())
        if not self.sharded and len({*digests}) > 1:
            raise BackendError(f"the ranks' weights have drifted apart (fingerprints {digests}); start the run again")
        return hashlib.sha256("".join(digests).encode()).hexdigest() if self.sharded else digests[0]

    # ------------------------------------------------------------------------------------------------ keeping

    def save(self, folder: Path) -> None:
        """Write what ``from_pretrained`` reads: the model, the PEFT adapter, or a folder of one for each agent."""
        if not self.accelerator.is_main_process:
            return
        with self.lock:
            if self.adapters is not None:
                self.adapters.save(folder, self.tokenizer)
            else:
                self.model.save_pretrained(folder)
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


_EMPTY_ROW = Row(
    rollout="",
    agent="",
    token_ids=(0, 0),
    sampled=(False, True),
    logprobs=(0.0, 0.0),
    temperatures=(1.0, 1.0),
    transitions=(-1, 0),
)
(_NOTHING,) = micro_batches([TrainRow(_EMPTY_ROW, [0.0], [0.0])], 2)


def _stop_ids(model: Any, tokenizer: Any) -> Iterable[int]:
    """Every token that ends an answer: models may have several."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return {token for token in [*ids, tokenizer.eos_token_id] if token is not None}

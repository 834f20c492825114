"""What `test_ranks.py` starts on several processes: ``python -m torch.distributed.run ... on_ranks.py WHAT FOLDER``.

Every rank writes what it saw into ``FOLDER/rankN.json`` or ``.pt``; the test compares that with one process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from agl.errors import RunError
from agl.protocols import LossInputs
from agl.records import Transition
from agl.transitions import build_rows
from agl_trainer import algorithms, checkpoint, models, updates
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.batch.pack import TrainRow
from agl_trainer.batch.weights import token_weights
from agl_trainer.commands import trainer_from
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy, join
from agl_trainer.sharding import full, local
from agl_trainer.testing import tiny_model, tiny_tokenizer

CASES = {"many small": (7, 64), "one each": (7, 10_000), "one row for two ranks": (1, 64)}
"""Rows of the step, and tokens of a micro-batch."""
GUARD = GRPO(kl_coef=0.0, clip_high=0.3)
PPO = {"name": "ppo", "gae_lambda": 0.9}


def new_models(folder: Path) -> dict[str, Path]:
    """A float32 Llama, and a model that computes in float64 throughout (Llama's norm goes through float32)."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder / "float64")
    tiny_tokenizer().save_pretrained(folder / "float64")
    return {"float64": folder / "float64", "float32": tiny_model(folder / "float32")}


def rows(count: int) -> list[TrainRow]:
    """Rows of very different lengths, each with its share of the step."""
    order = random.Random(0)
    built = []
    for place in range(count):
        prompt = tuple(order.randrange(3, 250) for _ in range(order.randrange(4, 120)))
        answer = tuple(order.randrange(3, 250) for _ in range(order.randrange(2, 12)))
        logprobs = tuple(order.uniform(-6, -5) for _ in answer)
        turn = Transition(
            rollout=str(place), agent="main", call="c", prompt_ids=prompt, response_ids=answer, logprobs=logprobs
        )
        built += build_rows([turn])
    weights = token_weights(built, "rollout")
    return [TrainRow(row, [order.uniform(-1, 1)] * len(own), own) for row, own in zip(built, weights, strict=True)]


def new_policy(model: Path, precision: str, **settings: Any) -> Policy:
    load = models.load
    models.load = lambda name, _: load(name, precision)  # float64 is no setting
    try:
        return Policy(TrainConfig.of(model=str(model), max_grad_norm=1e9, learning_rate=1e-3, **settings))
    finally:
        models.load = load


def gradients(
    places: Mapping[str, Path], cases: Sequence[str] = tuple(CASES), passes: int = 2, **settings: Any
) -> dict[str, torch.Tensor]:
    """The gradient that the optimiser is given, for every model and case."""
    algorithm = algorithms.make(settings["algorithm"]) if "algorithm" in settings else GUARD
    found: dict[str, torch.Tensor] = {}
    for precision, model in places.items():
        for case in cases:
            count, budget = CASES[case]
            policy = new_policy(model, precision, micro_batch_tokens=budget, **settings)

            def keep(optimizer: Any, *_: Any, name: str = f"{precision}, {case}") -> None:
                parts = [
                    full(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
                ]
                found[name] = torch.cat([part.reshape(-1) for part in parts]).clone()

            policy.optimizer.register_step_pre_hook(keep)
            updates.learn(policy, rows(count), algorithm, policy.config, passes)
            policy.close()
    return found


def of_ppo(places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The gradient of a policy and its critic, whose small errors Adam would blow up before a second pass."""
    return gradients(places, ["many small"], passes=1, algorithm=PPO)


def resumed(model: Path, root: Path, chosen: Any) -> list[str]:
    """Fingerprints of a policy that goes on after a checkpoint, and of one that the checkpoint brought back."""
    algorithm, found = algorithms.make(chosen), []
    for again in (False, True):
        policy = new_policy(model, "float32", micro_batch_tokens=64, algorithm=chosen)
        if again:
            tensors, state = checkpoint.read(root / "000001")
            checkpoint.restore(policy, tensors, state["policy"])
        else:
            updates.learn(policy, rows(7), algorithm, policy.config, 1)
            tensors, values = checkpoint.capture(policy)
            policy.ranks.lead(lambda t=tensors, v=values: checkpoint.write(root, t, {"policy": v}, "000001"))
            assert policy.ranks.leads or not (tensors["weights"] or tensors["optimizer"]), "rank 0 alone needs them"
        updates.learn(policy, rows(5), algorithm, policy.config, 1)
        critic = [] if policy.critic is None else [value.double().sum().item() for value in policy.critic.parameters()]
        found.append(f"{policy.fingerprint()} {critic}")
        policy.close()
    return found


def of_agents(model: Path) -> list[float]:
    """Gradient norms and a sum of each of two adapters' weights, after a step on both and a step on one."""
    policy = new_policy(model, "float32", lora_rank=4, adapters="agent", optimize=["writer", "judge"])
    assert policy.adapters is not None
    told: list[float] = []
    for agents in (["writer", "judge"], ["writer"]):
        asked = [replace(i, row=replace(i.row, agent=agents[n % len(agents)])) for n, i in enumerate(rows(7))]
        metrics = updates.learn(policy, asked, GUARD, policy.config, 1)
        told += [metrics[f"agent/{agent}/grad_norm"] for agent in policy.agents]
        told += [
            float(sum(p.detach().double().abs().sum() for p in policy.adapters.parameters(a))) for a in policy.agents
        ]
    policy.close()
    return told


class BrokenOnOneRank:
    """Its loss is NaN, or an error, on rank 1 alone."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        return list(values)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if self.rank == 1 and self.how == "error":
            raise MemoryError("no room on this one")
        factor = float("nan") if self.rank == 1 else 1.0
        return -(inputs.logprobs * inputs.weights).sum() * factor, {}


def steps(places: Mapping[str, Path], folder: Path) -> None:
    """Gradients of two ranks, and what happens when one of them is in trouble."""
    found = gradients(places)
    policy = new_policy(places["float32"], "float32", micro_batch_tokens=64)
    rank, before = policy.ranks.rank, policy.fingerprint()
    norm = updates.learn(policy, rows(7), BrokenOnOneRank(rank, "nan"), policy.config, 1)["grad_norm"]
    told: dict[str, Any] = {"size": policy.ranks.size, "skipped": norm != norm and policy.fingerprint() == before}
    try:
        updates.learn(policy, rows(7), BrokenOnOneRank(rank, "error"), policy.config, 1)
    except (RunError, MemoryError) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    try:
        policy.ranks.lead(lambda: 1 / 0)
    except (RunError, ZeroDivisionError) as error:
        told["led"] = f"{type(error).__name__}: {error}"
    told["after"] = updates.learn(policy, rows(7), GUARD, policy.config, 1)
    told["fingerprint"] = policy.fingerprint()
    policy.close()
    told["agents"] = of_agents(places["float32"])
    told["resumed"] = resumed(places["float32"], folder / "kept", PPO)
    found |= {f"{name}, ppo": gradient for name, gradient in of_ppo(places).items()}
    torch.save(found, folder / f"rank{rank}.pt")
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def sharded(places: Mapping[str, Path], folder: Path) -> None:
    """FSDP2: gradients out of shards, what is saved, a whole run, and the end of one that a rank had left."""
    found = gradients(places, activation_checkpointing=True)
    policy = new_policy(places["float32"], "float32", micro_batch_tokens=64)
    rank = policy.ranks.rank
    whole = sum(p.numel() for p in policy.parameters)
    told: dict[str, Any] = {"share": sum(local(p).numel() for p in policy.parameters) / whole}
    policy.close()
    run = trainer_from(folder / "train.toml").fit()
    told["run"] = str(run.model)
    (left,) = (folder / "doomed").iterdir()
    told["gone on"] = str(trainer_from(folder / "train.toml", checkpoint_every=1, resume=left).fit().model)
    torch.save(found, folder / f"sharded{rank}.pt")
    (folder / f"sharded{rank}.json").write_text(json.dumps(told))


def doomed(places: Mapping[str, Path], folder: Path) -> None:
    """FSDP2: a run in whose second step one rank fails, while the other waits for it inside a layer."""
    trainer = trainer_from(folder / "train.toml", checkpoint_every=1, output_dir=str(folder / "doomed"))
    loss, rank = GRPO.loss, join().rank

    def broken(self: GRPO, inputs: LossInputs) -> Any:
        if trainer.steps == 1 and rank == 1:
            raise MemoryError("no room on this one")
        return loss(self, inputs)

    GRPO.loss = broken
    trainer.fit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, target = sys.argv[1], Path(sys.argv[2])
    {"steps": steps, "sharded": sharded, "doomed": doomed}[what](
        {name: target / name for name in ("float64", "float32")}, target
    )

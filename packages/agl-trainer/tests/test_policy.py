"""The optimiser step: what it may change, what it never does, and that what is saved is what was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl.errors import BackendError, NumericsError
from agl.protocols import LossInputs
from agl.transitions import build_rows
from agl_trainer import card
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.sft import SFT
from agl_trainer.batch.pack import MicroBatch, TrainRow, micro_batches
from agl_trainer.config import TrainConfig
from agl_trainer.evaluate import Evaluation
from agl_trainer.policy import Policy
from agl_trainer.session import Result
from agl_trainer.warmup import Warmup

from .conftest import new_policy, state_of, transition, weights_of

KINDS = pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["full", "lora"])


def batch(policy: Policy, advantage: float = 1.0) -> MicroBatch:
    """One on-policy row; its rollout logprobs are the policy's own."""
    (row,) = build_rows([transition(range(10, 20), (30, 31, 32, 2))])
    (first,) = micro_batches([TrainRow(row, [advantage] * 4, [0.25] * 4)], 1)
    return replace(first, rollout_logprobs=policy.logprobs(first).double())


class Diverging:
    """An algorithm whose loss is NaN as often as it is told."""

    def __init__(self, *broken: bool) -> None:
        self.broken = list(broken)

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        return list(values)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        factor = float("nan") if self.broken.pop(0) else 1.0
        return -(inputs.logprobs * inputs.weights).sum() * factor, {}


@KINDS
def test_a_step_makes_good_answers_likelier_and_bad_ones_less(model_folder: Path, settings: dict[str, Any]):
    for advantage, direction in ((1.0, 1), (-1.0, -1)):
        policy = new_policy(model_folder, learning_rate=1e-3, **settings)
        step = batch(policy, advantage)
        before = policy.logprobs(step)
        metrics = policy.update([step], GRPO())
        assert metrics["grad_norm"] > 0 and metrics["loss"] == pytest.approx(-advantage, rel=1e-5)
        assert float((policy.logprobs(step) - before).sum()) * direction > 0


@KINDS
def test_only_what_is_trained_changes(model_folder: Path, settings: dict[str, Any]):
    policy = new_policy(model_folder, learning_rate=1e-3, **settings)
    before = weights_of(policy.model)
    policy.update([batch(policy)], GRPO())
    changed = {name for name, value in weights_of(policy.model).items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed) == bool(settings)


@KINDS
def test_a_step_that_is_not_finite_leaves_everything_bit_identical(model_folder: Path, settings: dict[str, Any]):
    policy = new_policy(model_folder, learning_rate=1e-3, **settings)
    step = batch(policy)
    policy.update([step], SFT())  # so that the optimiser has moments to lose
    weights, moments = weights_of(policy.model), state_of(policy.optimizer)
    metrics = policy.update([step, step], Diverging(False, True))
    assert metrics["grad_norm"] != metrics["grad_norm"], "the log tells"
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(policy.model).items())
    after = state_of(policy.optimizer)
    assert after["param_groups"] == moments["param_groups"]
    for place, state in moments["state"].items():
        for name, value in state.items():
            assert torch.equal(after["state"][place][name], value), name
    # And the next good step is the one that would have come without it.
    other = new_policy(model_folder, learning_rate=1e-3, **settings)
    other.update([step], SFT())
    for each in (policy, other):
        each.update([step], SFT())
    assert policy.fingerprint() == other.fingerprint()


def test_three_broken_steps_in_a_row_stop_the_run_and_a_good_one_between_counts_anew(policy: Policy):
    step = batch(policy)
    pattern = Diverging(True, True, False, True, True, True)
    for _ in range(5):
        policy.update([step], pattern)
    with pytest.raises(NumericsError, match=r"3 steps in a row.*parameters were not touched.*learning_rate"):
        policy.update([step], pattern)


def test_a_step_that_changes_no_weight_is_an_error(model_folder: Path):
    policy = new_policy(model_folder, learning_rate=1e-60)
    with pytest.raises(BackendError, match=r"changed no weight: learning_rate 1e-60 is too small"):
        policy.update([batch(policy)], SFT())


def test_a_gradient_of_zero_is_no_error(policy: Policy):
    before = policy.fingerprint()
    assert policy.update([batch(policy, 0.0)], GRPO())["grad_norm"] == 0.0
    assert policy.fingerprint() == before


def test_the_gradient_is_clipped(model_folder: Path):
    """Adam hides the size of one gradient, so look at the first moment: (1 - 0.9) times the clipped gradient."""
    policy = new_policy(model_folder, max_grad_norm=0.01)
    norm = policy.update([batch(policy)], SFT())["grad_norm"]
    first = [state["exp_avg"].square().sum() for state in state_of(policy.optimizer)["state"].values()]
    assert norm > 0.1
    assert float(torch.stack(first).sum().sqrt()) == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_micro_batches_of_a_step_are_one_step(model_folder: Path):
    rows = [build_rows([transition(range(10, 20 + place), (30, 31), str(place))])[0] for place in range(4)]
    items = [TrainRow(row, [1.0] * 2, [0.125] * 2) for row in rows]
    fingerprints, norms = set(), []
    for budget in (1, 1000):
        policy = new_policy(model_folder, learning_rate=1e-3)
        metrics = policy.update(list(micro_batches(items, budget)), SFT())
        norms.append(metrics["grad_norm"])
        assert {int(state["step"]) for state in state_of(policy.optimizer)["state"].values()} == {1}
        fingerprints.add(metrics["loss"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_second_pass_compares_with_the_weights_at_the_start(policy: Policy):
    """Without the old logprobs every pass would find ratio 1 and never clip."""
    step = batch(policy)
    algorithm = GRPO(clip_high=0.01)
    policy.optimizer.param_groups[0]["lr"] = 1e-2
    step = replace(step, old_logprobs=policy.logprobs(step))
    first, second, third = (policy.update([step], algorithm) for _ in range(3))
    assert first["clipped"] == 0.0 and second["clipped"] > 0
    assert second["loss"] < first["loss"], "the loss falls with the ratio until the clip"
    assert third["grad_norm"] < first["grad_norm"]


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["full", "lora"])
def test_kl_starts_at_zero_and_pulls_back_to_the_beginning(model_folder: Path, settings: dict[str, Any]):
    policy = new_policy(model_folder, learning_rate=1e-2, algorithm={"name": "grpo", "kl_coef": 0.5}, **settings)
    step = batch(policy)
    algorithm = GRPO(kl_coef=0.5)
    start = policy.logprobs(step)
    reference = policy.reference_logprobs(step)
    torch.testing.assert_close(reference, start, rtol=0, atol=1e-5)
    assert policy.update([replace(step, ref_logprobs=reference)], algorithm)["kl"] == pytest.approx(0.0, abs=1e-9)
    for _ in range(3):
        policy.update([step], SFT())
    away = policy.logprobs(step)
    silent = replace(batch(policy, 0.0), ref_logprobs=reference)
    distances = []
    for _ in range(20):
        distances.append(policy.update([silent], algorithm)["kl"])
    assert float((away - start).abs().mean()) > 0.05
    assert distances[-1] < distances[0] / 2


# ---------------------------------------------------------------------------------------------------- keeping


def test_a_saved_model_is_the_trained_one(model_folder: Path, tmp_path: Path):
    policy = new_policy(model_folder, learning_rate=1e-3)
    step = batch(policy)
    policy.update([step], SFT())
    policy.save(tmp_path / "model")
    again = new_policy(tmp_path / "model")
    torch.testing.assert_close(again.logprobs(step), policy.logprobs(step), rtol=0, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == policy.tokenizer.chat_template
    assert again.stop_ids == policy.stop_ids == {2}


def test_a_saved_adapter_is_the_trained_one_over_its_base(model_folder: Path, tmp_path: Path):
    policy = new_policy(model_folder, learning_rate=1e-2, lora_rank=4)
    step = batch(policy)
    policy.update([step], SFT())
    policy.save(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model_folder
    )
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "model").eval()
    with torch.no_grad():
        table = loaded(step.token_ids, use_cache=False).logits[0].log_softmax(-1)
    wanted = policy.logprobs(step)
    torch.testing.assert_close(table[step.sources, step.targets], wanted, rtol=0, atol=1e-5)
    # `agl eval --model` loads an adapter's directory as a model.
    again = new_policy(tmp_path / "model")
    torch.testing.assert_close(again.logprobs(step), wanted, rtol=0, atol=1e-5)


def test_a_policy_that_begins_with_an_adapter_trains_on_and_keeps_its_beginning(model_folder: Path, tmp_path: Path):
    first = new_policy(model_folder, learning_rate=1e-2, lora_rank=4)
    step = batch(first)
    first.update([step], SFT())
    first.save(tmp_path / "adapter")
    second = new_policy(
        tmp_path / "adapter", learning_rate=1e-2, lora_rank=4, algorithm={"name": "grpo", "kl_coef": 0.1}
    )
    torch.testing.assert_close(second.logprobs(step), first.logprobs(step), rtol=0, atol=1e-5)
    second.update([step], SFT())
    torch.testing.assert_close(second.reference_logprobs(step), first.logprobs(step), rtol=0, atol=1e-5)
    second.save(tmp_path / "second")
    third = new_policy(tmp_path / "second")
    torch.testing.assert_close(third.logprobs(step), second.logprobs(step), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 8])
def test_the_card_tells_what_it_is_and_what_was_measured(tmp_path: Path, rank: int):
    config = TrainConfig.of(model="base/model", lora_rank=rank, optimize=["writer"], seed=5, steps=7)
    evaluations = {
        "before": Evaluation("before", {"a": 0.0, "b": 0.5}, {}, 3),
        "after": Evaluation("after", {"a": 1.0}, {}, 0),
    }
    card.write(tmp_path, config, Result(tmp_path, tmp_path, evaluations))
    text = (tmp_path / "README.md").read_text()
    head = text.split("---")[1]
    assert "base_model: base/model" in head and f"library_name: {'peft' if rank else 'transformers'}" in head
    assert ("PEFT adapter" in text) == bool(rank)
    assert "| before | 0.250 [0.000, 0.500] | 2 | 3 |" in text and "| after | 1.000 [1.000, 1.000] | 1 | 0 |" in text
    assert "Optimised agents: writer" in text and "seed 5" in text and "7 steps" in text


def test_a_warm_up_has_moments_of_its_own(policy: Policy):
    step = batch(policy)
    policy.update([step], SFT())
    policy.optimizer = policy.new_optimizer(0.5)
    assert not state_of(policy.optimizer)["state"] and policy.optimizer.param_groups[0]["lr"] == 0.5
    assert Warmup(demonstrate=lambda task, agent, prompt: "").learning_rate is None

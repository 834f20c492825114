"""GRPO agrees with its peers, case by case, wherever the settings are the same; where it differs, exactly how."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agl.protocols import LossInputs
from agl.records import Row
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.kl import kl_divergence
from agl_trainer.batch.weights import Aggregation, token_weights
from agl_trainer.logprobs import selected_logprobs

from .conftest import cases, close, tensor

pytestmark = pytest.mark.needs_data

UNCAPPED = 1e30


def loss_of(
    algorithm: GRPO,
    aggregation: Aggregation,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    rollout_logprobs: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    rollouts: list[str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
    """Loss, its gradient on a grid of rows, and metrics. Every row of the grid is a rollout unless told otherwise."""
    sampled = mask.bool()
    names = rollouts or [str(place) for place in range(len(mask))]
    rows = [
        Row(rollout=name, agent="a", token_ids=(), sampled=tuple(line), logprobs=(), temperatures=(), transitions=calls)
        for name, line in zip(names, sampled.tolist(), strict=True)
        for calls in [tuple(0 if seen else -1 for seen in line)]
    ]
    weights = torch.tensor([w for own in token_weights(rows, aggregation) for w in own], dtype=torch.float64)
    variable = logprobs.clone().requires_grad_()
    behaviour = old if rollout_logprobs is None else rollout_logprobs
    loss, metrics = algorithm.loss(
        LossInputs(
            logprobs=variable[sampled],
            old_logprobs=old[sampled],
            rollout_logprobs=behaviour[sampled],
            advantages=(advantages if advantages.ndim == 2 else advantages[:, None].expand_as(mask))[sampled],
            weights=weights,
            calls=sampled.nonzero()[:, 0],
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[sampled],
        )
    )
    loss.backward()
    assert variable.grad is not None
    return loss, variable.grad, metrics


# --------------------------------------------------------------------------------------------------- advantages

UNSUPPORTED_ADVANTAGES = {
    "batch": "one deviation for the whole batch mixes tasks of different scales (Lite PPO); not offered",
    "normalize_then_sum": "GDPO normalises each reward part, then the batch; our parts are summed first",
}


def reason_to_skip(case: Mapping[str, Any]) -> str | None:
    params = case["params"]
    if params["scale_rewards"] == "batch":
        return "batch"
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        return "normalize_then_sum"
    return None


def test_advantages_equal_those_of_trl(data_dir: Path):
    found, rtol = cases(data_dir, "trl_advantages")
    compared: Counter[str] = Counter()
    for case in found:
        params = case["params"]
        if reason := reason_to_skip(case):
            assert reason in UNSUPPORTED_ADVANTAGES
            compared[reason] += 1
            continue
        parts = tensor(case["inputs"]["rewards_per_func"])
        scored = ~parts.isnan().all(1)
        totals = (parts * tensor(params["reward_weights"])).nansum(1)
        groups = [str(place // params["num_generations"]) for place in range(len(parts))]
        kept = scored.nonzero()[:, 0].tolist()
        got = GRPO(scale=params["scale_rewards"]).advantages(
            [float(totals[place]) for place in kept], [groups[place] for place in kept]
        )
        wanted = tensor(case["outputs"]["advantages"])
        close(got, wanted[kept], rtol)
        assert not wanted[~scored].any(), "what is unscored has no advantage"
        compared["compared"] += 1
    assert compared == {"compared": 12, "batch": 6, "normalize_then_sum": 6}


def test_rollout_level_advantages_equal_those_of_agentlightning_except_for_a_group_of_one(
    data_dir: Path,
):
    found, rtol = cases(data_dir, "agl_rollout_level")
    alone = 0
    for case in found:
        inputs = case["inputs"]
        rewards: dict[str, float] = {}
        task: dict[str, str] = {}
        for rollout, group, line in zip(
            inputs["rollout_id"], inputs["data_id"], tensor(inputs["token_level_rewards"]), strict=True
        ):
            rewards[rollout], task[rollout] = float(line.sum()), group
        scale = "group" if case["params"]["norm_adv_by_std_in_grpo"] else "none"
        got = GRPO(scale=scale, epsilon=1e-6).advantages(list(rewards.values()), [task[rollout] for rollout in rewards])
        by_rollout = dict(zip(rewards, got, strict=True))
        size = Counter(task.values())
        mask = tensor(inputs["response_mask"])
        for place, rollout in enumerate(inputs["rollout_id"]):
            theirs = tensor(case["outputs"]["advantages"])[place][mask[place].bool()]
            if size[task[rollout]] == 1:
                # On purpose: without a rival there is no baseline, so nothing is learned from the reward itself.
                assert by_rollout[rollout] == 0.0
                alone += 1
            else:
                close(torch.full_like(theirs, by_rollout[rollout]), theirs, rtol)
    assert alone > 0


def test_a_rollout_weighs_one_of_n_rollouts_where_agentlightning_gives_it_one_of_n_rows(data_dir: Path):
    found, rtol = cases(data_dir, "agl_rollout_level")
    equal = 0
    for case in found:
        inputs, outputs = case["inputs"], case["outputs"]
        loss, gradient, _ = loss_of(
            GRPO(clip_low=0.2, clip_high=0.2),
            "rollout",
            tensor(inputs["log_prob"]),
            tensor(inputs["old_log_prob"]),
            tensor(outputs["advantages"]),
            tensor(inputs["response_mask"]),
            rollouts=inputs["rollout_id"],
        )
        factor = inputs["num_trained_rows"] / len(set(inputs["rollout_id"]))
        assert factor > 1
        if outputs["metrics"]["actor/pg_clipfrac_lower"] == 0.0:
            close(loss, factor * outputs["loss"], rtol)
            equal += 1
        held = dual_clipped(inputs, tensor(outputs["advantages"]), 3.0)
        close(gradient[~held], factor * tensor(outputs["grad_log_prob"])[~held], rtol)
    assert equal >= len(found) // 2


def dual_clipped(inputs: Mapping[str, Any], advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """Bad tokens whose ratio exceeds ``cap``: verl holds their loss there (dual clip), the plain PPO loss does not."""
    ratio = (tensor(inputs["log_prob"]) - tensor(inputs["old_log_prob"])).exp()
    return (ratio > cap) & (advantages < 0)


# ----------------------------------------------------------------------------------------------------- logprobs


def test_selected_logprobs_equal_those_of_trl_and_ignore_the_chunk_size(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    found, rtol = cases(data_dir, "trl_logps")
    for case in found:
        logits, index = tensor(case["inputs"]["logits"]), tensor(case["inputs"]["index"]).long()
        for chunk in (1, 3, 512):
            monkeypatch.setattr("agl_trainer.logprobs.CHUNK", chunk)
            flat = logits.reshape(-1, logits.shape[-1])
            got = selected_logprobs(nn.Identity(), flat, index.reshape(-1), torch.ones(len(flat)))
            close(got.reshape(index.shape), tensor(case["outputs"]["logps"]), rtol)


# ------------------------------------------------------------------------------------------------------- losses


def test_the_loss_equals_that_of_trl(data_dir: Path):
    found, rtol = cases(data_dir, "trl_grpo_loss", "grpo", "bnpo", "dapo")
    compared: Counter[str] = Counter()
    for case in found:
        params, inputs, outputs = case["params"], case["inputs"], case["outputs"]
        if params["importance_sampling_level"] != "token" or params["delta"] or params["off_policy_mask_threshold"]:
            continue  # GSPO, two-sided clipping and sequence masks are other algorithms
        mask = tensor(inputs["completion_mask"])
        old = tensor(inputs["old_per_token_logps"])
        ratio = tensor(inputs["importance_sampling_ratio"]) if params["vllm_is"] else None
        reference = tensor(inputs["ref_per_token_logps"]) if params["beta"] else None
        loss, gradient, _ = loss_of(
            GRPO(
                clip_low=params["epsilon_low"],
                clip_high=params["epsilon_high"],
                correction_bounds=(0, UNCAPPED),  # TRL was given ratios that it had capped before
                kl_coef=params["beta"],
                kl_estimator="k3",
            ),
            "rollout" if params["loss_type"] == "grpo" else "token",
            tensor(inputs["per_token_logps"]),
            old,
            tensor(inputs["advantages"]),
            mask,
            rollout_logprobs=None if ratio is None else old - ratio.expand_as(old).log(),
            ref_logprobs=reference,
        )
        factor = tokens_factor(params, mask)
        close(loss, tensor(outputs["loss"]) * factor, rtol)
        if not params["beta"]:  # with KL the gradients differ on purpose: ours is that of k2, see below
            close(gradient, tensor(outputs["grad_per_token_logps"]) * factor, rtol)
        compared[f"{params['loss_type']}{'+kl' if params['beta'] else ''}{'+is' if params['vllm_is'] else ''}"] += 1
    kinds = {f"{loss}{extra}" for loss in ("grpo", "bnpo", "dapo") for extra in ("", "+kl", "+is")}
    assert set(compared) == kinds and min(compared.values()) >= 6


def tokens_factor(params: Mapping[str, Any], mask: torch.Tensor) -> float:
    """TRL's ``grpo`` counts empty rows in the mean over rows; a rollout without a sampled token is none of ours."""
    if params["loss_type"] != "grpo":
        return 1.0
    return len(mask) / int(mask.bool().any(1).sum())


def test_the_loss_equals_that_of_verl_where_its_dual_clip_is_idle(data_dir: Path):
    found, rtol = cases(data_dir, "verl_policy_loss", "vanilla")
    modes: dict[str, Aggregation] = {"token-mean": "token", "seq-mean-token-mean": "rollout"}
    compared: Counter[str] = Counter()
    for case in found:
        params, inputs, outputs = case["params"], case["inputs"], case["outputs"]
        if params["loss_agg_mode"] not in modes:
            continue  # sums instead of means: not offered
        logprobs, old = tensor(inputs["log_prob"]), tensor(inputs["old_log_prob"])
        advantages, mask = tensor(inputs["advantages"]), tensor(inputs["response_mask"])
        weights = inputs.get("rollout_is_weights")
        loss, gradient, _ = loss_of(
            GRPO(
                clip_low=params["clip_ratio_low"],
                clip_high=params["clip_ratio_high"],
                correction_bounds=(0, UNCAPPED),
            ),
            modes[params["loss_agg_mode"]],
            logprobs,
            old,
            advantages,
            mask,
            rollout_logprobs=None if weights is None else old - tensor(weights).log(),
        )
        held = dual_clipped(inputs, advantages, params["clip_ratio_c"]) & mask.bool()
        close(gradient[~held], tensor(outputs["grad_log_prob"])[~held], rtol)
        if not held.any():
            close(loss, outputs["loss"], rtol)
            compared[f"{params['loss_agg_mode']}{'' if weights is None else '+is'}"] += 1
    assert set(compared) == {*modes, "token-mean+is", "seq-mean-token-mean+is"} and min(compared.values()) >= 3


def test_the_loss_with_a_capped_token_weight_equals_that_of_openrlhf(data_dir: Path):
    found, rtol = cases(data_dir, "openrlhf_policy_loss", "ppo")
    compared: Counter[str] = Counter()
    for case in found:
        params, inputs, outputs = case["params"], case["inputs"], case["outputs"]
        level, mode, gate = (params[f"is_correction_{name}"] for name in ("level", "mode", "gating"))
        if params["dual_clip"] or not (level == "off" or (level, mode, gate) == ("token", "clip", "ratio")):
            continue  # dual clip, masks instead of caps, weights of whole sequences: not offered
        behaviour = tensor(inputs["rollout_log_probs"])
        old = tensor(inputs["old_log_probs"])
        cap = params["is_correction_threshold"][1]
        loss, gradient, _ = loss_of(
            GRPO(clip_low=params["clip_eps_low"], clip_high=params["clip_eps_high"], correction_bounds=(0, cap)),
            "token" if params["token_level_loss"] else "rollout",
            tensor(inputs["log_probs"]),
            old,
            tensor(inputs["advantages"]),
            tensor(inputs["action_mask"]),
            rollout_logprobs=old if level == "off" else behaviour,
        )
        mask = tensor(inputs["action_mask"]).bool()
        factor = 1.0 if params["token_level_loss"] else len(mask) / int(mask.any(1).sum())  # it counts empty rows
        close(loss, factor * outputs["loss"], rtol)
        close(gradient, factor * tensor(outputs["grad_log_probs"]), rtol)
        compared[f"{level}/{params['token_level_loss']}"] += 1
    assert set(compared) == {"off/True", "off/False", "token/True", "token/False"}


def test_the_token_weight_is_capped_as_verl_caps_it(data_dir: Path):
    found, rtol = cases(data_dir, "verl_rollout_is", "token")
    for case in found:
        params = case["params"]
        if params["rollout_is_batch_normalize"] or params["rollout_is_threshold"] != 2.0:
            continue
        difference = tensor(case["inputs"]["log_ratio"])
        mask = tensor(case["inputs"]["response_mask"])
        zero = torch.zeros_like(difference)
        # With ratio 1 and advantage -1 the gradient of a token is its share times its weight.
        _, gradient, _ = loss_of(GRPO(), "token", zero, zero, zero - 1, mask, rollout_logprobs=-difference)
        close(gradient * mask.sum(), tensor(case["outputs"]["weights"]) * mask, rtol)


# ----------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize(("ours", "theirs"), [("k2", "k2"), ("k3", "k3+")])
def test_kl_has_the_value_and_the_gradient_of_verl(data_dir: Path, ours: str, theirs: str):
    found, rtol = cases(data_dir, "verl_kl", theirs)
    for case in found:
        mask = tensor(case["inputs"]["mask"])
        variable = tensor(case["inputs"]["logprob"]).requires_grad_()
        value = kl_divergence(variable, tensor(case["inputs"]["ref_logprob"]), ours)
        close(value.clamp(max=10.0) if ours == "k3" else value, tensor(case["outputs"]["value"]), rtol)  # verl's bound
        (value * mask).sum().backward()
        close(variable.grad, tensor(case["outputs"]["grad_of_masked_sum"]), rtol)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_either_estimator_is_that_of_the_reverse_kl(estimator: str):
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    # The expectation over samples, written out: each outcome with its probability, which the gradient does not see.
    expected = (logprobs.exp().detach() * kl_divergence(logprobs, reference, estimator)).sum()
    (got,) = torch.autograd.grad(expected, logits)
    close(got, wanted, 1e-12, 1e-15)
    if estimator == "k3":
        close(expected, exact, 1e-12)


def test_the_documented_pitfall_holds_that_plain_k3_has_another_gradient():
    """If this failed, straight-through would be needless."""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    difference = logprobs - reference
    probability = logprobs.exp().detach()
    (right,) = torch.autograd.grad((probability * difference.square() / 2).sum(), logits, retain_graph=True)
    (plain,) = torch.autograd.grad((probability * ((-difference).exp() + difference - 1)).sum(), logits)
    assert float((right - plain).abs().max()) > 1e-2


def test_kl_pulls_and_is_told(data_dir: Path):
    zero, one = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    pulled = GRPO(kl_coef=0.5, kl_estimator="k2")
    loss, gradient, metrics = loss_of(pulled, "token", zero, zero, zero, one, ref_logprobs=zero - math.log(2))
    kl = math.log(2) ** 2 / 2
    close(metrics["kl"], kl, 1e-12)
    close(loss, 0.5 * kl, 1e-12)
    close(gradient, one * 0.5 * math.log(2) / 4, 1e-12)

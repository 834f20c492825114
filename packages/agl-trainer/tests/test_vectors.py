"""Advantages, returns and weights agree with the peers', case by case; where they differ, exactly how and why.

Losses stand in ``test_vectors_loss.py``. The reasons stand in ``docs/algorithms.md`` too.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agl.transitions import build_rows
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.ppo import PPO
from agl_trainer.algorithms.reinforce_pp import ReinforcePP
from agl_trainer.algorithms.returns import discounted_returns, gae
from agl_trainer.algorithms.rloo import RLOO
from agl_trainer.batch.pack import TrainRow
from agl_trainer.logits import TILE, selected_logprobs
from agl_trainer.updates import token_rewards

from .conftest import close, tensor, transition
from .golden import Ledger, grid, inputs_of, loss_of, step_tokens, weights_of

pytestmark = pytest.mark.needs_data


def test_trl_advantages(data_dir: Path):
    ledger = Ledger(data_dir, "trl_advantages")
    for case in ledger:
        params, parts = case["params"], tensor(case["inputs"]["rewards_per_func"])
        if params["multi_objective_aggregation"] == "normalize_then_sum":
            ledger.enter(case, "not offered: GDPO normalises each part of the reward; our parts are summed first")
            continue
        scored = ~parts.isnan().all(1)  # what is unscored has no advantage, and no part in the baseline
        totals = (parts * tensor(params["reward_weights"])).nansum(1)
        kept = scored.nonzero()[:, 0].tolist()
        got = GRPO(scale=params["scale_rewards"]).advantages(
            totals[scored].tolist(), [str(place // params["num_generations"]) for place in kept]
        )
        wanted = tensor(case["outputs"]["advantages"])
        assert not wanted[~scored].any()
        close(got, wanted[scored], ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=18, not_offered=6)


def test_agl_rollout_level(data_dir: Path):
    ledger = Ledger(data_dir, "agl_rollout_level")
    alone = 0
    for case in ledger:
        inputs, outputs = case["inputs"], case["outputs"]
        rewards: dict[str, float] = {}
        task: dict[str, str] = {}
        for rollout, group, line in zip(
            inputs["rollout_id"], inputs["data_id"], tensor(inputs["token_level_rewards"]), strict=True
        ):
            rewards[rollout], task[rollout] = float(line.sum()), group
        scale: Any = "group" if case["params"]["norm_adv_by_std_in_grpo"] else "none"
        got = GRPO(scale=scale, epsilon=1e-6).advantages(list(rewards.values()), [task[name] for name in rewards])
        by_rollout = dict(zip(rewards, got, strict=True))
        size = Counter(task.values())
        mask, theirs = tensor(inputs["response_mask"]), tensor(outputs["advantages"])
        for place, rollout in enumerate(inputs["rollout_id"]):
            wanted = theirs[place][mask[place].bool()]
            if size[task[rollout]] == 1:
                # On purpose: without a rival there is no baseline, so nothing is learned from the reward itself.
                close(wanted, torch.full_like(wanted, rewards[rollout]), 1e-5)
                assert by_rollout[rollout] == 0.0
                alone += 1
            else:
                close(torch.full_like(wanted, by_rollout[rollout]), wanted, ledger.rtol)
        logprobs, old = inputs_of(case, "log_prob", "old_log_prob")
        weights = weights_of(mask, "rollout", names=inputs["rollout_id"])
        algorithm = GRPO(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
        loss, gradient, _ = loss_of(algorithm, mask, logprobs, old, theirs, weights=weights)
        # On purpose: a rollout weighs one of n rollouts. Theirs weighs one of n rows, so that steps shrink when agents
        # make more calls.
        factor = inputs["num_trained_rows"] / len(set(inputs["rollout_id"]))
        assert factor > 1
        close(loss, factor * outputs["loss"], ledger.rtol)
        close(gradient, factor * tensor(outputs["grad_log_prob"]), ledger.rtol)
        ledger.enter(case, "differs: by the factor rows / rollouts, and in groups of one")
    assert alone > 0
    ledger.closes(differs=12)


NOT_OFFERED = {
    "opo": "a baseline weighted by length (2505.23585): long rollouts would decide what short ones are compared with",
    "remax": "its baseline is a greedy rollout of the same task, which agents with tools do not have for free",
    "grpo_passk": "rewards the best of a group only (pass@k); a reward hook over groups is not ours to decide",
}


def test_verl_advantages(data_dir: Path):
    ledger = Ledger(data_dir, "verl_advantages")
    for case in ledger:
        kind, params, outputs = case["fn"], case["params"], case["outputs"]
        if kind in NOT_OFFERED:
            ledger.enter(case, f"not offered: {NOT_OFFERED[kind]}")
            continue
        mask, rewards = inputs_of(case, "response_mask", "token_level_rewards")
        wanted = tensor(outputs["advantages"])
        if kind in ("gae", "reinforce_plus_plus"):
            # Whitened means of float32-sized numbers: verl's masked sums lose a digit or two.
            if kind == "gae":
                ppo = PPO(gamma=params["gamma"], gae_lambda=params["lam"], whiten=params["whiten"])
                (values,) = inputs_of(case, "values")
                found = ppo.token_advantages(step_tokens(mask, rewards, values=values))
                assert found.returns is not None
                close(grid(found.returns, mask), tensor(outputs["returns"]) * mask, ledger.rtol)
            else:
                found = ReinforcePP(gamma=params["gamma"]).token_advantages(step_tokens(mask, rewards))
            close(grid(found.advantages, mask), wanted * mask, ledger.rtol, 1e-6)
            ledger.enter(case)
            continue
        groups, totals = case["inputs"]["index"], rewards.sum(1).tolist()
        size = Counter(groups)
        algorithm: Any
        match kind:
            case "grpo" | "grpo_vectorized":
                algorithm = GRPO(scale="group" if params["norm_adv_by_std_in_grpo"] else "none", epsilon=1e-6)
            case "rloo" | "rloo_vectorized":
                algorithm = RLOO()
            case "reinforce_plus_plus_baseline":
                algorithm = ReinforcePP(group_baseline=True)
        got = algorithm.advantages(totals, groups)
        lonely = torch.tensor([size[group] == 1 for group in groups])
        if kind == "reinforce_plus_plus_baseline":
            ends = grid([0.0] * int(mask.sum()), mask)
            for place, seen in enumerate(mask.bool()):
                if seen.any():
                    ends[place, int(seen.nonzero()[-1])] = got[place]
            got_grid = grid(algorithm.token_advantages(step_tokens(mask, ends)).advantages, mask)
            if not lonely.any():
                close(got_grid, wanted * mask, ledger.rtol, 1e-6)
                ledger.enter(case)
                continue
            assert all(got[place] == 0.0 for place in lonely.nonzero()[:, 0].tolist())
            assert not torch.allclose(got_grid, wanted * mask)
            ledger.enter(case, "differs: a group of one has no baseline, and all tokens are whitened together")
            continue
        got_grid = torch.tensor(got, dtype=torch.float64)[:, None] * mask
        close(got_grid[~lonely], (wanted * mask)[~lonely], ledger.rtol)
        if not lonely.any():
            ledger.enter(case)
            continue
        assert not got_grid[lonely].any()
        theirs = (wanted * mask)[lonely]
        own = torch.tensor(totals, dtype=torch.float64)[lonely][:, None] * mask[lonely]
        close(theirs, own if theirs.any() else 0 * own, 1e-5)
        ledger.enter(
            case, "differs: a group of one has advantage 0; theirs is the reward itself" if theirs.any() else "equal"
        )
    ledger.closes(equal=50, differs=10, not_offered=16)


def test_openrlhf_gae(data_dir: Path):
    ledger = Ledger(data_dir, "openrlhf_gae")
    for case in ledger:
        params = case["params"]
        mask, rewards = inputs_of(case, "action_mask", "rewards")
        if case["fn"] == "cumulative_returns":
            for place, seen in enumerate(mask.bool()):
                got = discounted_returns(rewards[place][seen].tolist(), params["gamma"])
                close(got, tensor(case["outputs"]["returns"])[place][seen], ledger.rtol)
        else:
            ppo = PPO(gamma=params["gamma"], gae_lambda=params["lam"], whiten=False)
            (values,) = inputs_of(case, "values")
            found = ppo.token_advantages(step_tokens(mask, rewards, values=values))
            assert found.returns is not None
            close(grid(found.advantages, mask), tensor(case["outputs"]["advantages"]) * mask, ledger.rtol)
            close(grid(found.returns, mask), tensor(case["outputs"]["returns"]) * mask, ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=24)


def test_openrlhf_reward(data_dir: Path):
    """A rollout's reward stands at its last token, and the KL is taken off each."""
    ledger = Ledger(data_dir, "openrlhf_reward")
    for case in ledger:
        rewards, kl, mask = inputs_of(case, "r", "kl", "action_mask")
        low, high = case["params"]["reward_clip_range"]
        rows = []
        lengths = mask.bool().sum(1).tolist()
        for place, reward in enumerate(rewards.clamp(low, high).tolist()):  # clipping rewards is the user's business
            for row in build_rows([transition([1], [2] * lengths[place], str(place))] if lengths[place] else []):
                rows.append(TrainRow(row, [reward] * lengths[place], [0.0] * lengths[place]))
        ours = grid(token_rewards(rows), mask) - case["params"]["kl_coef"] * kl * mask
        theirs = tensor(case["outputs"]["reward"])
        close(ours, theirs * mask, ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=6)


def test_verl_agg_loss(data_dir: Path):
    ledger = Ledger(data_dir, "verl_agg_loss")
    for case in ledger:
        losses, mask = inputs_of(case, "loss_mat", "loss_mask")
        params = case["params"]
        rows = int(mask.bool().any(1).sum())
        # verl multiplies by the ranks because its all-reduce averages; ours adds up.
        ranks = params.get("dp_size", 1)
        count = params.get("global_batch_size", rows)
        match params["loss_agg_mode"]:
            case "token-mean":
                tokens = params.get("batch_num_tokens", int(mask.sum()))
                weights = weights_of(mask, "token") * int(mask.sum()) / tokens
            case "token-sum":
                weights = weights_of(mask, "constant", rollouts=1)
            case "seq-mean-token-sum":
                weights = weights_of(mask, "constant", rollouts=count)
            case "seq-mean-token-sum-norm":
                weights = weights_of(
                    mask, "constant", rollouts=count, length=params.get("loss_scale_factor", mask.shape[1])
                )
            case "seq-mean-token-mean":
                weights = weights_of(mask, "rollout", rollouts=count)
        close(ranks * (weights * losses[mask.bool()]).sum(), case["outputs"]["loss"], ledger.rtol)
        close(ranks * grid(weights.tolist(), mask), tensor(case["outputs"]["grad"]), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=90)


def test_trl_logps(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    ledger = Ledger(data_dir, "trl_logps")
    for case in ledger:
        logits, index = tensor(case["inputs"]["logits"]), tensor(case["inputs"]["index"]).long()
        flat, ones = logits.reshape(-1, logits.shape[-1]), torch.ones(index.numel())
        walked = nn.Linear(flat.shape[1], flat.shape[1], bias=False, dtype=flat.dtype)
        nn.init.eye_(walked.weight)
        for tile in (1, 30, 1 << 20):
            monkeypatch.setitem(TILE, "cpu", tile)
            for head in (walked, nn.Identity()):
                got, entropies = selected_logprobs(head, flat, index.reshape(-1), ones, entropies=True)
                assert entropies is not None
                close(got.reshape(index.shape), tensor(case["outputs"]["logps"]), ledger.rtol)
                close(entropies.reshape(index.shape), tensor(case["outputs"]["entropy"]), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=3)


def test_verl_entropy(data_dir: Path):
    ledger = Ledger(data_dir, "verl_entropy")
    for case in ledger:
        logits, mask = inputs_of(case, "logits", "response_mask")
        flat = logits.reshape(-1, logits.shape[-1]).requires_grad_()
        first, ones = torch.zeros(len(flat), dtype=torch.long), torch.ones(len(flat))
        _, found = selected_logprobs(nn.Identity(), flat, first, ones, entropies=True)
        assert found is not None
        entropies = found.reshape(mask.shape)
        close(entropies, tensor(case["outputs"]["token_entropy"]), ledger.rtol)
        mean = (weights_of(mask, "token") * entropies[mask.bool()]).sum()
        close(mean, case["outputs"]["loss"], ledger.rtol)
        (gradient,) = torch.autograd.grad(mean, flat)
        assert torch.isfinite(gradient).all() and gradient.any()
        ledger.enter(case)
    ledger.closes(equal=6)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.9])
def test_gae_skips_observed_tokens(gae_lambda: float):
    """The table of reference/training.md: mask 1 1 0 0 0 1, a last reward of 1, values .2 .3 and .6."""
    right = {1.0: [0.8, 0.7, 0.4], 0.95: [0.746, 0.680, 0.4], 0.9: [0.694, 0.660, 0.4]}
    assert gae([0, 0, 1], [0.2, 0.3, 0.6], 1.0, gae_lambda) == pytest.approx(right[gae_lambda], abs=6e-4)


def test_verl_kl_controller(data_dir: Path):
    """Not offered: an objective that moves with the run is state, so that two runs of one configuration minimise
    different things. A fixed ``kl_coef`` beside the logged ``kl`` does the job in the open."""
    ledger = Ledger(data_dir, "verl_kl_controller")
    for case in ledger:
        params, value = case["params"], case["params"]["init_kl_coef"]
        for entry in case["outputs"]["trace"]:  # what it would be, for whoever wants it in a plugin
            error = max(-0.2, min(0.2, entry["current_kl"] / params["target_kl"] - 1))
            value *= 1 + error * entry["n_steps"] / params["horizon"]
            assert math.isclose(value, entry["value"], rel_tol=ledger.rtol)
        ledger.enter(case, "not offered: an objective that moves with the run")
    ledger.closes(not_offered=1)

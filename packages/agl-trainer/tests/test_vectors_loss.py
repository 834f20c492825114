"""Losses, KL and corrections agree with the peers', case by case; where they differ, exactly how and why.

The reasons stand in ``docs/algorithms.md`` too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_trainer.algorithms.cispo import CISPO
from agl_trainer.algorithms.corrections import Correction, correction_weights
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.gspo import GSPO
from agl_trainer.algorithms.kl import kl_divergence
from agl_trainer.algorithms.policy_gradient import PolicyGradient
from agl_trainer.algorithms.ppo import value_loss

from .conftest import close, tensor
from .golden import UNBOUNDED, Ledger, counts_empty_rows, grid, inputs_of, loss_of, weights_of

pytestmark = pytest.mark.needs_data


def test_no_golden_file_is_passed_over(data_dir: Path):
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_vectors*.py"))
    opened = re.findall(r'Ledger\(data_dir, "(\w+)"\)', tests)
    assert sorted(opened) == sorted(path.stem for path in (data_dir / "vectors").glob("*.json"))


# ------------------------------------------------------------------------------------------------ policy losses

NOT_OFFERED = {
    "sapo": "a sigmoid gate instead of a clip (2511.20347): another shape for the same bound",
    "luspo": "GSPO's loss times the length of the answer: it makes long answers count more, which we avoid everywhere",
    "vespo": "weighs sequences by a fitted curve of their ratio: two more settings with no accepted values",
    "geo_mean": "GMPO (2507.20673) clips log ratios before a geometric mean; GSPO and CISPO cover its use",
    "dppo_tv": "DPPO masks tokens whose probability moved too far: another shape for the same bound",
    "dppo_kl": "as dppo_tv, by a binary KL",
}


def trl_algorithm(params: Mapping[str, Any]) -> PolicyGradient:
    """Our settings for a case of TRL."""
    aggregations = {"grpo": "rollout", "bnpo": "token", "dapo": "token", "cispo": "token", "dr_grpo": "constant"}
    shared: dict[str, Any] = {
        "kl_coef": params.get("beta", 0.0),
        "kl_estimator": "k3",
        "aggregation": aggregations[params["loss_type"]],
        "off_policy_threshold": params.get("off_policy_mask_threshold"),
        "clip_low": params["epsilon_low"],
        "clip_high": params["epsilon_high"],
        "correction_bounds": UNBOUNDED,  # TRL was given ratios that it had capped before
    }
    if params["loss_type"] == "cispo":  # TRL names the largest weight itself, and has no lower bound
        return CISPO(**shared | {"clip_low": 1.0, "clip_high": params["epsilon_high"] - 1})
    make = GSPO if params["importance_sampling_level"] == "sequence" else GRPO
    return make(**shared, dual_clip=params["delta"])


def test_trl_grpo_loss(data_dir: Path):
    ledger = Ledger(data_dir, "trl_grpo_loss")
    for case in ledger:
        params, inputs, outputs = case["params"], case["inputs"], case["outputs"]
        if params["loss_type"] in NOT_OFFERED:
            ledger.enter(case, f"not offered: {NOT_OFFERED[params['loss_type']]}")
            continue
        logprobs, old, mask, advantages = inputs_of(
            case, "per_token_logps", "old_per_token_logps", "completion_mask", "advantages"
        )
        if "tool_mask" in inputs:
            mask = mask * tensor(inputs["tool_mask"])
        ratio = tensor(inputs["importance_sampling_ratio"]) if params.get("vllm_is") else None
        reference = tensor(inputs["ref_per_token_logps"]) if params.get("beta") else None
        algorithm = trl_algorithm(params)
        length = params.get("max_completion_length", 1)
        weights = weights_of(mask, algorithm.aggregation, length=length)
        loss, gradient, _ = loss_of(
            algorithm,
            mask,
            logprobs,
            old,
            advantages,
            rollout=None if ratio is None else old - ratio.expand_as(old).log(),
            reference=reference,
            weights=weights,
        )
        # TRL's means over rows count rows without a token; a rollout without a sampled token is none of ours.
        factor = counts_empty_rows(mask) if params["loss_type"] in ("grpo", "dr_grpo") else 1.0
        theirs = tensor(outputs["grad_per_token_logps"]) * factor
        close(loss, tensor(outputs["loss"]) * factor, ledger.rtol)
        differs = [] if factor == 1.0 else ["rows without a token are no rollouts"]
        if reference is not None:
            # On purpose: k3 has the gradient of k2, that of the reverse KL; TRL's is that of the forward KL.
            distance = logprobs - reference
            theirs = theirs + params["beta"] * grid(weights.tolist(), mask) * (distance - 1 + (-distance).exp())
            differs.append("k3 is straight-through")
        if isinstance(algorithm, GSPO) and ratio is not None:
            # On purpose: each token has its own gradient and correction (eq. 14); TRL spreads a call's evenly.
            gradient, theirs = gradient.sum(1), theirs.sum(1)
            differs.append("the token form of GSPO")
        close(gradient, theirs, ledger.rtol)
        ledger.enter(case, f"differs: {', '.join(differs)}" if differs else "equal")
    ledger.closes(equal=138, differs=42, not_offered=72)


def verl_weights(params: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """Our shares for verl's ways to add up."""
    rows = int(mask.bool().any(1).sum())
    match params["loss_agg_mode"]:
        case "token-mean":
            return weights_of(mask, "token")
        case "token-sum":
            return weights_of(mask, "constant", rollouts=1)
        case "seq-mean-token-sum":
            return weights_of(mask, "constant", rollouts=rows)
        case "seq-mean-token-sum-norm":
            return weights_of(mask, "constant", rollouts=rows, length=mask.shape[1])
        case other:
            assert other == "seq-mean-token-mean"
            return weights_of(mask, "rollout")


def test_verl_policy_loss(data_dir: Path):
    ledger = Ledger(data_dir, "verl_policy_loss")
    for case in ledger:
        kind, params, outputs = case["fn"], case["params"], case["outputs"]
        if kind in NOT_OFFERED:
            ledger.enter(case, f"not offered: {NOT_OFFERED[kind]}")
            continue
        clips: dict[str, Any] = {"clip_low": params["clip_ratio_low"], "clip_high": params["clip_ratio_high"]}
        algorithm: PolicyGradient
        match kind:
            case "vanilla":
                algorithm = GRPO(**clips, dual_clip=params["clip_ratio_c"], correction_bounds=UNBOUNDED)
            case "gspo":
                algorithm = GSPO(**clips, correction_bounds=UNBOUNDED)
            case "cispo":
                algorithm = CISPO(**clips, correction_bounds=UNBOUNDED)
            case other:  # GPG is the plain policy gradient: CISPO whose weight is always 1
                assert other == "gpg"
                algorithm = CISPO(clip_low=0, clip_high=0, correction_bounds=UNBOUNDED)
        logprobs, old, advantages, mask = inputs_of(case, "log_prob", "old_log_prob", "advantages", "response_mask")
        given = case["inputs"].get("rollout_is_weights")
        rollout = None if given is None else old - tensor(given).log()
        loss, gradient, _ = loss_of(
            algorithm, mask, logprobs, old, advantages, rollout=rollout, weights=verl_weights(params, mask)
        )
        close(loss, outputs["loss"], ledger.rtol)
        close(gradient, tensor(outputs["grad_log_prob"]), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=132, not_offered=48)


def test_openrlhf_policy_loss(data_dir: Path):
    ledger = Ledger(data_dir, "openrlhf_policy_loss")
    for case in ledger:
        params, outputs = case["params"], case["outputs"]
        level, mode, gate = (params[f"is_correction_{name}"] for name in ("level", "mode", "gating"))
        if gate != "ratio":
            ledger.enter(case, f"not offered: a mask by {gate} of single tokens; icepop and geometric bound the ratio")
            continue
        corrections: dict[tuple[str, str], Correction] = {
            ("off", "mask"): "none",
            ("token", "clip"): "token",
            ("token", "mask"): "icepop",
            ("seq", "mask"): "geometric",
        }
        correction = corrections[level, mode]
        make = GSPO if case["fn"] == "gspo" else GRPO
        algorithm = make(
            clip_low=params["clip_eps_low"],
            clip_high=params["clip_eps_high"],
            dual_clip=params["dual_clip"],
            correction=correction,
            correction_bounds=None if correction == "none" else tuple(params["is_correction_threshold"]),
            aggregation="token" if params["token_level_loss"] and case["fn"] != "gspo" else "rollout",
        )
        logprobs, old, rollout, advantages, mask = inputs_of(
            case, "log_probs", "old_log_probs", "rollout_log_probs", "advantages", "action_mask"
        )
        loss, gradient, _ = loss_of(algorithm, mask, logprobs, old, advantages, rollout=rollout)
        factor = 1.0 if algorithm.aggregation == "token" else counts_empty_rows(mask)
        ours, theirs = gradient / factor, tensor(outputs["grad_log_probs"])
        if case["fn"] == "gspo":  # on purpose: the token form (eq. 14), each token with its own advantage
            ours, theirs = ours.sum(1), theirs.sum(1)
        if correction == "geometric":
            # On purpose: ours keeps or drops a call; theirs also multiplies what it keeps by the bare token weight.
            ours = ours * (old - rollout).exp()
        else:
            close(loss, factor * outputs["loss"], ledger.rtol)
        close(ours, theirs, ledger.rtol)
        reason = "the geometric mask has no weights" if correction == "geometric" else ""
        reason = reason or ("the token form of GSPO" if case["fn"] == "gspo" else "")
        reason = reason or ("rows without a token are no rollouts" if factor != 1.0 else "")
        ledger.enter(case, f"differs: {reason}" if reason else "equal")
    ledger.closes(equal=72, differs=36, not_offered=48)


# ---------------------------------------------------------------------------------------------------------- KL


def test_verl_kl(data_dir: Path):
    ledger = Ledger(data_dir, "verl_kl")
    for case in ledger:
        logprob, reference, mask = inputs_of(case, "logprob", "ref_logprob", "mask")
        value, gradient = tensor(case["outputs"]["value"]), tensor(case["outputs"]["grad_of_masked_sum"])
        distance = logprob - reference
        if case["fn"] == "abs":
            close(value, distance.abs(), ledger.rtol)
            ledger.enter(case, "not offered: |d| estimates no KL, in value or in gradient")
            continue
        estimator: Any = case["fn"][:2]
        variable = logprob.clone().requires_grad_()
        ours = kl_divergence(variable, reference, estimator)
        (ours * mask).sum().backward()
        assert variable.grad is not None
        bounded = (
            ours.clamp(-10, 10) if estimator == "k3" else ours
        )  # verl bounds k3, ours leaves it to the gradient clip
        close(bounded, value, ledger.rtol)
        close(variable.grad, distance * mask, ledger.rtol)
        if case["fn"] in ("k2", "k1+", "k3+"):
            close(variable.grad, gradient, ledger.rtol)
            ledger.enter(case)
        else:  # as terms of a loss these pull elsewhere: k1 nowhere in expectation, k3 along the forward KL
            assert not torch.allclose(variable.grad, gradient)
            wanted = mask if estimator == "k1" else mask * (1 - (-distance).exp()) * (value.abs() < 10)
            close(gradient, wanted, ledger.rtol)
            ledger.enter(case, f"differs: {estimator} has the gradient of k2")
    ledger.closes(equal=18, differs=12, not_offered=6)


def test_openrlhf_kl(data_dir: Path):
    """Its plain k1 and k3 differ as verl's do; its unbiased form is our ``kl_unbiased``, whatever the estimator."""
    ledger = Ledger(data_dir, "openrlhf_kl")
    rtol = 1e-4  # computed in float32 by the peer
    for case in ledger:
        logprobs, base, old, mask = inputs_of(case, "log_probs", "log_probs_base", "log_probs_old", "mask")
        theirs = tensor(case["outputs"]["grad_of_masked_sum"])
        estimator = case["fn"]
        distance = logprobs - base
        inside = distance.abs() < 10  # it bounds values at 10, and with them the gradient
        close(
            tensor(case["outputs"]["value"])[inside],
            kl_divergence(logprobs, base, estimator)[inside].clamp(-10, 10),
            rtol,
            1e-5,
        )
        unbiased = case["params"]["unbiased_gradient"]
        in_loss = {"kl_coef": 1.0, "kl_estimator": "k2" if estimator == "k1" else estimator, "kl_unbiased": unbiased}
        zero = torch.zeros_like(mask)
        ones = torch.ones(int(mask.sum()), dtype=mask.dtype)
        _, ours, _ = loss_of(GRPO(**in_loss), mask, logprobs, old, zero, reference=base, weights=ones)
        inside = inside & mask.bool()
        close(ours[inside], (distance * ((logprobs - old).exp() if unbiased else 1))[inside], 1e-9)
        if unbiased or estimator == "k2":
            close(ours[inside], theirs[inside], rtol, 1e-4)
        else:
            wanted = torch.ones_like(mask) if estimator == "k1" else 1 - (-distance).exp()
            close(theirs[inside & (distance > -2)], wanted[inside & (distance > -2)], rtol, 1e-4)
        bounded = bool((~inside & mask.bool()).any())
        same = (unbiased or estimator == "k2") and not bounded
        ledger.enter(case, "equal" if same else f"differs: {estimator} has the gradient of k2, without a bound")
    ledger.closes(equal=20, differs=16)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_either_estimator_is_that_of_the_reverse_kl(estimator: Any):
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


def test_unbiased_kl_has_the_right_gradient_under_samples_of_an_older_policy():
    """``E_old[ratio d grad log pi]`` is the gradient of the KL; without the ratio it is another one."""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    older = torch.tensor([0.1, 0.6, -0.4], dtype=torch.float64).log_softmax(-1)
    reference = torch.tensor([-0.2, 0.4, 0.3], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 3, dtype=torch.float64)
    found = {}
    for unbiased in (True, False):
        algorithm = GRPO(kl_coef=1.0, kl_unbiased=unbiased)
        _, per_logprob, _ = loss_of(
            algorithm,
            mask,
            logprobs.detach()[None],
            older[None],
            0 * mask,
            reference=reference[None],
            weights=older.exp(),
        )
        (found[unbiased],) = torch.autograd.grad(logprobs, logits, per_logprob[0], retain_graph=True)
    close(found[True], wanted, 1e-12, 1e-15)
    assert float((found[False] - wanted).abs().max()) > 1e-2


# --------------------------------------------------------------------------------------------------- corrections


def corrected(kind: Correction, case: Mapping[str, Any], bounds: tuple[float, float] | None = None) -> torch.Tensor:
    """The correction of each token on its grid."""
    log_ratio, mask = inputs_of(case, "log_ratio", "response_mask")
    sampled = mask.bool()
    weights, _ = correction_weights(kind, log_ratio[sampled], sampled.nonzero()[:, 0], bounds)
    return grid(weights.tolist(), mask)


def test_verl_rollout_is(data_dir: Path):
    ledger = Ledger(data_dir, "verl_rollout_is")
    for case in ledger:
        params, (mask,) = case["params"], inputs_of(case, "response_mask")
        threshold = params["rollout_is_threshold"]
        two_sided = isinstance(threshold, str)  # verl: with two thresholds, 0 outside instead of a cap
        bounds = tuple(map(float, threshold.split("_"))) if two_sided else (0.0, threshold)
        kinds: dict[tuple[str, bool], Correction] = {
            ("token", False): "token",
            ("token", True): "icepop",
            ("sequence", False): "sequence",
            ("sequence", True): "sequence_mask",
        }
        ours = corrected(kinds[case["fn"], two_sided], case, bounds)
        theirs = tensor(case["outputs"]["weights"]) * mask
        if not params["rollout_is_batch_normalize"]:
            close(ours, theirs, ledger.rtol)
            ledger.enter(case)
            continue
        # On purpose not offered: a mean of 1 over the micro-batch makes a token's weight depend on its neighbours.
        quotient = (ours / theirs)[theirs > 0]
        close(quotient, quotient[:1].expand_as(quotient), ledger.rtol)
        ledger.enter(case, "differs: our weights are not divided by their mean over the batch")
    ledger.closes(equal=24, differs=24)


def interval(threshold: float, statistic: Any) -> tuple[float, float]:
    """The ratios whose statistic stays below a threshold, found by bisection on either side of 1."""

    def edge(outer: float) -> float:
        inner = 0.0
        for _ in range(200):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if statistic(middle) <= threshold else (inner, middle)
        return math.exp(inner)

    return edge(-15.0), edge(15.0)


def test_verl_rollout_rs(data_dir: Path):
    """Masks by k1, k2 or k3 of a token or a call are bounds of the ratio; verl's ratio is the inverse of ours."""
    ledger = Ledger(data_dir, "verl_rollout_rs")
    for case in ledger:
        kind, threshold = case["fn"], case["params"]["rollout_rs_threshold"]
        kinds: dict[str, Correction] = {"token": "icepop", "seq_sum": "sequence_mask", "seq_mean": "geometric"}
        level, _, statistic = kind.rpartition("_")
        if level not in kinds or (statistic != "k1" and level != "token"):
            ledger.enter(
                case, "not offered: a mask by the worst token, or by summed k3; bounds of the ratio do that job"
            )
            continue
        if statistic == "k1":
            low, high = map(float, threshold.split("_"))
            bounds = (1 / high, 1 / low)
        elif statistic == "k2":
            bounds = interval(float(threshold), lambda x: x * x / 2)
        else:  # of log(rollout / old) = -x
            bounds = interval(float(threshold), lambda x: math.exp(x) - 1 - x)
        kept = (corrected(kinds[level], case, bounds) > 0).double()
        close(kept, tensor(case["outputs"]["mask"]) * inputs_mask(case), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=30, not_offered=24)


def inputs_mask(case: Mapping[str, Any]) -> torch.Tensor:
    return tensor(case["inputs"]["response_mask"])


def test_verl_offpolicy_metrics(data_dir: Path):
    """We log the k3 of the mismatch, averaged as the loss is; the others follow from the recorded logprobs."""
    ledger = Ledger(data_dir, "verl_offpolicy_metrics")
    for case in ledger:
        old, rollout, mask = inputs_of(case, "old_log_prob", "rollout_log_prob", "response_mask")
        _, _, metrics = loss_of(GRPO(aggregation="token"), mask, old, old, 0 * mask, rollout=rollout)
        close(metrics["mismatch_kl"], case["outputs"]["k3_kl"], ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=6)


def test_trl_off_policy_mask(data_dir: Path):
    ledger = Ledger(data_dir, "trl_off_policy_mask")
    for case in ledger:
        advantages, logprobs, sampling, mask = inputs_of(
            case, "advantages", "per_token_logps", "sampling_per_token_logps", "mask"
        )
        algorithm = CISPO(
            clip_low=0,
            clip_high=0,
            correction="none",
            off_policy_threshold=case["params"]["threshold"],
            aggregation="token",
        )
        _, gradient, _ = loss_of(algorithm, mask, logprobs, logprobs, advantages, rollout=sampling)
        plain = -advantages[:, None] * mask / mask.sum()
        close(gradient, plain * tensor(case["outputs"]["keep"]), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=6)


# -------------------------------------------------------------------------------------------------------- critic


def test_verl_value_loss(data_dir: Path):
    ledger = Ledger(data_dir, "verl_value_loss")
    for case in ledger:
        values, returns, old, mask = inputs_of(case, "vpreds", "returns", "values", "response_mask")
        sampled = mask.bool()
        variable = values.clone().requires_grad_()
        clip = case["params"]["cliprange_value"]
        errors, clipped = value_loss(variable[sampled], old[sampled], returns[sampled], clip)
        loss = (verl_weights(case["params"], mask) * errors).sum()
        loss.backward()
        close(loss, case["outputs"]["loss"], ledger.rtol)
        close(clipped.double().mean(), case["outputs"]["clipfrac"], ledger.rtol, 1e-8)
        close(variable.grad, tensor(case["outputs"]["grad"]), ledger.rtol)
        ledger.enter(case)
    ledger.closes(equal=12)

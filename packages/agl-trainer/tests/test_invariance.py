"""How tokens are laid out does not change a step's gradient: 1e-9 in float64, 1e-4 in float32 (DESIGN §7)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from agl.protocols import LossInputs
from agl.records import Reward, Rollout, Row, Task, Transition
from agl.transitions import build_rows
from agl_trainer import attention
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.batch import build
from agl_trainer.batch.build import Scored, train_rows
from agl_trainer.batch.pack import MicroBatch, TrainRow, collate, micro_batches
from agl_trainer.batch.tree import depth_first, subtrees
from agl_trainer.batch.weights import Aggregation
from agl_trainer.logprobs import LogprobModel

from .conftest import relative, transition

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF = 0.5


@pytest.fixture(scope="session")
def exact() -> LogprobModel:
    """A tiny model that computes in float64 throughout; Llama's norm goes through float32 whatever the precision."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return LogprobModel(
        AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention.register()).eval()
    )


@pytest.fixture(scope="session")
def llama(model_folder: Path) -> LogprobModel:
    """The tiny Llama in float32, its weights scaled so that not all tokens are equally likely."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=attention.register()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return LogprobModel(model)


@pytest.fixture(scope="session", params=["float64", "float32"])
def module(request: pytest.FixtureRequest, exact: LogprobModel, llama: LogprobModel) -> LogprobModel:
    """A model of either precision."""
    return exact if request.param == "float64" else llama


def dtype_of(module: LogprobModel) -> torch.dtype:
    return next(module.parameters()).dtype


def logprobs_of(module: LogprobModel, batch: MicroBatch) -> torch.Tensor:
    return module(
        batch.token_ids, batch.position_ids, batch.ends, batch.sources, batch.targets, batch.temperatures
    ).logprobs


def loss_of(module: LogprobModel, batches: Sequence[MicroBatch], algorithm: GRPO) -> torch.Tensor:
    """The loss of a step; the constants of each token come from its logprob, so that they travel with it."""
    total = torch.zeros((), dtype=dtype_of(module))
    for batch in batches:
        logprobs = logprobs_of(module, batch)
        dtype = logprobs.dtype
        loss, _ = algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=batch.rollout_logprobs.to(dtype) + 0.1,
                rollout_logprobs=batch.rollout_logprobs.to(dtype),
                advantages=batch.advantages.to(dtype),
                weights=batch.weights.to(dtype),
                calls=batch.calls,
                ref_logprobs=1.1 * batch.rollout_logprobs.to(dtype),
            )
        )
        total = total + loss
    return total


def gradient_of(module: LogprobModel, batches: Sequence[MicroBatch], algorithm: GRPO | None = None) -> torch.Tensor:
    module.zero_grad()
    for batch in batches:  # one backward pass for each micro-batch, as in training
        loss_of(module, [batch], algorithm or GRPO(kl_coef=0.1)).backward()
    return torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])


# ------------------------------------------------------------------------------------------------------ a step


def conversation(order: random.Random, rollout: str, temperature: float) -> list[Transition]:
    """Three turns that extend one another, a fork off the second prompt, and another choice of the same prompt."""

    def tokens(count: int) -> list[int]:
        return [order.randrange(3, 250) for _ in range(count)]

    def turn(prompt: list[int], size: int) -> Transition:
        logprobs = tuple(order.uniform(-6, -5) for _ in range(size))
        return transition(prompt, tokens(size), rollout, logprobs=logprobs, temperature=temperature)

    first = turn(tokens(6), 4)
    second = turn([*first.prompt_ids, *first.response_ids, *tokens(3)], 5)
    third = turn([*second.prompt_ids, *second.response_ids, *tokens(2)], 3)
    sibling = turn(list(second.prompt_ids), 6)
    healed = list(second.prompt_ids)
    healed[7] += 1  # inside the first answer, as a template that rewrites history would
    return [first, second, third, sibling, turn(healed, 2)]


def scored_step(temperature: float = 1.0) -> tuple[list[Scored], list[list[float]]]:
    """Four rollouts with conversations of different lengths, and an advantage for each transition."""
    order = random.Random(1)
    step: list[Scored] = []
    gains: list[list[float]] = []
    for name, size in (("a", 5), ("b", 3), ("c", 1), ("d", 4)):
        task = Task(id="t", data={})
        rollout = Rollout(id=name, task=task, batch="b", outcome="ok", returned=Reward.of(1.0))
        step.append(Scored(rollout, conversation(order, name, temperature)[:size]))
        gains.append([order.uniform(-1, 1)] * size)
    return step, gains


def rows_of(aggregation: Aggregation = "rollout", temperature: float = 1.0) -> list[TrainRow]:
    step, gains = scored_step(temperature)
    return train_rows(step, gains, GRPO(aggregation=aggregation), 512)


def split(transitions: Sequence[Transition]) -> list[Row]:
    """Every transition a row of its own: no merging."""
    rows: list[Row] = []
    for index, one in enumerate(transitions):
        (row,) = build_rows([one])
        rows.append(replace(row, transitions=tuple(index if place == 0 else -1 for place in row.transitions)))
    return rows


# ------------------------------------------------------------------------------------------------- invariances


def test_merging_makes_fewer_rows_of_the_same_sampled_tokens(monkeypatch: pytest.MonkeyPatch):
    merged = rows_of()
    monkeypatch.setattr(build, "build_rows", split)
    apart = rows_of()
    assert len(merged) == 3 + 1 + 1 + 2 and len(apart) == 5 + 3 + 1 + 4
    assert sum(sum(item.row.sampled) for item in merged) == sum(sum(item.row.sampled) for item in apart)
    assert sum(sum(item.weights) for item in merged) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("temperature", [1.0, HALF])
@pytest.mark.parametrize("aggregation", ["rollout", "token"])
def test_splitting_rollouts_into_rows_leaves_the_gradient(
    module: LogprobModel, monkeypatch: pytest.MonkeyPatch, aggregation: Aggregation, temperature: float
):
    merged = gradient_of(module, list(micro_batches(rows_of(aggregation, temperature), 10_000)))
    monkeypatch.setattr(build, "build_rows", split)
    apart = gradient_of(module, list(micro_batches(rows_of(aggregation, temperature), 10_000)))
    assert relative(apart, merged) < TOLERANCE[dtype_of(module)]


def tree(rows: list[TrainRow], budget: int) -> list[MicroBatch]:
    """The layout that shares prefixes, cut into micro-batches as if all tokens cost the same."""
    stretches = subtrees(depth_first(rows), budget, lambda length, shared: length - shared, 1.0)
    return [collate([stretch]) for stretch in stretches]


LAYOUTS: dict[str, Callable[[list[TrainRow]], list[MicroBatch]]] = {
    "one row at a time": lambda rows: list(micro_batches(rows, 1, packed=False)),
    "small micro-batches": lambda rows: list(micro_batches(rows, 60)),
    "padded, not packed": lambda rows: list(micro_batches(rows, 10_000, packed=False)),
    "rows reversed": lambda rows: list(micro_batches(rows[::-1], 90)),
    "tree": lambda rows: tree(rows, 10_000),
    "tree in small micro-batches": lambda rows: tree(rows, 50),
    "tree cut into rows": lambda rows: tree(rows, 1),
    "rows shuffled": lambda rows: list(micro_batches(random.Random(3).sample(rows, len(rows)), 10_000)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_rows_leaves_the_gradient(module: LogprobModel, layout: str):
    rows = rows_of()
    packed = list(micro_batches(rows, 10_000))
    other = LAYOUTS[layout](rows)
    assert sum(len(batch.targets) for batch in other) == len(packed[0].targets)
    assert relative(gradient_of(module, other), gradient_of(module, packed)) < TOLERANCE[dtype_of(module)]


def test_more_padding_leaves_the_gradient(module: LogprobModel):
    rows = rows_of()
    long = transition(range(3, 203), [9], "long")
    (row,) = build_rows([long])
    silent = TrainRow(row, [0.0], [0.0])  # weighs nothing; it only makes every line wider
    padded = list(micro_batches([*rows, silent], 100_000, packed=False))
    assert padded[0].token_ids.shape[1] == 201
    wanted = gradient_of(module, list(micro_batches(rows, 10_000)))
    assert relative(gradient_of(module, padded), wanted) < TOLERANCE[dtype_of(module)]


def test_rows_without_advantage_may_be_left_out_when_there_is_no_kl(module: LogprobModel):
    step, gains = scored_step()
    gains[1] = [0.0] * len(gains[1])
    batches = [list(micro_batches(train_rows(step, gains, GRPO(kl_coef=pull), 512), 10_000)) for pull in (0.1, 0.0)]
    assert len(batches[0][0].targets) > len(batches[1][0].targets)
    kept, dropped = (gradient_of(module, batch, GRPO()) for batch in batches)
    assert relative(dropped, kept) < TOLERANCE[dtype_of(module)]


# ----------------------------------------------------------------------------------------------------- logprobs


def alone(module: LogprobModel, row: Row) -> torch.Tensor:
    (batch,) = micro_batches([TrainRow(row, [0.0] * sum(row.sampled), [0.0] * sum(row.sampled))], 1)
    with torch.no_grad():
        return logprobs_of(module, batch)


def test_a_merged_row_has_the_logprobs_of_each_call_alone(module: LogprobModel):
    transitions = conversation(random.Random(5), "r", 0.7)[:3]
    (merged,) = build_rows(transitions)
    parts = torch.cat([alone(module, row) for row in split(transitions)])
    torch.testing.assert_close(alone(module, merged), parts, rtol=0, atol=TOLERANCE[dtype_of(module)])


def test_packed_rows_do_not_see_each_other(module: LogprobModel):
    first, second = (conversation(random.Random(seed), str(seed), 1.0)[0] for seed in (1, 2))
    third = replace(second, prompt_ids=tuple(token + 1 for token in second.prompt_ids))
    items = [TrainRow(build_rows([one])[0], [0.0] * 4, [0.0] * 4) for one in (first, second, third)]
    filler = TrainRow(build_rows([transition(range(3, 43), [7])])[0], [0.0], [0.0])
    with torch.no_grad():
        together, changed = (
            logprobs_of(module, next(micro_batches([filler, items[0], other], 82))) for other in items[1:]
        )
    # Two rows share the second line. Changing one of them changes nothing for its neighbour.
    assert torch.equal(together[:5], changed[:5])
    assert not torch.equal(together[5:], changed[5:])
    torch.testing.assert_close(
        together[1:5], alone(module, items[0].row), rtol=0, atol=TOLERANCE[dtype_of(module)] * 10
    )


@pytest.mark.parametrize("temperature", [HALF, 1.0, 1.7])
def test_the_logprobs_are_those_of_the_model_at_the_position_before(exact: LogprobModel, temperature: float):
    """One place too far is the oldest mistake of the trade (eval-protocol#457)."""
    one = conversation(random.Random(8), "r", temperature)[0]
    (row,) = build_rows([one])
    with torch.no_grad():
        logits = exact.model(torch.tensor([row.token_ids])).logits[0]
    table = (logits / temperature).log_softmax(-1)
    start = len(one.prompt_ids)
    wanted = torch.stack([table[start - 1 + place, token] for place, token in enumerate(one.response_ids)])
    torch.testing.assert_close(alone(exact, row), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [HALF, 1.0, 1.7])
def test_on_policy_the_ratio_is_one_at_any_temperature(exact: LogprobModel, temperature: float):
    """trl#4159: logprobs from before the temperature made it 2 at 0.6."""
    one = conversation(random.Random(8), "r", temperature)[0]
    sampled = alone(exact, build_rows([one])[0])  # what a sampler that tells processed logprobs would report
    on_policy = build_rows([replace(one, logprobs=tuple(sampled.tolist()))])[0]
    (batch,) = micro_batches([TrainRow(on_policy, [1.0] * 4, [0.25] * 4)], 1)
    logprobs = logprobs_of(exact, batch)
    ratio = (logprobs - batch.rollout_logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-9, atol=0)
    inputs = LossInputs(
        logprobs, logprobs.detach(), batch.rollout_logprobs, batch.advantages, batch.weights, batch.calls
    )
    loss, metrics = GRPO().loss(inputs)
    assert float(loss.detach()) == pytest.approx(-1.0, rel=1e-9)
    assert float(metrics["mismatch_kl"]) == pytest.approx(0.0, abs=1e-12)
    assert float(metrics["clipped"]) == float(metrics["corrected"]) == 0.0


# ----------------------------------------------------------------------------------------- is it the derivative?


@pytest.mark.parametrize("aggregation", ["rollout", "token"])
def test_the_gradient_is_the_derivative_of_the_loss(exact: LogprobModel, aggregation: Aggregation):
    batches = list(micro_batches(rows_of(aggregation, HALF), 60))
    algorithm = GRPO(kl_coef=0.1, kl_estimator="k2")
    module: Any = exact
    gradient = gradient_of(module, batches, algorithm)
    parameters = [p for p in module.parameters() if p.grad is not None]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    slope = float(gradient @ torch.cat([d.reshape(-1) for d in directions]))
    step = 1e-7

    def moved(sign: int) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
            loss = float(loss_of(module, batches, algorithm))
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.sub_(direction, alpha=sign * step)
        return loss

    assert (moved(1) - moved(-1)) / (2 * step) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("length", [1, 7])
def test_grouped_attention_equals_repeated_keys_and_values(length: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 6, length, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(2, 1, length, 9) < 0.6
    mask[..., 0] = True
    ours, _ = attention.grouped_attention(torch.nn.Identity(), query, key, value, mask)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=mask
    ).transpose(1, 2)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), (query, key, value)),
        torch.autograd.grad(plain.square().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)

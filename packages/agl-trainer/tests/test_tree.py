"""Prefix trees: every unique token once, and the same logprobs and gradients as one row at a time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from agl.errors import BackendError
from agl.records import Row
from agl_trainer import attention, spans
from agl_trainer.batch import layout
from agl_trainer.batch.layout import Cost, Layout
from agl_trainer.batch.pack import MicroBatch, TrainRow, micro_batches
from agl_trainer.batch.tree import depth_first, subtrees
from agl_trainer.logprobs import LogprobModel

from .conftest import relative

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SIZES),
    "SmolLM": LlamaConfig(**{**SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "SmolLM3": SmolLM3Config(**SIZES),
    "Qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SIZES, head_dim=8),
}
PRECISIONS = {torch.float64: 1e-9, torch.float32: 1e-4}


def build(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A random model. In float64 its norms, which go through float32 whatever the precision, are kept exact."""
    torch.manual_seed(0)
    chosen = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(chosen, dtype=dtype, attn_implementation=attention.register()).eval()
    if dtype == torch.float64:
        for part in model.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = exact_norm(part)
    return model


def exact_norm(part: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: part.weight * x * (x.square().mean(-1, keepdim=True) + part.variance_epsilon).rsqrt()


def row(tokens: Sequence[int], sampled: Sequence[bool], rollout: str, temperature: float = 1.0) -> TrainRow:
    """A row whose first token is observed; each stretch of sampled tokens is a call."""
    marks = (False, *(bool(one) for one in sampled[1:]))
    calls: list[int] = []
    call = -1
    for place, mark in enumerate(marks):
        call += mark and not marks[place - 1]
        calls.append(call if mark else -1)
    count = sum(marks)
    return TrainRow(
        Row(
            rollout=rollout,
            agent="main",
            token_ids=tuple(tokens),
            sampled=marks,
            logprobs=tuple(-1.0 if mark else 0.0 for mark in marks),
            temperatures=(temperature,) * len(marks),
            transitions=tuple(calls),
        ),
        [0.5 + place for place in range(count)],
        [0.1 * (1 + int(rollout))] * count,
    )


def outputs(module: LogprobModel, batch: MicroBatch) -> torch.Tensor:
    return module(
        batch.token_ids, batch.position_ids, batch.ends, batch.sources, batch.targets, batch.temperatures
    ).logprobs


def learned(module: LogprobModel, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """All logprobs in the order of the step, and the gradient of a loss that bends them."""
    module.zero_grad()
    found = torch.zeros(sum(len(batch.index) for batch in batches), dtype=torch.float64)
    for batch in batches:
        logprobs = outputs(module, batch)
        found[batch.index] = logprobs.detach().double()
        if len(logprobs):
            (logprobs.exp() * batch.advantages * batch.weights).sum().backward()
    gradient = [p.grad.reshape(-1) for p in module.parameters() if p.grad is not None]
    return found, torch.cat(gradient) if gradient else torch.zeros(1)


def unique_tokens(rows: Sequence[TrainRow]) -> int:
    return len({item.row.token_ids[: end + 1] for item in rows for end in range(len(item.row.token_ids))})


def grow() -> list[TrainRow]:
    """Two tasks below one system prompt, forks in the middle of an answer, equal samples, and a row inside another."""
    system, first, second = [9, 8, 7, 6], [20, 21, 22], [30, 31]
    answers = [
        (system + first + [40, 41, 42, 43], 7, "0"),
        (system + first + [40, 41, 50, 51], 7, "1"),  # sampled the same two tokens, then others
        (system + first + [40, 41, 42, 43], 7, "2"),  # sampled all the same
        (system + first + [40, 41], 7, "3"),  # a row inside others
        (system + first + [40, 41, 42, 43, 12, 13, 14, 15], 9, "4"),  # its prompt holds what others sampled
        (system + second + [40, 41, 42], 6, "5"),
        (system + second + [45], 6, "6"),
        ([3, 4, 5], 1, "7"),  # shares nothing
    ]
    return [
        row(tokens, [place >= start for place in range(len(tokens))], rollout, 0.5 if rollout == "1" else 1.0)
        for tokens, start, rollout in answers
    ]


# --------------------------------------------------------------------------------------------- equal to unshared


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("budget", [1000, 18, 1])
def test_a_tree_learns_what_its_rows_teach_one_at_a_time(name: str, dtype: torch.dtype, budget: int):
    model = build(ARCHITECTURES[name], dtype)
    module = LogprobModel(model)
    rows = grow()
    shared = layout.micro_batches(rows, budget, "tree", model)
    logprobs, gradient = learned(module, shared)
    wanted, wanted_gradient = learned(module, list(micro_batches(rows, 1, packed=False)))
    assert relative(logprobs, wanted) < PRECISIONS[dtype]
    assert relative(gradient, wanted_gradient) < PRECISIONS[dtype]
    if budget == 1000:
        assert [batch.token_ids.numel() for batch in shared] == [unique_tokens(rows)]
    assert all(batch.token_ids.numel() <= max(budget, 15) for batch in shared)


@pytest.fixture(scope="module")
def exact() -> LogprobModel:
    return LogprobModel(build(ARCHITECTURES["Llama"], torch.float64))


tokens = st.lists(st.integers(3, 5), min_size=2, max_size=9)  # three letters: rows share much


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(tokens, st.lists(st.booleans(), min_size=9, max_size=9)), min_size=1, max_size=8),
    st.integers(1, 50),
)
def test_any_forest_of_rows_teaches_the_same(
    exact: LogprobModel, drawn: list[tuple[list[int], list[bool]]], budget: int
):
    rows = [row(ids, [True, True, *marks][: len(ids)], str(place)) for place, (ids, marks) in enumerate(drawn)]
    together = layout.micro_batches(rows, 10_000, "tree", exact.model)
    cut = layout.micro_batches(rows, budget, "tree", exact.model)
    logprobs, gradient = learned(exact, list(micro_batches(rows, 1, packed=False)))
    for batches in (together, cut, layout.micro_batches(rows, budget, "packed", exact.model)):
        found, slope = learned(exact, batches)
        assert relative(found, logprobs) < 1e-9
        assert relative(slope, gradient) < 1e-9
    assert [batch.token_ids.numel() for batch in together] == [unique_tokens(rows)]
    longest = max(len(item.row.token_ids) for item in rows)
    assert all(batch.token_ids.numel() <= max(budget, longest) for batch in cut)


def test_a_tree_learns_the_same_with_an_adapter_and_with_recomputed_activations():
    from peft import LoraConfig, get_peft_model

    base = build(ARCHITECTURES["Qwen2"], torch.float64)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    module = LogprobModel(model)
    rows = grow()
    wanted, wanted_gradient = learned(module, list(micro_batches(rows, 1, packed=False)))
    model.train()  # transformers recomputes in training mode only; there is no dropout
    for recompute in (False, True):
        if recompute:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs, gradient = learned(module, layout.micro_batches(rows, 1000, "tree", model))
        assert relative(logprobs, wanted) < 1e-9
        assert relative(gradient, wanted_gradient) < 1e-9


def test_in_bfloat16_a_tree_stays_near_its_rows():
    module = LogprobModel(build(ARCHITECTURES["Llama"], torch.float32))
    rows = grow()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, gradient = learned(module, layout.micro_batches(rows, 1000, "tree", module.model))
    wanted, wanted_gradient = learned(module, list(micro_batches(rows, 1, packed=False)))
    assert relative(logprobs, wanted) < 0.02
    assert relative(gradient, wanted_gradient) < 0.1


# --------------------------------------------------------------------------------------------------- attention


def random_ends(generator: torch.Generator, length: int) -> list[int]:
    """Spans of a random forest."""
    found = [0] * length

    def upto(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    def fill(start: int, stop: int) -> None:
        while start < stop:
            end = upto(start + 1, stop)
            trunk = upto(1, end - start)
            found[start : start + trunk] = [end - 1] * trunk
            fill(start + trunk, end)
            start = end

    fill(0, length)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_runs_and_links_equal_a_dense_mask(dtype: torch.dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    length = 5 + 9 * seed
    ends = torch.tensor([random_ends(generator, length) for _ in range(1 + seed % 3)])
    query, key, value = (
        torch.randn(len(ends), length, heads, 8, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (6, 2, 2)
    )
    flow = torch.randn(len(ends), length, 6, 8, generator=generator, dtype=dtype)
    found, wanted = (
        (out, *torch.autograd.grad((out * flow).sum(), (query, key, value)))
        for out in (way(query, key, value, ends, 0.3) for way in (spans.by_runs, spans.by_mask))
    )
    for one, other in zip(found, wanted, strict=True):
        assert (
            relative(one.detach(), other.detach())
            < {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        )


def test_a_line_falls_into_few_calls():
    """A trunk of 3 with three leaves of 2: one run with the first leaf, two runs of equal length, one link."""
    ends = torch.tensor([[8, 8, 8, 4, 4, 6, 6, 8, 8]])
    work = spans.plan(ends.numpy().tobytes(), 9)
    assert work.runs == [(0, 5, 1), (5, 2, 2)]
    assert work.links == [(5, 9, 0, 3)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_says_the_same():
    """FlexAttention has no backward pass on a CPU, and is not compiled here; its mask is what is tested."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([random_ends(generator, 40) for _ in range(2)])
    query, key, value = (torch.randn(2, heads, 40, 16, generator=generator) for heads in (6, 2, 2))
    found = spans.by_blocks(query, key, value, ends, 0.3)
    torch.testing.assert_close(found, spans.by_mask(query, key, value, ends, 0.3), rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------- models that cannot

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
UNFIT: dict[str, PreTrainedConfig] = {
    "sliding window": MistralConfig(**SIZES, sliding_window=4),
    "ALiBi": BloomConfig(**SMALL, n_layer=2, n_head=2, initializer_range=0.3),
    "state space": MambaConfig(**SMALL, num_hidden_layers=2, state_size=4),
}


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_keep_rows_apart_gets_padded_rows_and_says_so(kind: str, caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    options: dict[str, Any] = {} if kind != "sliding window" else {"attn_implementation": attention.register()}
    model: Any = AutoModelForCausalLM.from_config(UNFIT[kind], dtype=torch.float32, **options).eval()
    with caplog.at_level(logging.WARNING):
        module = LogprobModel(model)
    assert not attention.sees_spans(model)
    assert "rows are padded" in caplog.text and (kind != "sliding window" or "sliding_window=4" in caplog.text)
    rows = grow()
    batches = layout.micro_batches(rows, 1000, "tree", model)
    assert len(batches) == 1 and len(batches[0].token_ids) == len(rows)
    logprobs, gradient = learned(module, batches)
    wanted, wanted_gradient = learned(module, list(micro_batches(rows, 1, packed=False)))
    assert relative(logprobs, wanted) < 1e-4
    assert relative(gradient, wanted_gradient) < 1e-4
    with torch.no_grad():  # and they are the model's own
        item = rows[4]
        table = model(torch.tensor([item.row.token_ids])).logits[0].log_softmax(-1)
    places = [place for place, mark in enumerate(item.row.sampled) if mark]
    own = torch.stack([table[place - 1, item.row.token_ids[place]] for place in places])
    start = sum(sum(other.row.sampled) for other in rows[:4])
    torch.testing.assert_close(logprobs[start : start + len(own)].float(), own, rtol=1e-4, atol=1e-4)
    with pytest.raises(BackendError, match="share a line"):
        learned(module, list(micro_batches(rows, 1000)))


def test_a_model_is_tried_before_it_is_trusted(caplog: pytest.LogCaptureFixture):
    """One that ignores positions passes every look at its configuration."""
    model = build(ARCHITECTURES["Llama"], torch.float32)
    rotary = model.model.rotary_emb
    honest = rotary.forward
    rotary.forward = lambda x, position_ids: honest(x, torch.arange(x.shape[1])[None])
    with caplog.at_level(logging.WARNING):
        assert not attention.sees_spans(model)
    assert "other states" in caplog.text


# ------------------------------------------------------------------------------------------------------- layouts


def chosen(rows: Sequence[TrainRow], budget: int, how: Layout, model: Any) -> int:
    return sum(batch.token_ids.numel() for batch in layout.micro_batches(rows, budget, how, model))


def test_cuts_fall_where_little_is_shared():
    """Two groups of 10 tokens fit two to a micro-batch of 22 only when they are cut between the groups."""
    groups = [[*range(start, start + 6)] for start in (10, 20, 30)]
    rows = [row([*group, tail, tail], [False] * 6 + [True] * 2, "0") for group in groups for tail in (40, 41)]
    stretches = subtrees(depth_first(rows), 22, lambda length, shared: length - shared, 1.0)
    sizes = [sum(len(one.item.row.token_ids) - one.shared for one in stretch) for stretch in stretches]
    assert sizes == [20, 10]


def test_auto_shares_long_prefixes_and_pads_what_is_small_and_even():
    model = build(ARCHITECTURES["Llama"], torch.float32)
    trunk = [3 + place % 50 for place in range(200)]
    family = [row([*trunk, *[10 + leaf] * 8], [place >= 200 for place in range(208)], "0") for leaf in range(8)]
    assert chosen(family, 4000, "auto", model) == 200 + 8 * 8
    strangers = [row([10 + place] * 8, [place > 2 for place in range(8)], "0") for place in range(8)]
    (batch,) = layout.micro_batches(strangers, 4000, "auto", model)
    assert batch.token_ids.shape == (8, 8)


def test_the_cost_knows_the_model_behind_an_adapter():
    from peft import LoraConfig, get_peft_model

    model = build(ARCHITECTURES["Llama"], torch.float32)
    plain = Cost.of(model)
    assert plain.attended == 2 * 24 and plain.layers == 2
    adapted: Any = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert plain.weights < Cost.of(adapted).weights < 1.5 * plain.weights


def test_counts_tell_tokens_asked_computed_and_padding(exact: LogprobModel):
    rows = grow()
    asked = sum(len(item.row.token_ids) for item in rows)
    tree = layout.counts(rows, chosen(rows, 1000, "tree", exact.model))
    assert tree == {"tokens_asked": asked, "tokens_computed": unique_tokens(rows), "padding": 0.0}
    assert layout.counts(rows, chosen(rows, 1000, "packed", exact.model))["padding"] == 0.0
    padded = layout.counts(rows, chosen(rows, 1000, "padded", exact.model))
    assert padded["padding"] == pytest.approx(1 - asked / (15 * len(rows)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
@pytest.mark.parametrize("how", ["auto", "packed"])
def test_ranks_share_all_rows_and_keep_families_together(exact: LogprobModel, how: Layout, ranks: int):
    rows = grow()
    parts = layout.shares(rows, ranks, how, exact.model)
    assert len(parts) == ranks and sorted(place for part in parts for place in part) == [*range(len(rows))]
    assert all(part == sorted(part) for part in parts)
    if how == "auto" and ranks == 2:
        trunk = [3 + place % 50 for place in range(100)]
        families = [row([start, *trunk, leaf], [False] * 101 + [True], "0") for leaf in (7, 8, 9) for start in (3, 4)]
        assert layout.shares(families, 2, how, exact.model) == [[0, 2, 4], [1, 3, 5]]


def test_the_layout_is_a_setting_of_the_run(model_folder: Path):
    from agl_trainer.algorithms.sft import SFT
    from agl_trainer.updates import learn

    from .conftest import new_policy

    rows = grow()
    metrics: dict[str, dict[str, float]] = {}
    for how in ("tree", "packed", "padded"):
        policy = new_policy(model_folder, layout=how)
        metrics[how] = learn(policy, rows, SFT(), policy.config, 1)
        policy.close()
    asked = sum(len(item.row.token_ids) for item in rows)
    computed = {how: found["tokens_computed"] for how, found in metrics.items()}
    assert computed == {"tree": unique_tokens(rows), "packed": asked, "padded": 15 * len(rows)}
    assert metrics["tree"]["grad_norm"] == pytest.approx(metrics["padded"]["grad_norm"], rel=1e-4)

"""An adapter for each agent: each is served, trained, clipped, saved and loaded for its own agent alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import agl
from agl.errors import BackendError, CaptureError, ConfigError
from agl.protocols import LossInputs, Token
from agl.records import Call, Rollout, Step
from agl.transitions import build_rows
from agl_trainer import Trainer, Warmup, updates
from agl_trainer.adapters import folder_name
from agl_trainer.algorithms.grpo import GRPO
from agl_trainer.algorithms.sft import SFT
from agl_trainer.backends.transformers.backend import TransformersBackend
from agl_trainer.batch.pack import TrainRow, micro_batches
from agl_trainer.commands import _instead
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from agl_trainer.services import Services

from .conftest import new_engine, new_policy, row_of, sample, state_of, transition, weights_of

AGENTS: dict[str, Any] = {"adapters": "agent", "lora_rank": 4, "optimize": ["writer", "judge"], "learning_rate": 1e-2}
EXACT = 1e-4
"""Largest difference of a logprob between engine and trainer in float32."""


def rows_of(*agents: str, size: int = 4) -> list[TrainRow]:
    """The same answer to the same prompt by each agent."""
    share = 1.0 / (size * len(agents))
    found: list[TrainRow] = []
    for place, agent in enumerate(agents):
        (row,) = build_rows([transition(range(10, 20), range(30, 30 + size), str(place), agent)])
        found.append(TrainRow(row, [1.0] * size, [share] * size))
    return found


def train(policy: Policy, *agents: str, algorithm: Any = None) -> dict[str, float]:
    return updates.learn(policy, rows_of(*agents), algorithm or SFT(), policy.config, 1)


def answer_logprobs(policy: Policy, agent: str, *, frozen: bool = False) -> torch.Tensor:
    (batch,) = micro_batches(rows_of(agent), 100)
    batch = replace(batch, agent=agent)
    return policy.reference_logprobs(batch) if frozen else policy.logprobs(batch)


def weights_of_agent(policy: Policy, agent: str) -> dict[str, torch.Tensor]:
    """All weights that belong to an agent; "" gives those of nobody, the base."""
    names = list(policy.adapters.of.values()) if policy.adapters else []
    if agent:
        assert policy.adapters is not None
        return {name: w for name, w in weights_of(policy.model).items() if f".{policy.adapters.of[agent]}." in name}
    return {name: w for name, w in weights_of(policy.model).items() if not any(f".{n}." in name for n in names)}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    assert a and a.keys() == b.keys()
    return all(torch.equal(value, b[name]) for name, value in a.items())


# ------------------------------------------------------------------------------------------------------ training


def test_agents_begin_as_the_base_with_weights_that_depend_on_their_name_and_seed(model_folder: Path):
    policy = new_policy(model_folder, **AGENTS)
    base = answer_logprobs(new_policy(model_folder), "")
    for agent in ("writer", "judge", "stranger"):
        torch.testing.assert_close(answer_logprobs(policy, agent), base, rtol=0, atol=1e-6)
    alone = new_policy(model_folder, **{**AGENTS, "optimize": ["judge"]})
    other = new_policy(model_folder, **{**AGENTS, "seed": 1})
    judge = weights_of_agent(policy, "judge")
    assert same(judge, weights_of_agent(alone, "judge")), "whoever stands beside it"
    assert not same(judge, weights_of_agent(other, "judge"))
    drawn = [value for name, value in judge.items() if "lora_A" in name]
    twins = [value for name, value in weights_of_agent(policy, "writer").items() if "lora_A" in name]
    assert not any(torch.equal(a, b) for a, b in zip(drawn, twins, strict=True))


def test_an_agent_without_rows_does_not_move_although_its_optimizer_has_momentum(model_folder: Path):
    policy = new_policy(model_folder, **AGENTS)
    base = weights_of_agent(policy, "")
    both = train(policy, "writer", "judge")
    assert (
        both["agent/writer/loss"] == pytest.approx(both["agent/judge/loss"], rel=1e-3)
        and both["agent/judge/grad_norm"] > 0
    )
    assert both["loss"] == pytest.approx(both["agent/writer/loss"] + both["agent/judge/loss"], rel=1e-6)
    before, writer = weights_of_agent(policy, "judge"), answer_logprobs(policy, "writer")
    for _ in range(2):
        metrics = train(policy, "writer")
    assert metrics["agent/judge/grad_norm"] == 0.0 and metrics["grad_norm"] == metrics["agent/writer/grad_norm"] > 0
    assert same(before, weights_of_agent(policy, "judge"))
    assert float((answer_logprobs(policy, "writer") - writer).sum()) > 0
    assert same(base, weights_of_agent(policy, "")), "and the base never moves"


def test_an_agent_learns_as_if_it_were_alone(model_folder: Path):
    """Same rows with the same weights: what the other does changes nothing, not even through the clip."""
    together, alone = new_policy(model_folder, **AGENTS), new_policy(model_folder, **AGENTS)
    rows = rows_of("writer", "judge")
    loud = TrainRow(rows[1].row, [1000.0] * 4, rows[1].weights)
    for _ in range(3):
        updates.learn(together, [rows[0], loud], GRPO(), together.config, 1)
        updates.learn(alone, [rows[0]], GRPO(), alone.config, 1)
    for name, value in weights_of_agent(alone, "writer").items():
        torch.testing.assert_close(weights_of_agent(together, "writer")[name], value, rtol=0, atol=1e-6)


def test_each_adapters_gradient_is_clipped_by_itself(model_folder: Path):
    """Adam hides the size of one gradient, so look at the first moment: (1 - 0.9) times the clipped gradient."""
    policy = new_policy(model_folder, max_grad_norm=0.01, **AGENTS)
    metrics = train(policy, "writer", "judge")
    assert min(metrics["agent/writer/grad_norm"], metrics["agent/judge/grad_norm"]) > 0.05
    moments = state_of(policy.optimizer)["state"]
    total = torch.stack([state["exp_avg"].square().sum() for state in moments.values()]).sum()
    assert float(total.sqrt()) == pytest.approx(0.1 * 0.01 * 2**0.5, rel=1e-3)


class BrokenJudge:
    """A loss that is NaN in micro-batches of large weight, which are the judge's."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        return list(values)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        factor = float("nan") if float(inputs.weights.max()) > 1 else 1.0
        return -(inputs.logprobs * inputs.weights).sum() * factor, {}


def test_a_gradient_that_is_not_finite_in_one_adapter_refuses_the_whole_step(model_folder: Path):
    policy = new_policy(model_folder, **AGENTS)
    train(policy, "writer", "judge")
    before = weights_of(policy.model)
    writer, judge = rows_of("writer", "judge")
    rows = [writer, TrainRow(judge.row, judge.advantages, [2.0] * 4)]
    metrics = updates.learn(policy, rows, BrokenJudge(), policy.config, 1)  # pyright: ignore[reportArgumentType]
    assert metrics["agent/writer/grad_norm"] > 0 and not metrics["agent/judge/grad_norm"] >= 0
    assert same(before, weights_of(policy.model))


def test_a_micro_batch_holds_one_agents_rows_and_index_counts_all_of_the_step(model_folder: Path):
    policy = new_policy(model_folder, micro_batch_tokens=30, **AGENTS)
    rows = [
        TrainRow(
            build_rows([transition(range(10, 15 + place), range(30, 32 + place % 3), str(place), agent)])[0],
            [float(place)] * (2 + place % 3),
            [0.1] * (2 + place % 3),
        )
        for place, agent in enumerate(["judge", "writer", "judge", "writer", "writer"])
    ]
    expected = [(token, item.advantages[0]) for item in rows for token in range(30, 30 + len(item.advantages))]
    batches = updates.lay_out(policy, rows, policy.config)
    assert len(batches) > 2 and {batch.agent for batch in batches} == {"judge", "writer"}
    found: dict[int, tuple[int, float]] = {}
    for batch in batches:
        for place, token, advantage in zip(batch.index, batch.targets, batch.advantages, strict=True):
            found[int(place)] = (int(token), float(advantage))
    assert [found[place] for place in range(len(expected))] == expected


def test_kl_is_measured_from_each_agents_own_beginning(model_folder: Path):
    settings = {**AGENTS, "algorithm": {"name": "grpo", "kl_coef": 0.5}}
    policy = new_policy(model_folder, **settings)
    train(policy, "writer")
    algorithm = GRPO(kl_coef=0.5)
    metrics = updates.learn(policy, rows_of("judge"), algorithm, policy.config, 1)
    assert metrics["kl"] == 0.0, "the judge has not moved yet, whatever the writer did"
    metrics = updates.learn(policy, rows_of("writer"), algorithm, policy.config, 3)
    assert metrics["kl"] > 0


def test_an_agent_that_has_no_adapter_cannot_learn(model_folder: Path):
    policy = new_policy(model_folder, **AGENTS)
    with pytest.raises(ConfigError, match=r"agents \['critic'\] are to learn and have no adapter.*name them there"):
        train(policy, "writer", "critic")


# ------------------------------------------------------------------------------------------------------- serving


def scramble(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(3)
    with policy.lock, torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
async def test_the_engine_answers_each_agent_from_its_adapter_at_the_same_time(model_folder: Path, precision: str):
    """Same prompts, all at once, more than there are slots: no keys or values may cross over."""
    policy = new_policy(model_folder, precision=precision, **AGENTS)
    engine = new_engine(policy)
    prompts = [[3 + (7 * place * seed) % 250 for place in range(5 + 4 * seed)] for seed in range(6)] * 2
    before = await sample(engine, prompts[3], seed=1, labels={"agent": "stranger"})
    scramble(policy)
    engine.refresh(1)
    who = ["writer", "judge", "stranger"]
    answers = await asyncio.gather(
        *(sample(engine, prompt, max_tokens=12, labels={"agent": agent}) for prompt in prompts for agent in who)
    )
    after = await sample(engine, prompts[3], seed=1, labels={"agent": "stranger"})
    engine.stop()
    assert after == [Token(token.id, token.logprob, 1, token.finish_reason) for token in before], "bit-identical"
    wanted = [(agent, prompt) for prompt in prompts for agent in who]
    exact: list[torch.Tensor] = []
    crossed: list[torch.Tensor] = []
    for (agent, prompt), tokens in zip(wanted, answers, strict=True):
        (batch,) = micro_batches([TrainRow(row_of(prompt, tokens), [0.0] * len(tokens), [0.0] * len(tokens))], 1)
        for asked in who:
            mine = replace(batch, agent=asked)
            found = (policy.logprobs(mine) - batch.rollout_logprobs).abs()
            (exact if asked == agent else crossed).append(found)
    assert float(torch.cat(exact).max()) < EXACT if precision == "float32" else float(torch.cat(exact).mean()) < 0.02
    assert float(torch.cat(crossed).mean()) > 0.1
    assert engine.counters()["reused_tokens"] > 0


# ---------------------------------------------------------------------------------------------- saving and loading

ODD = ["writer", "model", "default", "a", "values", "Triage Agent", "sub/agent:é", "layers", "..", "lora_A"]


def test_adapters_of_odd_names_are_saved_each_by_itself_and_read_by_peft(model_folder: Path, tmp_path: Path):
    policy = new_policy(model_folder, **{**AGENTS, "optimize": ODD})
    scramble(policy)
    policy.save(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "adapters.json").read_text())
    assert list(index["agents"]) == ODD and index["base_model"] == str(model_folder)
    assert index["agents"]["writer"] == "writer" and len(set(index["agents"].values())) == len(ODD)
    assert {path.name for path in (tmp_path / "model").iterdir() if path.is_dir()} == set(index["agents"].values())
    ids = torch.arange(30, 60)[None]
    for agent, folder in index["agents"].items():
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        read = PeftModel.from_pretrained(base, tmp_path / "model" / folder)
        with torch.no_grad(), policy.using(policy.weights_of(agent)):
            torch.testing.assert_close(read(ids).logits, policy.model(ids).logits, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "model" / folder).chat_template == policy.tokenizer.chat_template


@pytest.mark.parametrize(
    ("agent", "folder"),
    [
        ("writer", r"writer"),
        ("a-b_c2", r"a-b_c2"),
        ("Writer", r"Writer-[0-9a-f]{8}"),
        ("../etc/x", r"_etc_x-[0-9a-f]{8}"),
        (".", r"_-[0-9a-f]{8}"),
        ("x" * 80, r"x{48}-[0-9a-f]{8}"),
    ],
)
def test_a_folder_is_named_as_its_agent_where_that_is_a_plain_file_name(agent: str, folder: str):
    assert re.fullmatch(folder, folder_name(agent))


def test_a_saved_folder_is_trained_on_and_its_beginning_stays(model_folder: Path, tmp_path: Path):
    first = new_policy(model_folder, **AGENTS)
    scramble(first)
    first.save(tmp_path / "model")
    policy = new_policy(tmp_path / "model", **{**AGENTS, "optimize": ["writer", "critic"]})
    assert policy.agents == ("writer", "critic")
    start = {agent: answer_logprobs(first, agent) for agent in ("writer", "judge", "critic")}
    for agent, wanted in start.items():
        for frozen in (False, True):
            got = answer_logprobs(policy, agent, frozen=frozen)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    train(policy, "writer", "critic")
    for agent, wanted in start.items():
        assert torch.equal(answer_logprobs(policy, agent), wanted) == (agent == "judge")
        torch.testing.assert_close(answer_logprobs(policy, agent, frozen=True), wanted, rtol=0, atol=1e-6)
    policy.save(tmp_path / "again")
    third = new_policy(tmp_path / "again", **{**AGENTS, "optimize": ["judge"]})
    for agent in ("writer", "judge", "critic"):
        torch.testing.assert_close(answer_logprobs(third, agent), answer_logprobs(policy, agent), rtol=0, atol=1e-6)


def test_one_of_the_adapters_may_be_the_model_of_another_run(model_folder: Path, tmp_path: Path):
    first = new_policy(model_folder, **AGENTS)
    scramble(first)
    first.save(tmp_path / "model")
    for settings in ({}, {"lora_rank": 2}, AGENTS):
        policy = new_policy(tmp_path / "model" / "judge", **settings)
        got = answer_logprobs(policy, "writer" if settings is AGENTS else "")
        torch.testing.assert_close(got, answer_logprobs(first, "judge"), rtol=0, atol=1e-4)


def test_settings_that_do_not_fit_a_saved_folder_are_told(model_folder: Path, tmp_path: Path):
    new_policy(model_folder, **AGENTS).save(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"\['writer', 'judge'\].*adapters='agent' and optimize.*model/writer'"):
        new_policy(tmp_path / "model", lora_rank=4)
    with pytest.raises(ConfigError, match=r"lora_rank=8: the adapter of agent 'writer' .* has rank 4; set lora_rank=4"):
        new_policy(tmp_path / "model", **{**AGENTS, "lora_rank": 8})
    (tmp_path / "model" / "judge" / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter cannot be read: .*judge/adapter_config.json"):
        new_policy(tmp_path / "model", **AGENTS)
    (tmp_path / "model" / "adapters.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its adapters.json or an adapter cannot be read"):
        new_policy(tmp_path / "model", **AGENTS)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lora_rank": 0}, r"lora_rank is 0; set lora_rank=16"),
        ({"optimize": None}, r"needs the agents' names, such as optimize=\['writer', 'judge'\]"),
        ({"optimize": ["writer", "re*"]}, r"optimize must name every agent, and \['re\*'\] are patterns"),
        ({"adapters": "each"}, r"'adapters' = 'each': .*'shared' or 'agent'"),
    ],
)
def test_settings_that_do_not_fit_together_are_told(settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        TrainConfig.of(model="nowhere", **{**AGENTS, **settings})


# ---------------------------------------------------------------------------------------------------- whole runs

TASKS = [{"id": name, "question": f"Say {name}"} for name in ("a", "b")]


async def ask(llm: agl.LLM, agent: str, question: str) -> str:
    async with llm.async_client() as client:
        with agl.agent(agent):
            answer = await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": question}], max_tokens=4
            )
    return answer.choices[0].message.content or ""


def letters(text: str) -> float:
    return sum(" " <= character <= "~" for character in text) / 4


async def opposites(task: Mapping[str, Any], llm: agl.LLM) -> Mapping[str, Any]:
    """Both are asked the same; what is good of one is bad of the other."""
    writer, judge = await asyncio.gather(*(ask(llm, agent, task["question"]) for agent in ("writer", "judge")))
    await ask(llm, "reader", task["question"])
    return {"writer": {"plain": letters(writer)}, "judge": {"odd": -letters(judge)}}


def trainer(model_folder: Path, folder: Path, agent: Any = opposites, **settings: Any) -> Trainer:
    small = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "max_length": 256, "baseline": "agent"}
    places = {"model": str(model_folder), "output_dir": str(folder), "stall_timeout": 30}
    return Trainer(agent, TASKS, **{**small, **places, **AGENTS, **settings})


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def bold_model(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a large output layer: below its own, small one no adapter could make a token likely."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    config = model.config
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    bold: Any = AutoModelForCausalLM.from_config(config)
    bold.load_state_dict(model.state_dict())
    torch.nn.init.normal_(bold.lm_head.weight, std=0.2)
    bold.generation_config = model.generation_config
    bold.save_pretrained(tmp_path / "bold")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "bold")
    return tmp_path / "bold"


@pytest.mark.slow
def test_two_agents_that_are_asked_the_same_learn_opposites(bold_model: Path, tmp_path: Path):
    run = trainer(bold_model, tmp_path, steps=7, group_size=16, lora_rank=8, learning_rate=8e-3)
    said: dict[str, list[float]] = {}
    with run.session as session:
        policy = session.policy
        base = weights_of_agent(policy, "")
        for batch in run.batches():
            for call in (call for rollout in batch for call in rollout.calls):
                text = policy.tokenizer.decode(call.choices[0].response_ids, skip_special_tokens=True)
                said.setdefault(call.agent, []).append(letters(text))
            run.step(batch)
        assert same(base, weights_of_agent(policy, ""))
    first, last = (
        {agent: sum(values[part]) / 64 for agent, values in said.items()} for part in (slice(64), slice(-64, None))
    )
    assert last["writer"] > first["writer"] + 0.25 and last["judge"] < first["judge"] - 0.2
    assert abs(last["reader"] - first["reader"]) < 0.15, "the base answers whoever is not selected"


def test_a_run_warms_up_trains_evaluates_and_saves_an_adapter_for_each_agent(model_folder: Path, tmp_path: Path):
    warmup = Warmup(demonstrate=lambda task, agent, prompt: f"{agent[0]}!", steps=2, batch=2)
    run = trainer(model_folder, tmp_path)
    run.warmup, run.eval_tasks = warmup, run.tasks
    result = run.fit()
    lines = [line for line in steps_of(result.folder) if "grad_norm" in line]
    assert [line["step"] for line in lines] == [-1, 0, 1, 2] and [line["version"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["agent/writer/grad_norm"] > 0 and line["agent/judge/grad_norm"] > 0
        assert line["loss"] == pytest.approx(line["agent/writer/loss"] + line["agent/judge/loss"], abs=1e-6)
    assert all(line["mismatch_kl"] < 1e-6 for line in lines[2:]), "each agent sampled from what it is trained as"
    card = (result.model / "README.md").read_text()
    assert "| writer | `writer` |\n| judge | `judge` |" in card and "library_name: peft" in card
    assert _instead(str(result.model)) == {"model": str(result.model)}, "agl eval"
    assert _instead(str(result.model / "judge"))["lora_rank"] == 0
    again = trainer(result.model, tmp_path, steps=1, unselected="frozen").fit()
    assert (again.model / "judge" / "adapter_model.safetensors").is_file()


def test_the_canary_finds_a_backend_that_serves_the_wrong_adapter(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    probe = TransformersBackend.probe

    async def confused(self: TransformersBackend, prompt: Sequence[int], tokens: int, agent: str = "") -> Any:
        return await probe(self, prompt, tokens, "writer")

    monkeypatch.setattr(TransformersBackend, "probe", confused)
    run = trainer(model_folder, tmp_path, learning_rate=0.05)
    with pytest.raises(BackendError, match=r"does not serve the trainer's adapter of agent 'judge'"):
        run.fit()


def test_a_call_whose_header_names_another_agent_is_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else the judge's adapter would learn from what the writer's said."""
    collect = Services.collect

    def relabelled(self: Services, rollouts: Sequence[Rollout], progress: Any) -> list[Rollout]:
        ended = collect(self, rollouts, progress)
        for rollout in ended:
            for call in rollout.calls:
                _as_framework(rollout, call)
        return ended

    def _as_framework(rollout: Rollout, call: Call) -> None:
        object.__setattr__(call, "call_id", call.id)
        step = Step(id=call.id, kind="model_start", call_id=call.id, agent="judge")
        object.__setattr__(rollout, "steps", [*rollout.steps, step])

    monkeypatch.setattr(Services, "collect", relabelled)
    with pytest.raises(CaptureError, match=r"agent 'judge' .* under the name '(writer|reader)'.*x-agl-agent.*'shared'"):
        trainer(model_folder, tmp_path).fit()

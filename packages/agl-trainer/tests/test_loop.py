"""Whole runs on a tiny model: real server process, gateway, engine, and agents that use plain `openai`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import agl
from agl.errors import BackendError, CaptureError, ConfigError, SelectionError, StallError
from agl.records import Task
from agl.runner import load_agent
from agl_trainer import Trainer, Warmup
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.loop import EMPTY_STEPS
from agl_trainer.services import ServerProcess
from agl_trainer.session import Result, Session
from agl_trainer.tasks import read_tasks
from agl_trainer.warmup import Played

Train = Callable[..., Trainer]

TASKS = [{"id": name, "question": f"Say {name}"} for name in ("a", "b")]
"""What the agents are asked."""


async def ask(llm: agl.LLM, question: str, tokens: int = 4) -> str:
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": question}], max_tokens=tokens
        )
    return answer.choices[0].message.content or ""


def letters(text: str) -> float:
    """A bandit's reward: the share of plain ASCII in an answer of four tokens."""
    return sum(" " <= character <= "~" for character in text) / 4


async def bandit(task: Mapping[str, Any], llm: agl.LLM) -> float:
    return letters(await ask(llm, task["question"]))


def blocking_bandit(task: Mapping[str, Any], llm: agl.LLM) -> float:
    with llm.client() as client:
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
    return letters(answer.choices[0].message.content or "")


@pytest.fixture
def train(model_folder: Path, tmp_path: Path) -> Train:
    """A trainer of the tiny model with small settings."""

    def trainer(agent: Any = bandit, tasks: Any = TASKS, **settings: Any) -> Trainer:
        small = {
            "steps": 2,
            "tasks_per_step": 2,
            "group_size": 4,
            "max_length": 256,
            "slots": 16,
            "learning_rate": 1e-3,
        }
        places = {"model": str(model_folder), "output_dir": str(tmp_path / "runs")}
        return Trainer(agent, tasks, **{**small, **places, "stall_timeout": 30, **settings})

    return trainer


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


# ------------------------------------------------------------------------------------------------------ learning

LEARNING = {"steps": 12, "group_size": 16, "learning_rate": 5e-3, "eval_every": 6, "eval_samples": 16}


@pytest.fixture(scope="module")
def learned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One longer run that several tests look at."""
    folder = tmp_path_factory.mktemp("learned")
    held_out = [{"id": name, "question": f"Say {name}"} for name in "cdefgh"]
    settings = {"model": str(model_folder), "output_dir": str(folder), "tasks_per_step": 2, "max_length": 256}
    return Trainer(bandit, TASKS, eval_tasks=held_out, slots=32, **settings, **LEARNING).fit()


@pytest.mark.slow
def test_a_bandit_learns_and_the_held_out_gain_is_significant(learned: Result):
    assert list(learned.evaluations) == ["before", "after step 6", "after"]
    gain = learned.gain
    assert gain is not None and gain.low > 0.1
    first, middle, last = (evaluation.reward.mean for evaluation in learned.evaluations.values())
    assert first < middle < last


@pytest.mark.slow
def test_every_step_and_evaluation_is_in_the_log(learned: Result):
    lines = metrics_of(learned.folder)
    steps = [line for line in lines if "grad_norm" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["version"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 6, 12]
    for line in steps:
        assert line["rollouts"] == line["transitions"] == 32 and line["unscored"] == 0
        assert line["reward"] == line["reward/reward"] and 0 <= line["reward"] <= 1
        assert 1 <= line["response_tokens"] <= 4 and line["agent/main/calls"] == 32
        assert line["mismatch_kl"] < 1e-6 and line["clipped"] == 0.0 and line["corrected"] == 0.0
        assert line["seconds"] > 0 and line["server_restarts"] == 0
    assert sum(line["reward"] for line in steps[-3:]) > 1.5 * sum(line["reward"] for line in steps[:3])


@pytest.mark.slow
def test_a_run_leaves_a_model_with_its_card(learned: Result, model_folder: Path):
    from transformers import AutoModelForCausalLM

    trained, base = (AutoModelForCausalLM.from_pretrained(place) for place in (learned.model, model_folder))
    assert not torch.equal(trained.get_input_embeddings().weight, base.get_input_embeddings().weight)
    text = (learned.model / "README.md").read_text()
    assert str(learned.evaluations["after"].reward) in text


@pytest.mark.slow
def test_a_synchronous_agent_learns_through_the_same_loop(train: Train):
    rewards: list[float] = []
    trainer = train(blocking_bandit, steps=8, group_size=16, learning_rate=5e-3)
    with trainer.session:
        for batch in trainer.batches():
            rewards.append(trainer.step(batch)["reward"])
    assert sum(rewards[-2:]) > 1.3 * sum(rewards[:2])


WORKER_AGENT = """
import os
from answers import letters

async def answer(task, llm):
    async with llm.async_client() as client:
        said = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4)
    return {"letters": letters(said.choices[0].message.content or ""), "elsewhere": float(os.getpid() != task["pid"])}
"""


@pytest.mark.slow
def test_a_worker_process_runs_an_agent_that_stands_in_another_folder(train: Train, tmp_path: Path):
    """The agent's file imports its neighbour; the worker starts somewhere else."""
    (tmp_path / "answers.py").write_text("def letters(text):\n    return len(text) / 4\n")
    (tmp_path / "bandit_of_worker.py").write_text(WORKER_AGENT)
    agent = load_agent(f"{tmp_path / 'bandit_of_worker.py'}:answer")
    tasks = [{**task, "pid": os.getpid()} for task in TASKS]
    metrics = [line for line in metrics_of(train(agent, tasks, workers=1).fit().folder) if "reward" in line]
    assert [line["reward/elsewhere"] for line in metrics] == [1.0, 1.0]
    assert all(line["unscored"] == 0 for line in metrics)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answers_and_the_same_weights(train: Train):
    """Requests share batches as they happen to arrive, which moves the last bits of a logprob and nothing else."""

    def run(seed: int, steps: int = 2) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        trainer = train(seed=seed, steps=steps, group_size=8, slots=5)
        answers: list[tuple[int, ...]] = []
        with trainer.session as session:
            for batch in trainer.batches():
                answers += [call.choices[0].response_ids for rollout in batch for call in rollout.calls]
                trainer.step(batch)
            return answers, torch.cat([parameter.detach().reshape(-1) for parameter in session.policy.parameters])

    (first, weights), (again, twin), (other, _) = run(1), run(1), run(2, 1)
    assert first == again and first[:16] != other
    torch.testing.assert_close(twin, weights, rtol=0, atol=1e-4)  # of 2e-3 that two steps may move a weight


def test_several_passes_are_clipped_against_the_first_weights_and_make_one_version(train: Train):
    async def dice(task: Mapping[str, Any], llm: agl.LLM) -> float:
        return float(sum(map(ord, await ask(llm, task["question"]))) % 7)

    trainer = train(dice, epochs=4, learning_rate=1e-2, algorithm={"name": "grpo", "kl_coef": 0.1, "clip_high": 0.01})
    lines = metrics_of(trainer.fit().folder)
    assert [line["version"] for line in lines] == [1, 2] and trainer.session.policy.version == 2
    assert all(line["clipped"] > 0.05 and line["kl"] > 0 for line in lines)
    assert all(line["mismatch_kl"] < 1e-6 for line in lines), "old logprobs are those of the weights that sampled"


# --------------------------------------------------------------------------------------------------- agents


async def two_agents(task: Mapping[str, Any], llm: agl.LLM) -> Mapping[str, Any]:
    """A writer and a judge of one model, each with a reward of its own."""
    with agl.agent("writer"):
        text = await ask(llm, task["question"])
    with agl.agent("judge"):
        verdict = await ask(llm, f"Judge {task['question']}", 2)
    return {"writer": {"letters": letters(text)}, "judge": {"short": -float(len(verdict))}, "shared": 0.5}


def test_agents_have_rewards_of_their_own_against_baselines_of_their_own(train: Train):
    trainer = train(two_agents, baseline="agent", steps=1)
    with trainer.session:
        (batch,) = [trainer.step(batch) for batch in trainer.batches()]
    assert batch["agent/writer/calls"] == batch["agent/judge/calls"] == 8 and batch["transitions"] == 16
    assert batch["reward/shared"] == 0.5 and batch["grad_norm"] > 0


def test_rewards_of_agents_need_a_baseline_of_agents(train: Train):
    with pytest.raises(ConfigError, match=r"different credits.*baseline='agent'"):
        train(two_agents).fit()


def calls_of(trainer: Trainer) -> dict[str, set[str]]:
    """Which models answered each agent in the first batch, which is then trained on."""
    seen: dict[str, set[str]] = {}
    with trainer.session:
        for batch in trainer.batches():
            for call in (call for rollout in batch for call in rollout.calls):
                seen.setdefault(call.agent, set()).add(call.model)
            assert trainer.step(batch)["transitions"] == 8
    return seen


async def writer_and_judge(task: Mapping[str, Any], llm: agl.LLM) -> float:
    with agl.agent("writer"):
        text = await ask(llm, task["question"], 8)
    with agl.agent("judge"):
        await ask(llm, "Judge it")
    return letters(text) + len(text) / 100


def test_unselected_agents_may_be_answered_by_the_frozen_beginning(train: Train):
    seen = calls_of(train(writer_and_judge, optimize=["writ*"], unselected="frozen"))
    assert seen == {"writer": {"policy"}, "judge": {"frozen"}}


def test_unselected_agents_are_answered_by_the_policy_unless_told_otherwise(train: Train):
    seen = calls_of(train(writer_and_judge, optimize=["writer"], steps=1))
    assert seen == {"writer": {"policy"}, "judge": {"policy"}}


# ------------------------------------------------------------------------------------------------------- warm-up


def teach(task: Mapping[str, Any], agent: str, prompt: str) -> str:
    assert task["question"] in prompt or agent == "judge"
    return {"writer": "good" if task["id"] == "a" else Played("evil"), "judge": "ok"}[agent]


def texts(session: Session, warmup: Warmup) -> dict[str, list[str]]:
    """What each agent is to learn from a warm-up."""
    found: dict[str, list[str]] = {}
    for item in session.demonstrations(_tasks(), warmup):
        for transition in item.transitions:
            found.setdefault(transition.agent, []).append(session.policy.tokenizer.decode(transition.response_ids))
    return {agent: sorted(answers) for agent, answers in found.items()}


def _tasks() -> Sequence[Task]:
    return read_tasks(TASKS)


def test_a_warm_up_teaches_its_agents_and_leaves_out_what_was_only_played(train: Train):
    trainer = train(writer_and_judge, optimize=["writer"])
    with trainer.session as session:
        assert texts(session, Warmup(demonstrate=teach)) == {"writer": ["good<|im_end|>"]}


def test_a_warm_up_may_name_other_learners_than_reinforcement_learning(train: Train):
    trainer = train(writer_and_judge, optimize=["writer"])
    with trainer.session as session:
        wanted = {"judge": ["ok<|im_end|>"] * 2, "writer": ["good<|im_end|>"]}
        assert texts(session, Warmup(demonstrate=teach, agents=["*"])) == wanted


@pytest.mark.slow
def test_a_warm_up_imitates_and_reinforcement_learning_goes_on_from_there(train: Train):
    async def teach_later(task: Mapping[str, Any], agent: str, prompt: str) -> str:
        await asyncio.sleep(0)
        return "xyz"

    async def taught(task: Mapping[str, Any], llm: agl.LLM) -> float:
        return sum(character in "xyz" for character in await ask(llm, task["question"])) / 4

    warmup = Warmup(demonstrate=teach_later, steps=6, batch=4, learning_rate=2e-2)
    result = train(taught, eval_tasks=TASKS, warmup=warmup, steps=1, eval_samples=8).fit()
    assert list(result.evaluations) == ["before", "after warm-up", "after"]
    lines = metrics_of(result.folder)
    imitation = [line["sft_loss"] for line in lines if "sft_loss" in line]
    assert [line["step"] for line in lines if "sft_loss" in line] == [-5, -4, -3, -2, -1, 0]
    assert imitation[-1] < imitation[0] - 1
    before, after, _ = (evaluation.reward.mean for evaluation in result.evaluations.values())
    assert after > before + 0.3


def test_warm_up_batches_without_a_learner_are_passed_over(train: Train):
    """A rare agent is not in every batch; with one rollout in a batch most hold none."""

    async def seldom(task: Mapping[str, Any], llm: agl.LLM) -> float:
        with agl.agent("often"):
            await ask(llm, task["question"])
        if task["id"] == "a":
            with agl.agent("rare"):
                await ask(llm, task["question"])
        return 1.0

    warmup = Warmup(demonstrate=lambda task, agent, prompt: "ok", agents=["rare"], steps=4, batch=1)
    result = train(seldom, warmup=warmup, steps=0).fit()
    assert sum("sft_loss" in line for line in metrics_of(result.folder)) == 2


def test_two_runs_on_one_server_do_not_meet(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both have a batch 1 and demonstrations; the second one finds the first one's rollouts in the store."""
    server = ServerProcess(tmp_path / "server")
    server.start()
    monkeypatch.setenv("AGL_KEY", server.key)
    try:
        for seed in (1, 2):
            warmup = Warmup(demonstrate=teach, steps=1, batch=2)
            result = train(writer_and_judge, warmup=warmup, server_url=server.url, steps=1, seed=seed).fit()
            first, second = metrics_of(result.folder)
            assert first["sft_loss"] > 0 and second["rollouts"] == 8 and "server_restarts" not in second
    finally:
        server.stop()


def test_a_shared_server_needs_its_key(train: Train, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AGL_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"server_url='http://127.0.0.1:1' needs that server's key in AGL_KEY"):
        train(server_url="http://127.0.0.1:1").fit()


def test_a_teacher_that_returns_no_text_is_told(train: Train):
    warmup = Warmup(demonstrate=lambda task, agent, prompt: None, steps=1, batch=2)  # pyright: ignore
    with pytest.raises(CaptureError, match=r"demonstrate\(\) returned None for agent 'main' on task '[ab]'"):
        train(warmup=warmup).fit()


# -------------------------------------------------------------------------------------------------------- errors


def returns(value: Any, *, calls: bool = True) -> Any:
    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> Any:
        if calls:
            await ask(llm, task["question"], 1)
        return value

    return agent


async def raises(task: Mapping[str, Any], llm: agl.LLM) -> float:
    raise LookupError("my database is gone")


@pytest.mark.parametrize(
    ("agent", "settings", "error", "text"),
    [
        (returns(1.0, calls=False), {}, CaptureError, r"8 rollouts made no model call.*llm\.openai\(\)"),
        (returns(1.0), {"optimize": ["wirter"]}, SelectionError, r"no agent is named 'wirter'.*seen: 'main'"),
        (returns(None), {}, CaptureError, r"none of 8 rollouts has a reward: the agent function returned None"),
        (returns(math.nan), {}, CaptureError, r"none of 8 rollouts ended well.*'reward' is nan"),
        (returns("good"), {}, CaptureError, r"none of 8 rollouts ended well.*'reward' is 'good'"),
        (raises, {}, CaptureError, r"none of 8 rollouts ended well.*LookupError: my database is gone"),
        (returns(0.5), {"steps": 9}, CaptureError, rf"{EMPTY_STEPS} steps in a row.*0\.500.*all equal"),
    ],
    ids=["no call", "misspelt", "None", "NaN", "text", "raises", "equal"],
)
def test_a_run_that_cannot_learn_says_why(
    train: Train, agent: Any, settings: dict[str, Any], error: type[Exception], text: str
):
    with pytest.raises(error, match=text):
        train(agent, **settings).fit()


def test_one_misspelt_name_of_two_is_told_at_the_first_evaluation_and_stops_the_run(
    train: Train, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(SelectionError, match=r"no agent is named 'judge'.*seen: 'main'"):
        train(optimize=["main", "judge"], steps=5, eval_tasks=[{"id": "held out", "question": "?"}]).fit()
    told, _, later = capfd.readouterr().err.partition("held-out reward before")
    assert "warning: optimize=['main', 'judge']: no agent is named 'judge'. Agents seen: 'main'. Training stops" in told
    assert "step 2" in later and "step 3" not in later and "warning" not in later


def test_an_evaluation_without_any_reward_says_why(train: Train):
    with pytest.raises(CaptureError, match=r"'before': no rollout has a reward.*my database is gone"):
        train(raises, eval_tasks=TASKS).fit()


def test_a_failed_agent_is_left_out_and_counted(train: Train):
    async def unlucky(task: Mapping[str, Any], llm: agl.LLM) -> float:
        text = await ask(llm, task["question"])
        if task["id"] == "b":
            raise ValueError("no luck")
        return letters(text) + len(text)

    trainer = train(unlucky, steps=1)
    with trainer.session:
        (metrics,) = [trainer.step(batch) for batch in trainer.batches()]
    assert metrics["unscored"] == 4 and metrics["outcome/agent_error"] == 4 and metrics["transitions"] == 4


def test_a_stall_ends_with_a_diagnosis(train: Train):
    async def sleeps(task: Mapping[str, Any], llm: agl.LLM) -> float:
        await ask(llm, task["question"])
        await asyncio.sleep(60)
        return 0.0

    text = r"0 of 8 rollouts ended, then none for 1 s; agents are running and do not return .*attempt 1, [01] calls"
    with pytest.raises(StallError, match=text):
        train(sleeps, stall_timeout=1).fit()


# ------------------------------------------------------------------------------------------------------ open loop


def test_the_loop_may_be_the_users_own(train: Train):
    trainer = train(steps=3)
    seen = []
    for batch in trainer.batches():
        metrics = trainer.step(batch)
        seen.append((trainer.steps, len(batch), metrics["rollouts"]))
    assert seen == [(1, 8, 8.0), (2, 8, 8.0), (3, 8, 8.0)]
    assert [line["step"] for line in metrics_of(trainer.folder)] == [1, 2, 3]


def test_a_batch_that_is_not_trained_on_is_followed_by_another(train: Train):
    trainer = train(tasks=[{"id": str(place), "question": str(place)} for place in range(6)], steps=1)
    drawn = []
    for batch in trainer.batches():
        drawn.append({rollout.task.id for rollout in batch})
        if len(drawn) == 3:
            trainer.step(batch)
    assert set.union(*drawn) == {"0", "1", "2", "3", "4", "5"}


def test_an_evaluation_may_be_repeated_under_one_name(train: Train):
    trainer = train()
    with trainer.session as session:
        for _ in range(3):
            assert session.evaluate("mine", _tasks()) is not None
        ended = [session.services.run(session.services.client.collect(f"eval{n}-v0"))[1] for n in (1, 2, 3)]
        assert list(map(len, ended)) == [2, 2, 2], "each time the agent ran anew"


# ---------------------------------------------------------------------------------------------------- resilience


@pytest.mark.slow
def test_a_server_killed_in_mid_run_is_started_again_and_nothing_is_lost(train: Train):
    killed = threading.Event()

    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
        text = await ask(llm, task["question"])
        if trainer.steps == 1 and not killed.is_set():
            killed.set()
            server = trainer.session.services.server
            assert server is not None and server._process is not None
            os.kill(server._process.pid, signal.SIGKILL)
        await ask(llm, f"{task['question']} again")
        return letters(text) + len(text) / 10

    trainer = train(agent, steps=3, group_size=8)
    result = trainer.fit()
    assert killed.is_set()
    lines = metrics_of(result.folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["server_restarts"] for line in lines] == [0, 1, 1]
    assert [(line["rollouts"], line["unscored"]) for line in lines] == [(16, 0)] * 3
    # A call that was kept and whose answer died with the server is asked again, and counts once.
    assert [line["transitions"] for line in lines] == [32] * 3


def test_the_canary_finds_an_engine_that_kept_the_old_weights(train: Train, monkeypatch: pytest.MonkeyPatch):
    """The version is told right and the prompt's keys and values are those of other weights: only logprobs show it."""

    def forgetful(self: TransformersEngine, version: int) -> None:
        self.version = version

    trainer = train(learning_rate=0.05)
    with trainer.session:
        monkeypatch.setattr(TransformersEngine, "refresh", forgetful)
        with pytest.raises(BackendError, match=r"does not serve the trainer's weights: mean logprob difference"):
            for batch in trainer.batches():
                trainer.step(batch)


def test_the_canary_finds_an_engine_that_was_not_told(train: Train, monkeypatch: pytest.MonkeyPatch):
    trainer = train()
    with trainer.session:
        monkeypatch.setattr(TransformersEngine, "refresh", lambda self, version: None)
        with pytest.raises(BackendError, match=r"versions \[0\] instead of 1"):
            trainer.step(next(trainer.batches()))

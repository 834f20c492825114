"""What careless hands give to a trainer: it is told at once, and nothing is left running or silently changed."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import agl
from agl import plugins
from agl.client import LightningClient
from agl.endpoint import create_app, serve
from agl.errors import CaptureError, ConfigError, StallError, UsageError
from agl.hookspecs import hookimpl
from agl.runner import load_agent
from agl.testing import ScriptedEngine
from agl.wire import PolicyState
from agl_trainer import Trainer
from agl_trainer.commands import trainer_from
from agl_trainer.config import TrainConfig
from agl_trainer.services import ServerProcess
from agl_trainer.tasks import read_tasks

Train = Callable[..., Trainer]

TASKS = [{"id": name, "question": f"Say {name}"} for name in ("a", "b")]


async def ask(llm: agl.LLM, question: str, **options: Any) -> str:
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": question}], **{"max_tokens": 4, **options}
        )
    return answer.choices[0].message.content or ""


ROLLS = itertools.count()
"""Rewards must differ inside a group, or there is nothing to learn; these always do."""


async def answer(task: Mapping[str, Any], llm: agl.LLM) -> float:
    await ask(llm, task["question"])
    return float(next(ROLLS))


@pytest.fixture
def train(model_folder: Path, tmp_path: Path) -> Train:
    def trainer(agent: Any = answer, tasks: Any = TASKS, **settings: Any) -> Trainer:
        small = {"steps": 1, "tasks_per_step": 1, "group_size": 2, "max_length": 256, "slots": 8, "max_attempts": 1}
        places = {"model": model_folder, "output_dir": tmp_path / "runs"}
        return Trainer(agent, tasks, **{**small, **places, "stall_timeout": 20, **settings})

    return trainer


# ------------------------------------------------------------------------------------------------ before it begins


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"agent": "module:function"}, r"agent='module:function' is no function"),
        ({"warmup": {"demonstrate": None}}, r"warmup=\{.*\} is no Warmup; write warmup=Warmup"),
        ({"tasks": 5}, r"tasks are 5; give a list of JSON objects"),
        ({"tasks": [{"when": datetime.date(2026, 1, 1)}]}, r"task 0 does not fit into JSON: .*date"),
        ({"tasks": [{"id": "a"}, {"id": "b", "x": float("nan")}]}, r"task 1 does not fit into JSON"),
        ({"tasks": [{"text": "\ud800"}]}, r"task 0 does not fit into JSON: .*surrogates"),
        ({"seed": -1}, r"setting 'seed' = -1"),
        ({"seed": 2**32}, r"setting 'seed' = 4294967296"),
        ({"server_url": "localhost:80"}, r"setting 'server_url' = 'localhost:80'"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_loaded(arguments: dict[str, Any], text: str):
    agent, tasks = arguments.pop("agent", answer), arguments.pop("tasks", TASKS)
    with pytest.raises(UsageError, match=text):
        Trainer(agent, tasks, model="nowhere", **arguments)


def test_paths_may_be_paths(tmp_path: Path):
    config = TrainConfig.of(model=tmp_path, output_dir=tmp_path)
    assert config.model == config.output_dir == str(tmp_path)


def test_a_task_file_may_begin_with_a_mark_and_hold_any_line_separator(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b\u0085c"}\r\n\r\n{"text": "d"}\r\n'.encode())
    assert [task.data["text"] for task in read_tasks(path)] == ["a\u2028b\u0085c", "d"]


def test_a_task_file_in_another_encoding_is_told(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(UsageError, match=r"tasks\.jsonl is not UTF-8"):
        read_tasks(path)


def test_a_task_whose_id_is_null_is_named_by_its_content():
    first, second = read_tasks([{"id": None, "q": 1}, {"id": None, "q": 2}])
    assert len(first.id) == 16 and first.id != second.id


def test_an_output_folder_that_cannot_be_made_is_told(train: Train, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir='.*file/runs': cannot make"):
        train(output_dir=tmp_path / "file" / "runs").fit()


# ------------------------------------------------------------------------------------------------- while it runs


def threads() -> set[str]:
    """Threads of trainers; the test kit's model server belongs to the whole test session."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("agl-")}
    return names - {"agl-model-server"}


def test_a_second_trainer_at_the_same_time_is_refused_and_harms_nothing(train: Train):
    first = train()
    with first.session:
        with pytest.raises(UsageError, match="another Trainer is running in this process"):
            train().fit()
        result = first.fit()
    assert json.loads((result.folder / "metrics.jsonl").read_text())["step"] == 1
    with pytest.raises(UsageError, match="has run already"):
        first.fit()
    assert not threads()


class Broken:
    """A plugin that fails when training begins."""

    def __init__(self) -> None:
        self.ended = 0

    @hookimpl
    def agl_train_start(self, trainer: Any) -> None:
        raise RuntimeError("the plugin is broken")

    @hookimpl
    def agl_train_end(self, trainer: Any) -> None:
        self.ended += 1


def test_a_plugin_that_fails_at_the_start_leaves_nothing_running(train: Train):
    plugin, manager = Broken(), plugins.manager()
    manager.register(plugin)
    try:
        with pytest.raises(RuntimeError, match="the plugin is broken"):
            train().fit()
    finally:
        manager.unregister(plugin)
    assert not threads() and plugin.ended == 1
    assert train().fit().model.is_dir(), "the next trainer runs as if nothing had been"


def test_a_seed_of_the_agents_own_does_not_make_a_group_alike(train: Train):
    said: list[str] = []

    async def seeded(task: Mapping[str, Any], llm: agl.LLM) -> float:
        said.append(await ask(llm, "Say", seed=7, temperature=0.0, max_tokens=8))
        return float(next(ROLLS))

    train(seeded, group_size=4).fit()
    assert len(said) == len(set(said)) == 4


def test_an_agent_that_interrupts_is_an_agent_that_failed(train: Train):
    async def child() -> None:
        raise SystemExit(3)

    async def interrupting(task: Mapping[str, Any], llm: agl.LLM) -> float:
        if task["id"] == "a":
            raise KeyboardInterrupt
        await asyncio.create_task(child())  # asyncio lets this one out of its loop
        return 1.0

    trainer = train(interrupting)
    with trainer.session as session:
        errors = [rollout.error for rollout in session.rollouts("b", trainer.tasks, 1)]
    first, second = (error or "" for error in errors)
    assert first.startswith("KeyboardInterrupt: ") and second.startswith("SystemExit: 3")
    assert "test_misuse.py" in first and "in interrupting" in first


def test_an_agent_that_blocks_its_loop_does_not_keep_training_from_its_end(
    train: Train, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agl_trainer.services.CLOSE_SECONDS", 0.5)
    wake = threading.Event()

    async def blocking(task: Mapping[str, Any], llm: agl.LLM) -> float:
        wake.wait(60)
        return 1.0

    began = time.monotonic()
    with pytest.raises(StallError, match="agents are running and do not return"):
        train(blocking, stall_timeout=1).fit()
    wake.set()
    assert time.monotonic() - began < 20


def test_parts_whose_sum_is_infinite_are_no_reward(train: Train):
    async def rich(task: Mapping[str, Any], llm: agl.LLM) -> dict[str, float]:
        await ask(llm, "Say")
        return {"one": 1e308, "two": 1e308}

    with pytest.raises(CaptureError, match="the sum of all parts' is inf"):
        train(rich).fit()


def test_an_endless_error_of_an_agent_is_cut_and_half_characters_are_told(train: Train):
    async def failing(task: Mapping[str, Any], llm: agl.LLM) -> float:
        raise ValueError("begin \ud800 " + "x" * 20_000_000 + " end")

    trainer = train(failing)
    with trainer.session as session:
        (rollout,) = session.rollouts("b", trainer.tasks[:1], 1)
    assert rollout.error is not None and len(rollout.error) < 5000
    assert rollout.error.startswith(r"ValueError: begin \ud800 x") and "x end (at " in rollout.error
    assert rollout.outcome == "agent_error"


# ------------------------------------------------------------------------------------------ configuration files


def configuration(folder: Path, lines: str = "", **settings: Any) -> Path:
    (folder / "agent.py").write_text("def answer(task, llm):\n    return 1.0\n\ndef teach(*_):\n    return 'x'\n")
    (folder / "tasks.jsonl").write_text('{"id": "a"}\n')
    base = {"agent": "agent.py:answer", "tasks": "tasks.jsonl", "model": "nowhere"}
    path = folder / "train.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in {**base, **settings}.items()) + lines)
    return path


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"agent": 3}, r"setting 'agent' = 3: must be text"),
        ({"model": 3}, r"setting 'model' = 3: must be text"),
        ({"tasks": ["a.jsonl"]}, r"setting 'tasks' = \['a\.jsonl'\]: must be text"),
        ({"warmup": 3}, r"setting 'warmup' = 3: must be a table"),
        ({"lines": '[warmup]\ndemonstrate = "agent.py:teach"\nsteps = "x"\n'}, r"steps of at least 1, not 'x'"),
        ({"lines": '[warmup]\ndemonstrate = "agent.py:teach"\nlearning_rate = 0\n'}, r"learning_rate above 0, not 0"),
    ],
)
def test_a_value_of_the_wrong_kind_in_a_file_is_named(tmp_path: Path, settings: dict[str, Any], text: str):
    with pytest.raises(UsageError, match=text):
        trainer_from(configuration(tmp_path, **settings))


def test_a_configuration_that_is_a_folder_or_no_text_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no configuration file .*: Is a directory"):
        trainer_from(tmp_path)
    (tmp_path / "train.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"train\.toml is not TOML"):
        trainer_from(tmp_path / "train.toml")


def test_model_and_output_folder_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "project" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = trainer_from(configuration(tmp_path / "project", model="mine", output_dir="out")).config
    assert config.model == str(tmp_path / "project" / "mine")
    assert config.output_dir == str(tmp_path / "project" / "out")
    assert trainer_from(configuration(tmp_path / "project", model="Qwen/Qwen3")).config.model == "Qwen/Qwen3"


# ------------------------------------------------------------------------------------------- servers and workers


def test_a_second_run_on_a_server_that_serves_one_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A server has one policy: the second run's would answer the agents of the first."""
    server = ServerProcess(tmp_path / "server")
    server.start()
    monkeypatch.setenv("AGL_KEY", server.key)

    async def busy() -> None:
        async with serve(create_app(ScriptedEngine())) as backend, LightningClient(server.url, server.key) as client:
            await client.set_policy(PolicyState(upstream=backend, version=7))
            trainer = train(server_url=server.url)
            with pytest.raises(ConfigError, match=r"serves another run, whose backend is alive \(policy version 7\)"):
                await asyncio.to_thread(trainer.fit)
            assert (await client.policy()) == PolicyState(upstream=backend, version=7), "the first run serves on"

    try:
        asyncio.run(busy())
        assert train(server_url=server.url).fit().model.is_dir(), "the first run is over"
    finally:
        server.stop()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "agent_of_worker.py").write_text("async def answer(task, llm):\n    return float(task['number'])\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    trainer = train(load_agent("agent_of_worker:answer"), [{"id": "a", "number": 2}], workers=1)
    with trainer.session as session:
        (worker,) = session.services._workers
        os.kill(worker.pid, signal.SIGKILL)
        (rollout,) = session.rollouts("b", trainer.tasks, 1)
        (other,) = session.services._workers
    assert rollout.returned is not None and rollout.returned.total == 2.0 and other.pid != worker.pid
    assert other.returncode is not None, "the new one is stopped in the end as the old one would have been"


def test_calls_that_one_rollout_makes_at_the_same_time_repeat_whatever_order_they_arrive_in(train: Train):
    said: list[dict[str, str]] = []

    async def parallel(task: Mapping[str, Any], llm: agl.LLM) -> float:
        questions = ["one", "two", "three"]
        if len(said) == 1:
            questions.reverse()
        answers = await asyncio.gather(*(ask(llm, question) for question in questions))
        said.append(dict(zip(questions, answers, strict=True)))
        return 1.0

    for _ in range(2):
        trainer = train(parallel)
        with trainer.session as session:
            session.rollouts("b", trainer.tasks[:1], 1)
    assert said[0] == said[1] and len(set(said[0].values())) == 3


@pytest.mark.filterwarnings("ignore:.*no supported trackers")
@pytest.mark.parametrize(("tracker", "text"), [("wandbb", "Unsupported"), ("swanlab", "packages of.*not installed")])
def test_a_tracker_that_cannot_be_had_is_told(train: Train, monkeypatch: pytest.MonkeyPatch, tracker: str, text: str):
    monkeypatch.setattr("accelerate.tracking.is_swanlab_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"trackers=\['{tracker}'\]: .*{text}"):
        train(trackers=[tracker]).fit()

"""``agl train`` and ``agl eval`` as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl.errors import ConfigError, UsageError
from agl_trainer.commands import evaluate, trainer_from

AGENT = """
import time
import threading

def answer(task, llm):
    said = llm.client().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4)
    return {"length": len(said.choices[0].message.content or "") / 4}

def teach(task, agent, prompt):
    return "abc"

def sleeps(task, llm):
    threading.Event().wait()
"""


@pytest.fixture
def project(tmp_path: Path, model_folder: Path) -> Path:
    """A folder with an agent and its tasks, and a configuration file to be filled."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": n, "question": n}) + "\n" for n in "ab"))
    return folder


def configure(project: Path, folder: Path, **settings: object) -> Path:
    base = {
        "agent": "my_agent.py:answer",
        "tasks": "tasks.jsonl",
        "model": str(folder),
        "steps": 1,
        "tasks_per_step": 2,
        "group_size": 4,
        "max_length": 256,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in {**base, **settings}.items() if value is not None]
    path = project / "train.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def agl(*arguments: str, cwd: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agl", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


# -------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"grop_size": 3}, r"unknown setting 'grop_size'; did you mean 'group_size'\?"),
        ({"agnet": "x"}, r"unknown setting 'agnet'; did you mean 'agent'\?"),
        ({"agent": None}, r"setting 'agent' is missing"),
        ({"tasks": None}, r"setting 'tasks' is missing"),
        ({"model": None}, r"setting 'model' is missing"),
        ({"warmup.demonstrat": "x"}, r"unknown setting 'warmup.demonstrat'; did you mean 'demonstrate'\?"),
        ({"warmup.steps": 3}, r"setting 'warmup.demonstrate' is missing"),
        ({"agent": "my_agent.py:anwser"}, r"has no function 'anwser'; did you mean 'answer'\?"),
        ({"agent": "nowhere.py:answer"}, r"cannot import.*no file"),
        ({"tasks": "nothing.jsonl"}, r"no file .*nothing.jsonl"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(project: Path, model_folder: Path, settings: dict[str, object], text: str):
    with pytest.raises(UsageError, match=text):
        trainer_from(configure(project, model_folder, **settings))


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no configuration file '.*none.toml'"):
        trainer_from(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = \n")
    with pytest.raises(ConfigError, match=r"bad.toml is not TOML"):
        trainer_from(tmp_path / "bad.toml")


def test_everything_a_trainer_takes_may_stand_in_the_file(project: Path, model_folder: Path):
    path = configure(project, model_folder, eval_tasks="tasks.jsonl", optimize=["main"])
    with path.open("a") as file:
        file.write('[warmup]\ndemonstrate = "my_agent.py:teach"\nagents = ["main"]\nsteps = 2\nbatch = 2\n')
    trainer = trainer_from(path)
    assert trainer.warmup is not None and trainer.warmup.agents == ["main"] and trainer.warmup.steps == 2
    assert trainer.warmup.demonstrate({}, "main", "") == "abc"
    assert [task.id for task in trainer.eval_tasks] == ["a", "b"] and trainer.config.optimize == ["main"]


# ------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("command", ["train", "eval"])
def test_an_unknown_key_is_one_line_and_a_failure(project: Path, model_folder: Path, command: str):
    done = agl(command, str(configure(project, model_folder, learning_rat=1)), cwd=project.parent)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "unknown setting 'learning_rat'; did you mean 'learning_rate'?" in line


@pytest.mark.slow
def test_train_then_eval_of_the_adapter_that_was_trained(
    project: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """From another folder, with a worker process: paths are relative to the file."""
    path = configure(project, model_folder, eval_tasks="tasks.jsonl", lora_rank=4, workers=1)
    done = agl("train", str(path), cwd=project.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    told = dict(line.split(": ", 1) for line in done.stdout.strip().splitlines())
    assert set(told) == {"run", "model", "held-out gain"}
    model = project.parent / told["model"]
    assert (model / "adapter_config.json").is_file() and (model / "README.md").is_file()
    monkeypatch.chdir(project.parent)
    evaluate(path, str(model))
    measured = capsys.readouterr().out
    assert measured.startswith("reward ") and "on 2 tasks, 0 unscored" in measured and "  length: " in measured


@pytest.mark.slow
def test_a_stall_ends_the_program_although_an_agent_never_returns(project: Path, model_folder: Path):
    """The agent's thread cannot be ended from outside; it must not keep the process alive."""
    path = configure(project, model_folder, agent="my_agent.py:sleeps", stall_timeout=1)
    done = agl("train", str(path), cwd=project.parent, seconds=45)
    assert done.returncode == 2
    assert "StallError: 0 of 8 rollouts ended, then none for 1 s" in done.stderr

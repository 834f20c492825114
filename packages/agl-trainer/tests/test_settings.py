"""Settings, tasks and intervals: what is wrong is told at once, with the nearest right thing."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError, PluginError, SelectionError, UsageError
from agl_trainer import Trainer, Warmup
from agl_trainer.config import TrainConfig
from agl_trainer.evaluate import Evaluation, Interval
from agl_trainer.services import agent_path
from agl_trainer.tasks import epochs, read_tasks


def agent(task: Any, llm: Any) -> float:
    return 0.0


TASK = [{"id": "1"}]

# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lerning_rate": 1.0}, r"unknown setting 'lerning_rate'; did you mean 'learning_rate'\?"),
        ({"xyzzy": 1.0}, r"unknown setting 'xyzzy'$"),
        ({"steps": -1}, r"setting 'steps' = -1: .*greater than or equal to 0"),
        ({"temperature": 0}, r"setting 'temperature' = 0: .*greater than 0"),
        ({"precision": "float16"}, r"setting 'precision' = 'float16': .*float32.*bfloat16"),
        ({"optimize": "writer"}, r"setting 'optimize' = 'writer': .*list"),
        ({"unselected": {"base_url": "http://x/v1"}}, r"setting 'unselected.*model"),
        ({"unselected": {"base_url": "x", "model": "m"}}, r"unselected.*http"),
        ({"unselected": {"base_url": "http://x/v1", "model": "m", "kee": "k"}}, r"unselected.*kee"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_loaded(settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        Trainer(agent, TASK, model="nowhere", **settings)


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError, match="setting 'model' is missing"):
        TrainConfig.of(steps=3)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"algorithm": "grop"}, PluginError, r"no algorithm is named 'grop'; did you mean 'grpo'\?"),
        ({"backend": "transformer"}, PluginError, r"no backend is named 'transformer'; did you mean 'transformers'\?"),
        ({"optimize": []}, SelectionError, r"selects no agent"),
    ],
)
def test_a_wrong_name_is_told_before_anything_is_loaded(settings: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        Trainer(agent, TASK, model="nowhere", **settings)


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match=r"could not be loaded.*save_pretrained"):
        Trainer(agent, TASK, model=str(tmp_path / "nothing"), output_dir=str(tmp_path)).fit()


def test_two_trainers_of_one_moment_have_folders_of_their_own(tmp_path: Path):
    trainers = [Trainer(agent, TASK, model="m", output_dir=str(tmp_path)) for _ in range(20)]
    assert len({trainer.folder for trainer in trainers}) == 20


@pytest.mark.parametrize("settings", [{"steps": 0}, {"batch": 0}])
def test_a_warm_up_of_nothing_is_refused(settings: dict[str, int]):
    with pytest.raises(UsageError, match="at least 1"):
        Warmup(demonstrate=lambda task, agent, prompt: "", **settings)


def test_workers_need_a_function_that_another_process_can_find():
    assert agent_path(agent).endswith(":agent")
    for local in (lambda task, llm: 0.0, test_a_warm_up_of_nothing_is_refused.__call__):
        with pytest.raises(ConfigError, match="top of a module"):
            agent_path(local)


# --------------------------------------------------------------------------------------------------------- tasks


def test_tasks_are_named_by_their_id_or_by_their_content(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 7, "q": "a"}\n\n{"q": "b"}\n{"q": "c"}\n')
    tasks = read_tasks(path)
    assert [task.data["q"] for task in tasks] == ["a", "b", "c"]
    assert tasks[0].id == "7" and len(tasks[1].id) == 16
    assert tasks[1].id == read_tasks([{"q": "b"}])[0].id, "the name does not depend on the place"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("", "no tasks in"),
        ('{"a": 1}\n{broken\n', r":2 is not JSON"),
        ("[1]\n", "a task is a JSON object"),
        ('{"q": 1}\n{"q": 1}\n', "two tasks have the id"),
    ],
)
def test_a_broken_task_file_is_told_with_its_place(tmp_path: Path, lines: str, text: str):
    path = tmp_path / "tasks.jsonl"
    path.write_text(lines)
    with pytest.raises(UsageError, match=text):
        read_tasks(path)


def test_a_missing_task_file_is_told():
    with pytest.raises(UsageError, match=r"no file 'nowhere.jsonl'"):
        read_tasks("nowhere.jsonl")


def test_every_task_comes_once_an_epoch_in_an_order_of_the_seed():
    tasks = read_tasks([{"id": str(place)} for place in range(5)])
    drawn = [task.id for task in islice(epochs(tasks, 3), 15)]
    assert all(sorted(drawn[start : start + 5]) == ["0", "1", "2", "3", "4"] for start in (0, 5, 10))
    assert drawn == [task.id for task in islice(epochs(tasks, 3), 15)]
    assert drawn != [task.id for task in islice(epochs(tasks, 4), 15)]


# ----------------------------------------------------------------------------------------------------- intervals


def test_an_interval_holds_its_mean_and_repeats():
    interval = Interval.of([0.0, 1.0, 1.0, 1.0] * 10)
    assert interval.mean == 0.75 and 0.55 < interval.low < 0.7 < 0.8 < interval.high < 0.9
    assert interval == Interval.of([0.0, 1.0, 1.0, 1.0] * 10)
    assert str(Interval(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert Interval.of([2.0]) == Interval(2.0, 2.0, 2.0)


def test_a_gain_is_taken_task_by_task_where_both_have_a_score():
    def evaluation(scores: dict[str, float]) -> Evaluation:
        return Evaluation("e", scores, {}, 0)

    before = evaluation({"a": 0.0, "b": 1.0, "c": 0.5})
    after = evaluation({"a": 0.5, "b": 1.5, "d": 9.0})
    assert after.gain_over(before) == Interval(0.5, 0.5, 0.5)
    with pytest.raises(UsageError, match="no task"):
        evaluation({"a": 1.0}).gain_over(evaluation({"b": 1.0}))


def test_settings_are_kept_as_json():
    assert json.loads(TrainConfig.of(model="m").model_dump_json())["model"] == "m"

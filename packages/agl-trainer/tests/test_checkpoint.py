"""A checkpoint is whole or not used; what it brings back is everything the next step depends on."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agl.errors import ConfigError, RunError, UsageError
from agl_trainer import Trainer, Warmup, checkpoint
from agl_trainer.algorithms.sft import SFT
from agl_trainer.checkpoint import DamagedCheckpoint
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy

from .conftest import new_policy, weights_of
from .test_policy import batch

KINDS = pytest.mark.parametrize(
    "settings", [{}, {"lora_rank": 4}, {"algorithm": "ppo"}], ids=["full", "lora", "critic"]
)


def keep(policy: Policy, root: Path, name: str, reward: float | None = None) -> Path:
    tensors, values = checkpoint.capture(policy)
    return checkpoint.write(root, tensors, {"position": {"reward": reward}, "policy": values}, name)


def bring_back(policy: Policy, folder: Path) -> None:
    checkpoint.verify(folder)
    tensors, state = checkpoint.read(folder)
    checkpoint.restore(policy, tensors, state["policy"])


@KINDS
def test_what_is_restored_goes_on_as_if_nothing_had_happened(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any]
):
    first = new_policy(model_folder, learning_rate=1e-3, **settings)
    step = batch(first)
    first.update([step], SFT())
    first.version = 7
    folder = keep(first, tmp_path, "000001")
    drawn = random.random(), np.random.rand(), np.random.standard_normal(), torch.rand(3)

    second = new_policy(model_folder, learning_rate=0.5, **settings)
    bring_back(second, folder)
    assert second.version == 7
    again = random.random(), np.random.rand(), np.random.standard_normal(), torch.rand(3)
    assert again[:3] == drawn[:3] and torch.equal(again[3], drawn[3])
    for _ in range(2):
        first.update([step], SFT())
        second.update([step], SFT())
    wanted, got = first.trained | first.buffers, second.trained | second.buffers
    assert wanted.keys() == got.keys() and all(torch.equal(value, got[name]) for name, value in wanted.items())


def test_nothing_is_pickled(policy: Policy, tmp_path: Path):
    policy.update([batch(policy)], SFT())
    folder = keep(policy, tmp_path, "000001")
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    for path in folder.iterdir():
        assert not path.read_bytes().startswith((b"PK", pickle.PROTO))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["cut", "changed", "missing"])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
def test_a_damaged_checkpoint_names_the_file_and_the_one_before_is_used(
    policy: Policy, tmp_path: Path, capfd: pytest.CaptureFixture[str], harm: Callable[[Path], None], name: str
):
    policy.update([batch(policy)], SFT())
    good, bad = keep(policy, tmp_path, "000001"), keep(policy, tmp_path, "000002")
    harm(bad / name)
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        checkpoint.verify(bad)
    assert checkpoint.newest(tmp_path) == good
    said = capfd.readouterr().err
    assert "checkpoint 000002 is damaged and not used" in said and name in said


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weights.safetensors": 3}'])
def test_a_manifest_that_says_nothing_is_damage(policy: Policy, tmp_path: Path, content: str):
    folder = keep(policy, tmp_path, "000001")
    (folder / "manifest.json").write_text(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        checkpoint.verify(folder)
    assert checkpoint.newest(tmp_path) is None


def test_what_was_half_written_is_not_seen_and_goes_away(policy: Policy, tmp_path: Path):
    whole = keep(policy, tmp_path, "000001")
    shutil.copytree(whole, tmp_path / ".000002.partial")
    assert checkpoint.newest(tmp_path) == whole and checkpoint.found(tmp_path) == [whole]
    keep(policy, tmp_path, "000003")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001", "000003"]


def test_every_file_is_on_disk_before_the_name_is_there(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    monkeypatch.setattr(checkpoint, "to_disk", lambda path: events.append(path.name))
    rename = checkpoint.os.rename
    monkeypatch.setattr(checkpoint.os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    keep(policy, tmp_path / "checkpoints", "000001")
    at = events.index("rename")
    assert {*events[:at]} >= {path.name for path in (tmp_path / "checkpoints" / "000001").iterdir()}
    assert events[at - 1] == ".000001.partial" and events[at + 1 :] == ["checkpoints"]
    assert events[0] == tmp_path.name, "the new folder of checkpoints is itself on disk"


def test_the_last_ones_and_the_best_are_kept(policy: Policy, tmp_path: Path):
    for number, reward in enumerate([0.1, 0.9, None, 0.5, None, None]):
        checkpoint.prune(tmp_path, 2, keep(policy, tmp_path, f"{number:06d}", reward))
    assert [path.name for path in checkpoint.found(tmp_path)] == ["000001", "000004", "000005"]


def test_a_damaged_one_that_was_passed_over_takes_no_place_of_a_whole_one(policy: Policy, tmp_path: Path):
    keep(policy, tmp_path, "000004")
    flip(keep(policy, tmp_path, "000008") / "weights.safetensors")
    assert checkpoint.newest(tmp_path) == tmp_path / "000004"  # the run goes on from there, and keeps more often now
    checkpoint.prune(tmp_path, 1, keep(policy, tmp_path, "000005"))
    assert checkpoint.newest(tmp_path) == tmp_path / "000005"
    assert checkpoint.found(tmp_path) == [tmp_path / "000005"]


def test_a_checkpoint_of_another_model_is_told(model_folder: Path, tmp_path: Path):
    folder = keep(new_policy(model_folder), tmp_path, "000001")
    with pytest.raises(RunError, match=r"the checkpoint is of another model"):
        bring_back(new_policy(model_folder, lora_rank=4), folder)


def test_a_checkpoint_of_another_format_is_told(policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    folder = keep(policy, tmp_path, "000001")
    monkeypatch.undo()
    with pytest.raises(RunError, match=r"has format 99, written by another agl"):
        checkpoint.read(folder)
    assert weights_of(policy.model)


# -------------------------------------------------------------------------------------------------- settings


async def agent(task: Any, llm: Any) -> float:
    raise AssertionError("nothing is played in these tests")


TASKS = [{"id": "a"}, {"id": "b"}]
NO_MODEL = "no/such/model"
"""No id of a hub either, so nobody is asked for it."""


def run_folder(tmp_path: Path, **settings: Any) -> Path:
    """What a run with these settings leaves behind before anything happened."""
    trainer = Trainer(agent, TASKS, model=NO_MODEL, **settings)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(trainer.session._identity))
    return folder


def resume(folder: Path, tasks: Any = TASKS, **settings: Any) -> None:
    with Trainer(agent, tasks, resume=folder, **{"model": NO_MODEL, **settings}).session:
        raise AssertionError("it must not begin")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"learning_rate": 0.1}, r"learning_rate was 1e-05 and is 0\.1"),
        (
            {"algorithm": {"name": "grpo", "kl_coef": 0.1}},
            r"algorithm was 'grpo' and is \{'name': 'grpo', 'kl_coef': 0\.1",
        ),
        ({"seed": 3, "group_size": 2}, r"group_size was 8 and is 2; seed was 0 and is 3"),
        ({"tasks": [{"id": "a"}]}, r"tasks was '\w+' and is '\w+'"),
        ({"eval_tasks": TASKS}, r"eval_tasks was"),
        ({"warmup": Warmup(demonstrate=lambda *_: "")}, r"warmup was None and is \[20, 16, None, None"),
    ],
)
def test_settings_that_would_make_it_another_run_are_told_with_both_values(
    tmp_path: Path, settings: dict[str, Any], text: str
):
    with pytest.raises(ConfigError, match=rf"resume='.*run': that run had other settings: {text}"):
        resume(run_folder(tmp_path), **settings)


def test_settings_that_change_no_mathematics_may_change(tmp_path: Path):
    assert set(TrainConfig.model_fields) >= checkpoint.MAY_CHANGE
    others = {"steps": 99, "micro_batch_tokens": 77, "workers": 2, "checkpoint_every": 3, "output_dir": "elsewhere"}
    with pytest.raises(UsageError, match=r"model '.*' could not be loaded"):  # that far it came
        resume(run_folder(tmp_path), **others)


def test_a_schedule_that_ends_with_the_last_step_fixes_how_many_there_are(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"steps was 20 and is 30"):
        resume(run_folder(tmp_path, lr_schedule="linear"), lr_schedule="linear", steps=30)


def test_a_folder_that_is_no_run_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is no folder of a run: .*run\.json"):
        resume(tmp_path)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path):
    import fcntl

    folder = run_folder(tmp_path)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another process trains in .*run; wait for its end"):
            resume(folder)


def test_the_key_of_ones_own_endpoint_is_not_kept(tmp_path: Path):
    own = {"base_url": "http://x/v1", "model": "m", "api_key": "very-secret"}
    folder = run_folder(tmp_path, unselected=own)
    assert "very-secret" not in (folder / "run.json").read_text()
    with pytest.raises(UsageError, match=r"could not be loaded"):
        resume(folder, unselected={**own, "api_key": "another"})

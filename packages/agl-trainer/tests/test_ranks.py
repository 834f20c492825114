"""Several processes train as one does: real ones, on gloo, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from agl.errors import ConfigError
from agl_trainer import policy as policies
from agl_trainer import updates
from agl_trainer.algorithms.sft import SFT
from agl_trainer.batch.balance import shares
from agl_trainer.commands import trainer_from
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy

from . import on_ranks
from .conftest import relative

PROGRAM = str(Path(__file__).with_name("on_ranks.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
TORCHRUN += ["localhost:0"]  # a free port
LAUNCH = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
GUIDE = Path(__file__).parents[3] / "docs" / "scale.md"
LIMIT = 180.0
"""Seconds; a launch takes ten on a machine with nothing else to do."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def start(*command: str, **environment: str) -> tuple[int, str, float]:
    """Run to the end; returns exit status, output and seconds. A process that hangs is killed with its children."""
    # Without its bytecode each process would compile torch anew.
    dropped = ("ACCELERATE_", "FSDP_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {LIMIT:g} s: {output[-3000:]}")
    return process.returncode, output, time.monotonic() - began


def on_cpu(*command: str) -> str:
    """Run under a launcher on the CPU; it must end well."""
    status, output, _ = start(*command, ACCELERATE_USE_CPU="true")
    assert status == 0, output[-5000:]
    return output


def config_file(name: str, folder: Path) -> str:
    """The file as the documentation shows it."""
    (text,) = re.findall(rf"<!-- file: {name} -->\n```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (folder / name).write_text(text)
    return str(folder / name)


# ------------------------------------------------------------------------------------------------- shares of rows


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 6))
def test_rows_are_shared_evenly_by_cost(costs: list[int], ranks: int):
    taken = shares(costs, ranks)
    assert sorted(index for own in taken for index in own) == list(range(len(costs)))
    assert all(own == sorted(own) for own in taken) and len(taken) == ranks
    loads = [sum(costs[index] for index in own) for own in taken]
    best = max(sum(costs) / ranks, max(costs, default=0))
    assert max(loads) <= (2 - 1 / ranks) * best + 1e-9


def test_the_longest_row_goes_first_and_equal_ones_take_turns():
    assert shares([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert shares([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]
    assert shares([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert shares([5], 3) == [[0], [], []]


# -------------------------------------------------------------------------------------------------------- a step


DICE = """
async def dice(task, llm):
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4)
    return float(sum(map(ord, answer.choices[0].message.content or "")) % 7)
"""
TRAIN = """
agent = "dice.py:dice"
tasks = "tasks.jsonl"
model = "float32"
output_dir = "runs"
steps = 2
tasks_per_step = 2
group_size = 4
max_length = 256
learning_rate = 1e-3
lr_schedule = "linear"
micro_batch_tokens = 128
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks.new_models(folder)
    (folder / "dice.py").write_text(DICE)
    (folder / "tasks.jsonl").write_text('{"id": "a", "question": "Say a"}\n{"id": "b", "question": "Say b"}\n')
    (folder / "train.toml").write_text(TRAIN)
    on_cpu(*TORCHRUN, PROGRAM, "steps", str(folder))
    return folder


@pytest.fixture(scope="module")
def alone(ranks: Path) -> Mapping[str, torch.Tensor]:
    places = {name: ranks / name for name in TOLERANCE}
    return on_ranks.gradients(places) | {f"{name}, ppo": grad for name, grad in on_ranks.of_ppo(places).items()}


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_have_the_gradient_of_one(ranks: Path, alone: Mapping[str, torch.Tensor]):
    """Whatever the micro-batch, also where one rank has no row at all, and with a critic."""
    for rank in range(2):
        found = torch.load(ranks / f"rank{rank}.pt", weights_only=True)
        assert found.keys() == alone.keys() and len(found) == 8
        for name, gradient in alone.items():
            assert relative(found[name], gradient) < TOLERANCE[name.split(",")[0]], name


@pytest.mark.slow
def test_ranks_in_trouble_agree(ranks: Path):
    first, second = told(ranks)
    assert first["size"] == second["size"] == 2
    assert first["skipped"] and second["skipped"], "NaN on one rank is NaN on all"
    assert first["error"] == "RunError: rank 1 failed, and so this one stops too: MemoryError: no room on this one"
    assert second["error"] == "MemoryError: no room on this one"
    assert first["led"] == "ZeroDivisionError: division by zero"
    assert second["led"] == "RunError: rank 0 failed, and so this one stops too: ZeroDivisionError: division by zero"
    assert first["after"] == second["after"] and first["after"]["rows"] == 7
    assert 1 <= first["after"]["imbalance"] < 1.5
    assert first["fingerprint"] == second["fingerprint"]


@pytest.mark.slow
def test_two_ranks_train_an_adapter_for_each_agent_as_one_does(ranks: Path):
    """Also where a rank, or all of them, have no row of some agent: its adapter stays where it is."""
    one = on_ranks.of_agents(ranks / "float32")
    both_norms, both, norms, after = (one[place : place + 2] for place in (0, 2, 4, 6))
    assert min(both_norms) > 0 and norms[0] > 0 == norms[1]
    assert after[1] == both[1] and after[0] != both[0]
    for rank in told(ranks):
        assert rank["agents"] == pytest.approx(one, rel=1e-5)
        assert rank["agents"][7] == rank["agents"][3]


@pytest.mark.slow
def test_two_ranks_go_on_from_a_checkpoint_as_if_nothing_had_happened(ranks: Path):
    """With a critic, its optimiser state and its count of steps; bit by bit, and the same on both."""
    first, second = (rank["resumed"] for rank in told(ranks))
    assert len(first) == 2 and first[0] == first[1]
    assert first == second


@pytest.fixture(scope="module")
def doomed(ranks: Path) -> tuple[int, str]:
    """Exit status and output of a run in shards that one rank left in the middle of its second step."""
    command = (*LAUNCH, config_file("fsdp2.yaml", ranks), PROGRAM, "doomed", str(ranks))
    return start(*command, ACCELERATE_USE_CPU="true")[:2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_fails_in_shards_ends_all_with_the_reason(doomed: tuple[int, str], ranks: Path):
    status, output = doomed
    assert status != 0
    assert "MemoryError: no room on this one" in output
    (run,) = (ranks / "doomed").iterdir()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["000001"]


@pytest.fixture(scope="module")
def shards(ranks: Path, doomed: tuple[int, str]) -> Path:
    on_cpu(*LAUNCH, config_file("fsdp2.yaml", ranks), PROGRAM, "sharded", str(ranks))
    return ranks


@pytest.fixture(scope="module")
def trained(ranks: Path) -> Path:
    """The model of the run on one process."""
    return trainer_from(ranks / "train.toml").fit().model


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def far(one: Path, other: Path) -> float:
    """Largest difference of two models' weights."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and first
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_shards_have_the_gradient_of_one_process(shards: Path, alone: Mapping[str, torch.Tensor]):
    """FSDP2 with activation checkpointing, against one process without either."""
    for rank in range(2):
        found = torch.load(shards / f"sharded{rank}.pt", weights_only=True)
        assert found.keys() == {name for name in alone if "ppo" not in name}
        for name, gradient in found.items():
            assert relative(gradient, alone[name]) < TOLERANCE[name.split(",")[0]], name
        assert 0.4 < json.loads((shards / f"sharded{rank}.json").read_text())["share"] < 0.6


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_in_shards_ends_with_the_model_of_one_process(shards: Path, trained: Path, ranks: Path):
    first, second = (Path(json.loads((shards / f"sharded{rank}.json").read_text())["run"]) for rank in range(2))
    assert first == second != trained
    assert far(first, trained) < 1e-4 < far(first, ranks / "float32")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_in_shards_that_failed_goes_on_and_ends_with_the_model_of_one_process(
    shards: Path, trained: Path, ranks: Path
):
    model = Path(json.loads((shards / "sharded0.json").read_text())["gone on"])
    assert far(model, trained) < 1e-4 < far(model, ranks / "float32")
    steps = [json.loads(line)["step"] for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_agl_train_under_accelerate_launch_ends_with_the_model_of_one_process(ranks: Path, trained: Path):
    """The same rollouts and the same two steps; one folder, one log, one result told."""
    output = on_cpu(*LAUNCH, config_file("cpu.yaml", ranks), "-m", "agl", "train", str(ranks / "train.toml"))
    (model,) = re.findall(r"^model: (.*)$", output, re.MULTILINE)
    assert far(Path(model), trained) < 1e-4 < far(Path(model), ranks / "float32")
    lines, wanted = (
        [json.loads(line) for line in (place.parent / "metrics.jsonl").read_text().splitlines()]
        for place in (Path(model), trained)
    )
    assert [line["step"] for line in lines] == [line["step"] for line in wanted] == [1, 2]
    for line, other in zip(lines, wanted, strict=True):
        assert line["reward"] == other["reward"] and line["rows"] == other["rows"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert 1 <= line["imbalance"] < 2 and "imbalance" not in other


# ------------------------------------------------------------------------------------------------- one process


def test_activation_checkpointing_computes_again_and_changes_no_gradient(model_folder: Path):
    """In evaluation mode transformers' own switch would do nothing."""
    found, calls = [], []
    for again in (False, True):
        policy = on_ranks.new_policy(model_folder, "float32", activation_checkpointing=again)
        times = [0]
        policy.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, times=times: times.__setitem__(0, times[0] + 1)
        )
        policy.optimizer.register_step_pre_hook(
            lambda optimizer, *_: found.append(
                torch.cat([p.grad.reshape(-1) for p in optimizer.param_groups[0]["params"]])
            )
        )
        updates.learn(policy, on_ranks.rows(3), SFT(), policy.config, 1)
        calls.append(times[0])
        assert not any(module.training for module in policy.model.modules())
        policy.close()
    assert calls[1] == 2 * calls[0] > 0
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-7)


def test_a_learning_rate_falls_over_the_steps():
    def rates(kind: str) -> list[float]:
        config = TrainConfig.of(model="m", steps=4, lr_schedule=kind)
        return [round(config.decay(step), 6) for step in range(4)]

    assert rates("constant") == [1.0] * 4
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine") == [1.0, 0.853553, 0.5, 0.146447]


def test_a_learning_rate_is_scaled_from_where_it_began(model_folder: Path):
    policy = on_ranks.new_policy(model_folder, "float32")
    for factor in (0.5, 0.1, 1.0):
        policy.scale_learning_rate(factor)
        assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(factor * 1e-3)
    policy.close()


# ------------------------------------------------------------------------------------------------------ launching


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    "launched, settings, message",
    [
        (FSDP2, {}, "at least two"),
        (FSDP2 | {"FSDP_VERSION": "1"}, {}, "fsdp_version: 2"),
        (FSDP2 | {"FSDP_OFFLOAD_PARAMS": "true"}, {}, "nothing to offload"),
        (FSDP2 | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "fsdp_cpu_ram_efficient_loading to false"),
        (FSDP2 | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "activation_checkpointing=True"),
        (FSDP2 | {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, "TRANSFORMER_BASED_WRAP"),
        (FSDP2, {"lora_rank": 4}, "data parallelism.*vLLM"),
        (FSDP2, {"algorithm": "ppo"}, "a critic is not sharded"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "mixed_precision='bf16', but precision='float32' decides"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"precision": "bfloat16"}, "mixed_precision='fp16'"),
    ],
)
def test_settings_of_the_launcher_that_agl_would_not_follow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Path,
    launched: Mapping[str, str],
    settings: Mapping[str, Any],
    message: str,
):
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Policy(TrainConfig.of(model=str(model_folder), **settings))
    AcceleratorState._reset_state()


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"WORLD_SIZE": "2"},
            r"asked for 2 processes, but Accelerate made a run of 1 .*ACCELERATE_USE_CPU=true torchrun",
        ),
        ({"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}, r"asked for several processes.*a run of 1"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, r"ACCELERATE_USE_DEEPSPEED='true'.*FSDP2"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, r"micro_batch_tokens decides"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, r"leave it out"),
    ],
)
def test_what_the_launcher_would_not_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str], message: str
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        policies.join.__wrapped__()

"""Several processes train as one does: real ones, on gloo, started as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_trainer import policy as policies
from agl_trainer.batch.balance import shares

from . import on_ranks
from .conftest import relative

PROGRAM = str(Path(__file__).with_name("on_ranks.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
TORCHRUN += ["localhost:0"]  # a free port
LAUNCH = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
LIMIT = 180.0
"""Seconds; a launch takes ten on a machine with nothing else to do."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def start(*command: str, **environment: str) -> tuple[int, str, float]:
    """Run to the end; returns exit status, output and seconds. A process that hangs is killed with its children."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks.models(folder)
    on_cpu(*TORCHRUN, PROGRAM, "steps", str(folder))
    return folder


@pytest.fixture(scope="module")
def alone(ranks: Path) -> Mapping[str, torch.Tensor]:
    return on_ranks.gradients({name: ranks / name for name in TOLERANCE})


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_have_the_gradient_of_one(ranks: Path, alone: Mapping[str, torch.Tensor]):
    """Whatever the micro-batch, and also where one rank has no row at all."""
    for rank in range(2):
        found = torch.load(ranks / f"rank{rank}.pt", weights_only=True)
        assert found.keys() == alone.keys() and len(found) == 6
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


# ------------------------------------------------------------------------------------------------------ launching


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

"""Tiny models, and rows as the loss sees them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from agl.protocols import Sampling, Token
from agl.records import Row, Transition
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from agl_trainer.testing import tiny_model

torch.set_num_threads(1)  # two threads on tiny matrices cost more than they bring


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that every test may load and none may write to."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model_folder: Path) -> Policy:
    """The tiny model as a policy."""
    return new_policy(model_folder)


def new_policy(folder: Path, **settings: Any) -> Policy:
    return Policy(TrainConfig.of(model=str(folder), **settings))


@pytest.fixture
def engine(policy: Policy) -> Iterator[TransformersEngine]:
    """An engine of four slots."""
    engine = new_engine(policy)
    yield engine
    engine.stop()


def new_engine(policy: Policy, *, slots: int = 4, max_length: int = 512, seed: int = 0) -> TransformersEngine:
    engine = TransformersEngine(policy, slots=slots, max_length=max_length, seed=seed)
    engine.start()
    return engine


async def sample(engine: TransformersEngine, prompt: Sequence[int], **sampling: Any) -> list[Token]:
    """One answer of an engine; 8 tokens unless told otherwise."""
    wanted = Sampling(**{"max_tokens": 8, **sampling})
    return [token async for token in engine.generate(prompt, wanted)]


def transition(
    prompt: Sequence[int], response: Sequence[int], rollout: str = "r", agent: str = "main", **fields: Any
) -> Transition:
    """A transition; its logprobs are -1 unless told otherwise."""
    return Transition(
        **{
            "rollout": rollout,
            "agent": agent,
            "call": f"{rollout}/{len(prompt)}",
            "prompt_ids": tuple(prompt),
            "response_ids": tuple(response),
            "logprobs": (-1.0,) * len(response),
            **fields,
        }
    )


def row_of(prompt: Sequence[int], tokens: Sequence[Token], temperature: float = 1.0, rollout: str = "r") -> Row:
    """What an engine sampled, as a training row."""
    observed, sampled = len(prompt), len(tokens)
    return Row(
        rollout=rollout,
        agent="main",
        token_ids=(*prompt, *(token.id for token in tokens)),
        sampled=(False,) * observed + (True,) * sampled,
        logprobs=(0.0,) * observed + tuple(token.logprob for token in tokens),
        temperatures=(1.0,) * observed + (temperature,) * sampled,
        transitions=(-1,) * observed + (0,) * sampled,
    )


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def state_of(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


# ------------------------------------------------------------------------------------------------ golden vectors


def cases(folder: Path, name: str, *functions: str) -> tuple[list[Mapping[str, Any]], float]:
    """The cases of a golden file (of some functions), and the relative tolerance that the file names."""
    golden = json.loads((folder / "vectors" / f"{name}.json").read_text())
    found = [case for case in golden["cases"] if not functions or case["fn"] in functions]
    assert found, f"{name} has no case of {functions}"
    return found, golden["rtol"]


def tensor(numbers: Any) -> torch.Tensor:
    """Nested lists in float64; ``'nan'`` and ``'inf'`` are written as strings."""

    def read(value: Any) -> Any:
        return [read(item) for item in value] if isinstance(value, list) else float(value)

    return torch.tensor(read(numbers), dtype=torch.float64)


def close(got: Any, wanted: Any, rtol: float, atol: float = 1e-9) -> None:
    """Compare numbers, lists or tensors; the golden files keep ten digits, hence the absolute tolerance."""
    got, wanted = (
        x.detach().double() if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=torch.float64)
        for x in (got, wanted)
    )
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative difference of two gradients; both must hold something."""
    norm = float(wanted.norm())
    assert norm > 0 and math.isfinite(norm)
    return float((got - wanted).norm()) / norm

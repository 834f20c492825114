"""An algorithm of somebody else: one file and one hook, and it trains like those that ship."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import agl
from agl import plugins
from agl.errors import ConfigError
from agl.protocols import LossInputs, StepTokens, TokenAdvantages
from agl_trainer import Trainer

# ------------------------------------------------------------ the one file, as somebody else would publish it ----


@dataclass(frozen=True, kw_only=True)
class Quantile:
    """Compares with a quantile of the group instead of its mean, and fades the advantage along the answer."""

    quantile: float = 0.5
    fading: float = 1.0
    aggregation: str = "rollout"
    needs: tuple[str, ...] = ("ref_logprobs", "entropies")

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> list[float]:
        members = {name: sorted(v for v, g in zip(values, groups, strict=True) if g == name) for name in groups}
        base = {name: own[int(self.quantile * (len(own) - 1))] for name, own in members.items()}
        return [value - base[group] for value, group in zip(values, groups, strict=True)]

    def token_advantages(self, step: StepTokens) -> TokenAdvantages:
        result = [0.0] * len(step.rewards)
        for places in step.episodes:
            total = sum(step.rewards[place] for place in places)
            for age, place in enumerate(places):
                result[place] = total * self.fading**age
        return TokenAdvantages(result)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        assert inputs.ref_logprobs is not None and inputs.entropies is not None
        loss = -(inputs.weights * inputs.advantages * inputs.logprobs).sum()
        told = {
            "largest": (inputs.weights * inputs.advantages.abs()).sum(),
            "spread": (inputs.weights * inputs.entropies).sum(),
        }
        return loss, {name: value.detach() for name, value in told.items()}


@agl.hookimpl
def agl_register_algorithms(register: Any) -> None:
    register("quantile", Quantile)
    register("greedy", lambda: Greedy())


class Greedy:
    """The least that an algorithm can be, but it asks for what nobody has."""

    aggregation = "token"
    needs = ("old_logprobs", "crystal_ball")


# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def published() -> Iterator[None]:
    """This module as a plugin."""
    import sys

    manager = plugins.manager()
    manager.register(sys.modules[__name__], "quantile")
    yield
    manager.unregister(name="quantile")


async def count_letters(task: Mapping[str, Any], llm: agl.LLM) -> float:
    async with llm.async_client() as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
    return sum(" " <= character <= "~" for character in answer.choices[0].message.content or "") / 4


def train(model_folder: Path, tmp_path: Path, algorithm: Any, **settings: Any) -> list[dict[str, Any]]:
    """Two steps through the whole loop; returns the log of the steps."""
    trainer = Trainer(
        count_letters,
        [{"id": name, "question": f"Say {name}"} for name in "ab"],
        model=str(model_folder),
        output_dir=str(tmp_path),
        algorithm=algorithm,
        **{"steps": 2, "tasks_per_step": 2, "group_size": 6, "max_length": 128, "slots": 16, "learning_rate": 1e-3}
        | settings,
    )
    trainer.fit()
    lines = [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


@pytest.mark.slow
@pytest.mark.usefixtures("published")
def test_an_algorithm_of_somebody_else_trains_with_a_setting_of_its_own(model_folder: Path, tmp_path: Path):
    steps = train(model_folder, tmp_path, {"name": "quantile", "quantile": 0.0, "fading": 0.5})
    assert [line["version"] for line in steps] == [1, 2]
    for line in steps:
        # The worst of each group is the baseline, so no advantage is below 0 and the mean is that of the loss.
        assert line["grad_norm"] > 0 and line["largest"] > 0 and 0 < line["spread"] < 6
        # With fading .5 the four tokens of an answer weigh 1, .5, .25 and .125.
        assert line["largest"] < 0.5


@pytest.mark.usefixtures("published")
def test_its_settings_are_checked_like_ours():
    with pytest.raises(ConfigError, match=r"'quantile' has no setting 'quantil'; did you mean 'quantile'"):
        Trainer(count_letters, [{}], model="m", algorithm={"name": "quantile", "quantil": 0.1})
    with pytest.raises(ConfigError, match=r"write algorithm=\{'name': 'quantile', 'fading': 0.5\}"):
        Trainer(count_letters, [{}], model="m", algorithm="quantile", fading=0.5)
    with pytest.raises(ConfigError, match=r"'greedy' needs \['crystal_ball'\]; what can be had: .*'values'"):
        Trainer(count_letters, [{}], model="m", algorithm="greedy")


SHIPPED: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({"name": "ppo", "kl_coef": 0.05, "gae_lambda": 0.9, "value_warmup": 1}, {"epochs": 2}, {"value_loss", "kl"}),
    ({"name": "ppo", "critic": "model"}, {"lora_rank": 4}, {"value_loss", "explained_variance"}),
    ({"name": "rloo", "kl_coef": 0.05, "kl_in": "reward"}, {}, set()),
    ({"name": "reinforce_pp", "kl_coef": 0.05}, {}, {"kl"}),
    ({"name": "reinforce_pp", "group_baseline": True, "kl_in": "loss", "kl_coef": 0.05}, {}, {"kl"}),
    ({"name": "gspo", "correction": "geometric"}, {"epochs": 2, "learning_rate": 1e-5}, set()),
    ({"name": "cispo", "entropy_coef": 0.01, "correction": "bypass"}, {"epochs": 2}, {"entropy"}),
    ({"name": "grpo", "scale": "none", "aggregation": "constant"}, {}, set()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "settings", "told"), SHIPPED, ids=lambda value: str(value)[:40])
def test_every_algorithm_trains_through_the_whole_loop(
    model_folder: Path, tmp_path: Path, algorithm: dict[str, Any], settings: dict[str, Any], told: set[str]
):
    steps = train(model_folder, tmp_path, algorithm, **settings)
    assert len(steps) == 2 and steps[-1]["version"] >= 1 and steps[-1]["grad_norm"] > 0
    for line in steps:
        assert told | {"loss", "clipped", "mismatch_kl", "corrected"} <= set(line)
        assert abs(line["mismatch_kl"]) < 1e-3 or settings.get("epochs", 1) > 1
    if algorithm.get("value_warmup"):
        assert steps[0]["grad_norm"] == 0.0 and steps[0]["version"] == 0 and steps[0]["critic_grad_norm"] > 0

"""An outside plugin is heard: through each hook's one typed function, and in a real training run, in firing order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agl
from agl import hookimpl, plugins, scope
from agl.errors import PluginError, RunError
from agl.records import Call, Choice, Reward, Rollout, Step, StepKind, Task, Transition
from agl_trainer import Trainer
from agl_trainer.testing import tiny_model


def rollout(**fields: Any) -> Rollout:
    """A finished rollout of one agent that made one call."""
    choice = Choice(response_ids=(3, 4), logprobs=(-0.1, -0.2))
    call = Call(id="c1", rollout="r1", attempt=1, prompt_ids=(1, 2), choices=(choice,))
    return Rollout(id="r1", task=Task(id="t1", data={}), batch="b", calls=(call,), returned=Reward.of(1.0), **fields)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Load a plugin beside the core's defaults, for one test."""
    manager = plugins.new_manager()
    monkeypatch.setattr(plugins, "manager", lambda: manager)
    return lambda plugin: plugins.register(manager, plugin, "outside")


class Registers:
    """Registers one thing of each kind."""

    @hookimpl
    def agl_register_commands(self, register: Any) -> None:
        register("c", 1)

    @hookimpl
    def agl_register_algorithms(self, register: Any) -> None:
        register("a", 2)

    @hookimpl
    def agl_register_backends(self, register: Any) -> None:
        register("b", 3)

    @hookimpl
    def agl_register_stores(self, register: Any) -> None:
        register("s", 4)

    @hookimpl
    def agl_register_runners(self, register: Any) -> None:
        register("r", 5)


def test_named_things_are_found_and_an_unknown_name_lists_the_known(load: Callable[[object], None]) -> None:
    load(Registers())
    assert plugins.commands().find("c") == 1
    assert plugins.algorithms().find("a") == 2
    assert plugins.backends().find("b") == 3
    assert plugins.stores().find("s") == 4
    assert plugins.runners().find("r") == 5
    with pytest.raises(PluginError, match=r"no algorithm is named 'grop'.*known:.*a"):
        plugins.algorithms().find("grop")


def test_agl_instrument_starts_every_plugin_and_stops_them_in_reverse(load: Callable[[object], None]) -> None:
    said: list[str] = []

    class Watcher:
        @hookimpl
        def agl_instrument(self) -> Callable[[], None]:
            said.append("start")
            return lambda: said.append("stop")

    load(Watcher())
    stop = plugins.instrument()
    assert said == ["start"]
    stop()
    assert said == ["start", "stop"]


def test_agl_current_call_prefers_the_plugin_and_falls_back_to_the_scope(load: Callable[[object], None]) -> None:
    answers: list[scope.CallInfo | None] = [scope.CallInfo(agent="planner"), None]

    class Namer:
        @hookimpl
        def agl_current_call(self) -> scope.CallInfo | None:
            return answers.pop(0)

    load(Namer())
    with agl.agent("writer"):
        first, second = plugins.current_call(), plugins.current_call()
    assert first is not None and first.agent == "planner"
    assert second is not None and second.agent == "writer"


def test_agl_build_transitions_may_replace_the_join_rule(load: Callable[[object], None]) -> None:
    assert len(plugins.build_transitions(rollout())) == 1

    class Nothing:
        @hookimpl
        def agl_build_transitions(self, rollout: Rollout) -> Sequence[Transition]:
            return []

    load(Nothing())
    assert plugins.build_transitions(rollout()) == []


async def test_agl_compute_reward_adds_to_what_the_agent_returned_and_may_be_awaited(
    load: Callable[[object], None],
) -> None:
    class Judge:
        @hookimpl
        async def agl_compute_reward(self, rollout: Rollout) -> Mapping[str, float]:
            return {"reward": 0.25, "style": -1.0}

    load(Judge())
    assert await plugins.compute_reward(rollout()) == {"reward": 1.25, "style": -1.0}


def test_agl_signal_reward_hears_every_plugin_on_every_step(load: Callable[[object], None]) -> None:
    class Strict:
        @hookimpl
        def agl_signal_reward(self, step: Step) -> Mapping[str, float] | None:
            return {"refused": 1.0, "tool_error": 0.5} if step.kind in ("tool_error", "model_error") else None

    load(Strict())
    kinds: list[StepKind] = ["tool_error", "model_error", "model_start"]
    steps = [Step(id=str(place), kind=kind, call_id="c1") for place, kind in enumerate(kinds)]
    assert plugins.signal_rewards(steps) == [
        {"refused": 1.0, "tool_error": 1.5},
        {"refused": 1.0, "tool_error": 0.5},
        {},
    ]
    plugins.check_signals(["refused", "empty_result"])
    with pytest.raises(
        PluginError, match=r"no signal is named 'refusd'; did you mean 'refused'\?.*known: empty_result, p"
    ):
        plugins.check_signals(["refusd"])


def test_agl_group_key_may_compare_by_anything(load: Callable[[object], None]) -> None:
    class ByLength:
        @hookimpl
        def agl_group_key(self, transition: Transition, turn: int) -> Any:
            return f"{len(transition.prompt_ids)} tokens" if transition.agent == "main" else answer

    answer: Any = None
    load(ByLength())
    ran = rollout()
    (mine,) = plugins.build_transitions(ran)
    other = replace(mine, agent="judge", call="c2")
    assert plugins.group_keys(ran, [mine, other], "turn") == ["2 tokens", "'b/t1' 'judge' turn 0"]
    answer = 3
    with pytest.raises(RunError, match="agl_group_key returned 3; return text"):
        plugins.group_keys(ran, [other], "turn")


def test_agl_assign_credit_gives_one_number_to_each_transition(load: Callable[[object], None]) -> None:
    shares = [0.75]

    class Spread:
        @hookimpl
        def agl_assign_credit(self, rollout: Rollout, transitions: Sequence[Transition]) -> Sequence[float]:
            return shares

    load(Spread())
    (credited,) = plugins.assign_credit(rollout(), plugins.build_transitions(rollout()))
    assert credited.reward == 0.75
    shares.append(1.0)
    with pytest.raises(RunError, match="2 values for 1 transitions"):
        plugins.assign_credit(rollout(), plugins.build_transitions(rollout()))


class Diary:
    """Writes down what the trainer tells."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @hookimpl
    def agl_train_start(self, trainer: Any) -> None:
        self.said.append("start")

    @hookimpl
    def agl_weights_updated(self, version: int) -> None:
        self.said.append(f"version {version}")

    @hookimpl
    def agl_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        assert "reward" in metrics
        self.said.append(f"step {step}")

    @hookimpl
    def agl_log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.said.append(f"log {step}")

    @hookimpl
    def agl_train_end(self, trainer: Any) -> None:
        self.said.append("end")


@pytest.fixture
def diary() -> Iterator[Diary]:
    """A plugin of the real manager, for one test."""
    plugin = Diary()
    plugins.register(plugins.manager(), plugin, "diary")
    yield plugin
    plugins.manager().unregister(plugin)


def answer(task: Mapping[str, Any], llm: agl.LLM) -> float:
    """An agent without a framework; its reward differs from sample to sample."""
    asked = [{"role": "user", "content": task["question"]}]
    said = llm.client().chat.completions.create(model=llm.model, messages=asked, max_tokens=8)
    return float(sum(map(ord, said.choices[0].message.content or "")) % 7)


@pytest.mark.slow
def test_a_training_run_tells_its_story_in_order(diary: Diary, tmp_path: Path) -> None:
    tasks = [{"id": str(place), "question": f"What is {place}?"} for place in range(2)]
    settings = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "output_dir": str(tmp_path / "runs")}
    Trainer(answer, tasks, model=str(tiny_model(tmp_path / "model")), **settings).fit()
    assert diary.said == ["start", "version 1", "log 1", "step 1", "version 2", "log 2", "step 2", "end"]

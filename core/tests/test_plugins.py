"""Plugins: what does not fit is refused with the nearest thing that does; switches load less and tell more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from agl import hookspecs, plugins
from agl.errors import PluginError
from agl.hookspecs import hookimpl
from agl.records import Step


@pytest.fixture
def manager() -> pluggy.PluginManager:
    return plugins.new_manager()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[..., pluggy.PluginManager]:
    """The process-wide manager as it would be built anew, from these entry points."""

    def build(points: dict[str, str], **environment: str) -> pluggy.PluginManager:
        found = [EntryPoint(name, value, "agl") for name, value in points.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        for name in ("AGL_PLUGINS", "AGL_TRACE_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return plugins.manager.__wrapped__()

    return build


def plugin(**functions: Any) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


# ------------------------------------------------------------------------------------------------------ refused


def test_a_misspelt_hook_is_refused_with_the_nearest(manager: pluggy.PluginManager):
    with pytest.raises(
        PluginError, match=r"'mine' implements 'agl_compute_rewards', .*did you mean 'agl_compute_reward'\?"
    ):
        plugins.register(manager, plugin(agl_compute_rewards=lambda rollout: None), "mine")


def test_an_argument_that_the_hook_does_not_have_is_refused(manager: pluggy.PluginManager):
    def agl_compute_reward(rolout: Any) -> None: ...

    with pytest.raises(PluginError, match=r"rolout"):
        plugins.register(manager, plugin(agl_compute_reward=agl_compute_reward), "mine")


def test_fewer_arguments_are_enough(manager: pluggy.PluginManager):
    said: list[int] = []
    plugins.register(manager, plugin(agl_step_end=lambda step: said.append(step)))
    manager.hook.agl_step_end(step=3, metrics={})
    assert said == [3]


def test_one_plugin_is_registered_once(manager: pluggy.PluginManager):
    mine = plugin(agl_train_end=lambda: None)
    plugins.register(manager, mine, "mine")
    with pytest.raises(PluginError, match=r"'mine' is registered already"):
        plugins.register(manager, mine, "mine")
    with pytest.raises(PluginError, match=r"'mine' is registered already"):
        plugins.register(manager, plugin(agl_train_end=lambda: None), "mine")


def test_two_plugins_may_not_give_one_name_to_two_things(
    manager: pluggy.PluginManager, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plugins, "manager", lambda: manager)
    for name in ("one", "two"):
        plugins.register(manager, plugin(agl_register_algorithms=lambda register: register("grpo", 1)), name)
    with pytest.raises(PluginError, match=r"two plugins register the algorithm 'grpo'"):
        plugins.algorithms()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpro", r"no algorithm is named 'gpro'; did you mean 'grpo'\? \(known: grpo, ppo\)"),
        ("zzz", r"no algorithm is named 'zzz' \(known: grpo, ppo\)"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_and_all_known(name: str, text: str):
    registry = plugins.Registry("algorithm")
    registry.add("ppo", 1)
    registry.add("grpo", 2)
    with pytest.raises(PluginError, match=text):
        registry.find(name)
    with pytest.raises(PluginError, match=r"known: none"):
        plugins.Registry("store").find("sqlite")


# ----------------------------------------------------------------------------------------------------- switches


def test_all_installed_plugins_are_loaded_unless_some_are_named(fresh: Callable[..., pluggy.PluginManager]):
    defaults = {"defaults", *plugins.BUILT_IN}
    points = {"one": "agl.selection", "two": "agl.errors"}
    assert {name for name, _ in fresh(points).list_name_plugin()} == {*defaults, "one", "two"}
    assert {name for name, _ in fresh(points, AGL_PLUGINS="two").list_name_plugin()} == {*defaults, "two"}
    assert {name for name, _ in fresh(points, AGL_PLUGINS=" two , one ").list_name_plugin()} == {
        *defaults,
        "one",
        "two",
    }
    assert {name for name, _ in fresh(points, AGL_PLUGINS="").list_name_plugin()} == defaults


def test_a_plugin_that_does_not_load_is_named_with_the_reason(fresh: Callable[..., pluggy.PluginManager]):
    points = {"good": "agl.selection", "broken": "agl.no_such_module"}
    text = r"'broken' \(agl\.no_such_module\) does not load: ModuleNotFoundError.*AGL_PLUGINS"
    with pytest.raises(PluginError, match=text):
        fresh(points)
    assert fresh(points, AGL_PLUGINS="good").has_plugin("good")


def test_a_name_in_the_switch_that_is_not_installed_is_refused(fresh: Callable[..., pluggy.PluginManager]):
    with pytest.raises(PluginError, match=r"AGL_PLUGINS names \['three'\], which are not installed; installed: one"):
        fresh({"one": "agl.selection"}, AGL_PLUGINS="one,three")


def test_the_trace_prints_every_hook_call(
    fresh: Callable[..., pluggy.PluginManager], capsys: pytest.CaptureFixture[str]
):
    manager = fresh({}, AGL_TRACE_PLUGINS="1")
    manager.hook.agl_signal_reward(step=Step(id="s", kind="tool_end", call_id="c"))
    manager.hook.agl_register_stores(register=print)
    told = capsys.readouterr().err
    assert "agl hook agl_signal_reward(step) -> rewards" in told
    assert "agl hook agl_register_stores(register) -> nobody" in told


def test_every_hook_has_a_word_of_explanation():
    hooks = [name for name in dir(hookspecs) if name.startswith("agl_")]
    assert len(hooks) > 12 and all(getattr(hookspecs, name).__doc__ for name in hooks)


def test_agl_plugins_lists_what_is_loaded():
    done = subprocess.run([sys.executable, "-m", "agl", "plugins"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "built in" in lines["rewards"] and "agl_compute_reward, agl_signal_reward" in lines["rewards"]
    assert "agl_assign_credit" in lines["credit"]

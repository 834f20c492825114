"""Every hook is documented with its exact arguments, ships a default and has a test; a misspelt one is refused."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path

import pytest

from agl import hookimpl, hookspecs, plugins
from agl.errors import PluginError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "hooks.md").read_text()
HOOKS = [name for name in vars(hookspecs) if name.startswith("agl_")]
OURS = ("agl.", "agl_")


def arguments(hook: str) -> list[str]:
    return list(inspect.signature(getattr(hookspecs, hook)).parameters)


def example(hook: str) -> types.ModuleType:
    """The code block under the hook's heading, run as a plugin."""
    section = PAGE.split(f"### `{hook}(", 1)[1].split("\n### ", 1)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    module = types.ModuleType(f"example_of_{hook}")
    sys.modules[module.__name__] = module  # dataclasses look for their module there
    exec(compile(code, f"docs/hooks.md: {hook}", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_in_one_line_what_it_is_for(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook))
    assert text and "\n" not in text and text.endswith(".")


def test_the_page_lists_every_hook_with_its_arguments_in_firing_order() -> None:
    documented = re.findall(r"^### `(agl_\w+)\((.*)\)`$", PAGE, flags=re.MULTILINE)
    assert documented == [(hook, ", ".join(arguments(hook))) for hook in HOOKS]


@pytest.mark.parametrize("hook", HOOKS)
def test_the_page_names_the_kind_that_the_hook_really_has(hook: str) -> None:
    kind = PAGE.split(f"### `{hook}(", 1)[1].split("\n\n", 2)[1].split(" ", 1)[0].rstrip(",")
    first_result = bool(plugins.new_manager().hook.__dict__[hook].spec.opts["firstresult"])
    assert (kind == "First") == first_result
    assert (kind == "Register") == (arguments(hook) == ["register"])


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_a_hook_is_a_plugin_that_loads(hook: str) -> None:
    manager = plugins.new_manager()
    module = example(hook)
    plugins.register(manager, module, "example")
    assert module in [found.plugin for found in getattr(manager.hook, hook).get_hookimpls()]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_default_that_ships(hook: str) -> None:
    shipped = [
        implementation
        for implementation in getattr(plugins.manager().hook, hook).get_hookimpls()
        if f"{implementation.function.__module__}.".startswith(OURS)
    ]
    assert shipped, f"no plugin of ours implements {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_named_by_a_test_of_its_behaviour(hook: str) -> None:
    folders = [ROOT / "tests", ROOT / "core" / "tests", *ROOT.glob("packages/*/tests")]
    tests = [path for folder in folders for path in folder.glob("**/test_*.py") if path != Path(__file__)]
    naming = [path.name for path in tests if hook in path.read_text()]
    assert naming, f"no test names {hook}"


class Misspelt:
    @hookimpl
    def agl_compute_rewards(self, rollout: object) -> None: ...


class StrayArgument:
    @hookimpl
    def agl_compute_reward(self, rollout: object, agent: object) -> None: ...


def test_a_misspelt_hook_is_refused_and_the_nearest_one_named() -> None:
    with pytest.raises(PluginError, match=r"'agl_compute_rewards'.*did you mean 'agl_compute_reward'"):
        plugins.register(plugins.new_manager(), Misspelt(), "mine")


def test_an_argument_that_the_hook_does_not_have_is_refused() -> None:
    with pytest.raises(PluginError, match="agent"):
        plugins.register(plugins.new_manager(), StrayArgument(), "mine")

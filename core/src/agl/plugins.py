"""Find plugins, check them, trace them; and one typed function for every hook.

What ships in the box is a plugin too. Plugins are entry points of the group ``agl``. ``AGL_PLUGINS=a,b`` loads
only those (an empty value loads none); ``AGL_TRACE_PLUGINS=1`` prints every hook call.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, get_args

import pluggy

from agl import clients, credit, hookspecs, log, rewards, scope, transitions
from agl.errors import PluginError, RunError
from agl.hookspecs import hookimpl
from agl.records import Rollout, Step, StepKind, Transition

BUILT_IN = {"clients": clients, "rewards": rewards, "credit": credit, "transitions": transitions, "log": log}


ORIGINS: dict[str, str] = {}
"""Distribution and version of each plugin that came from an entry point."""


class _Defaults:
    """Defaults that have no module of their own: who is calling is what the scope says; agents run in asyncio."""

    @hookimpl(trylast=True)
    def agl_current_call(self) -> scope.CallInfo | None:
        return scope.current_call()

    @hookimpl
    def agl_register_runners(self, register: Callable[[str, Any], None]) -> None:
        from agl.runner import AsyncRunner

        register("asyncio", AsyncRunner)


def new_manager() -> pluggy.PluginManager:
    """A manager with the hooks and what ships in the core; no entry points."""
    manager = pluggy.PluginManager("agl")
    manager.add_hookspecs(hookspecs)
    manager.register(_Defaults(), "defaults")
    for name, module in BUILT_IN.items():
        manager.register(module, name)
    return manager


@functools.cache
def manager() -> pluggy.PluginManager:
    """The process-wide manager with all installed plugins.

    Raises:
        PluginError: an entry point does not load, or implements a hook that does not exist.
    """
    pm = new_manager()
    wanted = os.environ.get("AGL_PLUGINS")
    names = None if wanted is None else {name.strip() for name in wanted.split(",") if name.strip()}
    points = [*entry_points(group="agl")]
    if names is not None and (missing := names - {point.name for point in points}):
        installed = ", ".join(sorted(point.name for point in points)) or "none"
        raise PluginError(f"AGL_PLUGINS names {sorted(missing)!r}, which are not installed; installed: {installed}")
    for point in points:
        if names is None or point.name in names:
            register(pm, _load(point), point.name)
            if point.dist is not None:
                ORIGINS[point.name] = f"{point.dist.name} {point.dist.version}"
    pm.add_hookcall_monitoring(_print_call if os.environ.get("AGL_TRACE_PLUGINS") else _ignore_call, _name_hook)
    return pm


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {point.name!r} ({point.value}) does not load: {type(error).__name__}: {error}. "
            f"Uninstall it, or leave it out with AGL_PLUGINS"
        ) from error


def register(pm: pluggy.PluginManager, plugin: Any, name: str | None = None) -> None:
    """Register a plugin and refuse a hook that does not exist or an argument that it does not have.

    Raises:
        PluginError: it names the plugin, the hook and, for a misspelling, the nearest real one.
    """
    for attribute in dir(plugin):
        is_hook = getattr(getattr(plugin, attribute, None), "agl_impl", None) is not None
        if is_hook and not hasattr(hookspecs, attribute):
            raise PluginError(
                f"plugin {name or plugin!r} implements {attribute!r}, which is no hook of agl"
                + nearest(attribute, [hook for hook in dir(hookspecs) if hook.startswith("agl_")])
            )
    try:
        pm.register(plugin, name)
        pm.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error)) from error
    except ValueError as error:
        raise PluginError(f"plugin {name or plugin!r} is registered already") from error


def nearest(wrong: str, names: Sequence[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing when no name is near."""
    import difflib

    close = difflib.get_close_matches(wrong, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _ignore_call(*_: Any) -> None:
    pass


def _print_call(hook_name: str, implementations: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]) -> None:
    print(f"agl hook {hook_name}({', '.join(kwargs)}) -> {_names(implementations) or 'nobody'}", file=sys.stderr)


def _name_hook(
    outcome: pluggy.Result[Any], hook_name: str, implementations: Sequence[pluggy.HookImpl], kwargs: Mapping[str, Any]
) -> None:
    """An error that a plugin lets out says where it came from."""
    if outcome.exception is not None:
        outcome.exception.add_note(f"raised in hook {hook_name}; plugins that implement it: {_names(implementations)}")


def _names(implementations: Sequence[pluggy.HookImpl]) -> str:
    return ", ".join(implementation.plugin_name for implementation in implementations)


# ------------------------------------------------------------------------------------ one function for each hook


class Registry(dict[str, Any]):
    """Named things that plugins registered; an unknown name is an error that lists the known ones."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        super().__init__()

    def add(self, name: str, thing: Any) -> None:
        """Add one; two plugins may not use one name."""
        if name in self:
            raise PluginError(f"two plugins register the {self.noun} {name!r}")
        self[name] = thing

    def find(self, name: str) -> Any:
        """The thing of that name."""
        if name not in self:
            raise PluginError(
                f"no {self.noun} is named {name!r}{nearest(name, list(self))} "
                f"(known: {', '.join(sorted(self)) or 'none'})"
            )
        return self[name]


def _registry(noun: str, hook: Callable[..., Any]) -> Registry:
    registry = Registry(noun)
    hook(register=registry.add)
    return registry


def commands() -> Registry:
    """Sub-commands of ``agl``."""
    return _registry("command", manager().hook.agl_register_commands)


def algorithms() -> Registry:
    """Algorithms by name."""
    return _registry("algorithm", manager().hook.agl_register_algorithms)


def backends() -> Registry:
    """Backend factories by name."""
    return _registry("backend", manager().hook.agl_register_backends)


def stores() -> Registry:
    """Store factories by URL scheme."""
    return _registry("store", manager().hook.agl_register_stores)


def runners() -> Registry:
    """Runner factories by name."""
    return _registry("runner", manager().hook.agl_register_runners)


def instrument() -> Callable[[], None]:
    """Start every adapter's automatic capture; the result stops them all, in reverse order."""
    stops: list[Callable[[], None] | None] = manager().hook.agl_instrument()

    def stop() -> None:
        for undo in reversed([stop for stop in stops if stop is not None]):
            undo()

    return stop


def current_call() -> scope.CallInfo | None:
    """Who makes the model call that is about to leave."""
    return manager().hook.agl_current_call()


def build_transitions(rollout: Rollout) -> Sequence[Transition]:
    """The calls of a finished rollout that count."""
    return manager().hook.agl_build_transitions(rollout=rollout)


async def compute_reward(rollout: Rollout) -> dict[str, float]:
    """Named reward parts of all plugins, summed by name; empty means unscored."""
    import asyncio  # here, because it is a fifth of the time that `import agl.plugins` would take

    answers = manager().hook.agl_compute_reward(rollout=rollout)
    gathered = await asyncio.gather(*(a if inspect.isawaitable(a) else _ready(a) for a in answers))
    return rewards.sum_parts([answer for answer in gathered if answer is not None])


async def _ready(value: Any) -> Any:
    return value


def signal_rewards(steps: Sequence[Step]) -> list[dict[str, float]]:
    """Named intermediate rewards of each step, those of all plugins summed by name."""
    hook = manager().hook.agl_signal_reward
    return [
        rewards.sum_parts([one for one in hook(step=step) if one is not None], "agl_signal_reward") for step in steps
    ]


def check_signals(names: Collection[str]) -> None:
    """Refuse names that no plugin answers, even with 0, when it is shown an empty step of each kind.

    Raises:
        PluginError: it lists the names that are known.
    """
    shown = [Step(id=kind, kind=kind, call_id=kind) for kind in get_args(StepKind)] if names else []
    known = sorted({name for values in signal_rewards(shown) for name in values})
    for name in names:
        if name not in known:
            raise PluginError(
                f"no signal is named {name!r}{nearest(name, known)} (known: {', '.join(known) or 'none'})"
            )


def assign_credit(
    rollout: Rollout, transitions: Sequence[Transition], discount: float | None = None
) -> list[Transition]:
    """The transitions, each with its share of the reward.

    Raises:
        RunError: a plugin returned another number of values than there are transitions.
    """
    shares: Any = manager().hook.agl_assign_credit(rollout=rollout, transitions=transitions, discount=discount)
    if not isinstance(shares, Sequence):
        raise RunError(f"agl_assign_credit returned {shares!r}; return a list with a number for each transition")
    numbers = cast("Sequence[Any]", shares)
    if len(numbers) != len(transitions):
        raise RunError(
            f"agl_assign_credit returned {len(numbers)} values for {len(transitions)} transitions "
            f"of rollout {rollout.id!r}"
        )
    return [
        transition.with_reward(rewards.as_number("credit", share))
        for transition, share in zip(transitions, numbers, strict=True)
    ]


def group_keys(rollout: Rollout, transitions: Sequence[Transition], baseline: credit.Baseline) -> list[str]:
    """The group of each transition of a rollout.

    Raises:
        RunError: a plugin named a group by something else than text.
    """
    hook = manager().hook.agl_group_key
    keys: list[Any] = [
        hook(rollout=rollout, transition=transition, turn=turn, baseline=baseline)
        for transition, turn in zip(transitions, credit.turns(transitions), strict=True)
    ]
    for key in keys:
        if not isinstance(key, str):
            raise RunError(f"agl_group_key returned {key!r}; return text: transitions of equal keys are compared")
    return keys

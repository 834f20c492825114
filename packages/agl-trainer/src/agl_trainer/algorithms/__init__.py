"""One file for each algorithm: pure ``advantages()`` and ``loss()``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from agl import plugins
from agl.errors import ConfigError
from agl.protocols import Algorithm
from agl_trainer.algorithms.policy_gradient import Need


def make(chosen: str | Mapping[str, Any]) -> Algorithm:
    """The algorithm of that name, or of a mapping with its ``name`` and settings.

    Raises:
        ConfigError: no name, an unknown setting (with the nearest real one), or a value that the algorithm refuses.
        PluginError: no plugin registered that name.
    """
    settings: dict[str, Any] = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"algorithm={chosen!r} has no name; write {{'name': 'grpo', ...}}")
    factory = plugins.algorithms().find(name)
    known = settings_of(name)
    for setting in settings:
        if setting not in known:
            raise ConfigError(
                f"algorithm {name!r} has no setting {setting!r}{plugins.nearest(setting, known)} (known: {known})"
            )
    try:
        algorithm = factory(**settings)
    except ValidationError as error:
        raise ConfigError(f"algorithm {name!r} refuses {'; '.join(map(_explain, error.errors()))}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm {name!r} refuses {settings!r}: {error}") from error
    if unknown := needs(algorithm) - {*get_args(Need)}:
        raise ConfigError(f"algorithm {name!r} needs {sorted(unknown)!r}; what can be had: {list(get_args(Need))!r}")
    return algorithm


def settings_of(name: str) -> list[str]:
    """Names of the settings of a registered algorithm."""
    return list(inspect.signature(plugins.algorithms().find(name)).parameters)


def with_setting(setting: str, preferred: str) -> str | None:
    """The name of an algorithm that has this setting, if any: the preferred one, or the first."""
    having = [name for name in plugins.algorithms() if setting in settings_of(name)]
    return preferred if preferred in having else min(having, default=None)


def needs(algorithm: Algorithm) -> frozenset[str]:
    """What the model must be asked for; see `agl.protocols.Algorithm`."""
    return frozenset(getattr(algorithm, "needs", ("old_logprobs",)))


def _explain(problem: Any) -> str:
    name = ".".join(map(str, problem["loc"]))
    return f"{name} = {problem['input']!r}: {problem['msg']}" if name else problem["msg"]

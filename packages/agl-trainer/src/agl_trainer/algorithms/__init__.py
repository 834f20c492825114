"""One file for each algorithm: pure ``advantages()`` and ``loss()``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agl import plugins
from agl.errors import ConfigError
from agl.protocols import Algorithm


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
    known = list(inspect.signature(factory).parameters)
    for setting in settings:
        if setting not in known:
            raise ConfigError(
                f"algorithm {name!r} has no setting {setting!r}{plugins.nearest(setting, known)} (known: {known})"
            )
    try:
        return factory(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"algorithm {name!r} refuses {settings!r}: {error}") from error

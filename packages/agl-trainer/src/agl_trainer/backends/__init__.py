"""What generates tokens: one folder or file for each backend."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from agl import plugins
from agl.errors import ConfigError
from agl.protocols import Backend
from agl_trainer.config import TrainConfig


def make(config: TrainConfig) -> Callable[[Any, TrainConfig], Backend]:
    """The factory of the backend that ``backend`` names, with its settings; those are checked where it can do so.

    Raises:
        ConfigError: no name, a setting that is unknown, or a value that is refused.
        PluginError: no plugin registered that name.
    """
    chosen = config.backend
    settings: dict[str, Any] = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"backend={chosen!r} has no name; write {{'name': 'vllm', ...}}")
    factory = plugins.backends().find(name)
    if check := getattr(factory, "check", None):
        check(config, **settings)
    else:
        known = list(inspect.signature(factory).parameters)[2:]
        if unknown := [setting for setting in settings if setting not in known]:
            raise ConfigError(f"backend {name!r} has no setting {unknown[0]!r} (known: {known})")
    return functools.partial(factory, **settings)

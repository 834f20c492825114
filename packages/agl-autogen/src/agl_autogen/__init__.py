"""Train any AutoGen agent or team with agl: its own model clients, for the length of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from agl import hookimpl, scope
from agl.scope import CallInfo

if TYPE_CHECKING:
    from agl_autogen.clients import model_client
    from agl_autogen.wrapping import Wrapped, wrap

__all__ = ["Wrapped", "model_client", "wrap"]


def __getattr__(name: str) -> Any:
    # This module is loaded as a plugin by every `agl` command; AutoGen is not, before somebody needs it.
    if name == "model_client":
        from agl_autogen import clients

        return clients.model_client
    if name in __all__:
        from agl_autogen import wrapping

        return getattr(wrapping, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def agl_current_call() -> CallInfo | None:
    """Name the agent of a team that nobody wrapped, where neither a label nor `agl.agent` names it."""
    if "autogen_core" not in sys.modules or scope.current_call() is not None:
        return None
    from agl_autogen.naming import current_agent

    name = current_agent()
    return CallInfo(agent=name) if name else None

"""Train any LangChain or LangGraph agent with agl: a native callback handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agl import hookimpl

if TYPE_CHECKING:
    from agl_langchain.handler import AglCallbackHandler, install

__all__ = ["AglCallbackHandler", "install"]


def __getattr__(name: str) -> Any:
    # This module is loaded as a plugin by every `agl` command; LangChain is not, before somebody needs it.
    if name in __all__:
        from agl_langchain import handler

        return getattr(handler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@hookimpl
def agl_instrument() -> Callable[[], None]:
    """Capture every LangChain run in this process."""
    from agl_langchain.handler import install

    return install()

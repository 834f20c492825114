"""What this package registers: ``agl demo``."""

from __future__ import annotations

from agl.hookspecs import hookimpl
from agl.protocols import Register


@hookimpl
def agl_register_commands(register: Register) -> None:
    """Register ``agl demo``."""
    from agl_demo.command import demo

    register("demo", demo)

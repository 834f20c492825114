"""What this package brings to `agl`: the command ``agl serve`` and the store ``sqlite``. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl.hookspecs import hookimpl

if TYPE_CHECKING:
    from agl.protocols import Register
    from agl_server.store import ServerStore


@hookimpl
def agl_register_commands(register: Register) -> None:
    """Register ``agl serve``."""
    from agl_server.command import serve

    register("serve", serve)


@hookimpl
def agl_register_stores(register: Register) -> None:
    """Register ``sqlite:///path/to/file``."""
    register("sqlite", open_sqlite)


def open_sqlite(url: str) -> ServerStore:
    """The store at ``sqlite:///path``."""
    from pathlib import Path

    from agl_server.store.sqlite import SqliteStore

    return SqliteStore(Path(url.removeprefix("sqlite://")))

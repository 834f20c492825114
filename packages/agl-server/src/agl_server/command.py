"""The command ``agl serve``: one process, one home folder."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl import plugins
from agl.errors import UsageError
from agl.processes import end_with_parent

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from agl_server.store import ServerStore

DRAIN_SECONDS = 8
"""What is under way at SIGTERM may take so long to end; the rest of ten seconds is for closing the store."""

BACKLOG = 4096

ADDRESS = "server.json"
"""Says where the server listens; there while it does."""


def serve(
    home: Annotated[Path, typer.Option(help="Folder of the store, the key and server.json.")] = Path(".agl"),
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need AGL_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    store: Annotated[str | None, typer.Option(help="URL of another store; a plugin serves its scheme.")] = None,
) -> None:
    """Run the Lightning server: the rollout queue and the gateway. AGL_KEY, if set, is its key."""
    # Without this uvicorn ends by the signal that stopped it; a drained server has succeeded.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    given = os.environ.get("AGL_KEY") or None
    from agl_server import auth

    end_with_parent()
    auth.check_bind(host, given is not None)
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"--home {str(home)!r} cannot be made: {error.strerror}") from error
    with _alone(home):
        (home / ADDRESS).unlink(missing_ok=True)  # of a server that was killed
        key = auth.load_key(home, given)
        _raise_file_limit()
        from agl_server.app import create_app

        listener = _listen(host, port)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        app = create_app(_open_store(store or f"sqlite://{home.resolve()}/store.sqlite"), key, host)
        try:
            _run(app, listener, home, url)
        finally:
            (home / ADDRESS).unlink(missing_ok=True)


def _open_store(url: str) -> ServerStore:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"--store {url!r} is no URL; write scheme://..., such as sqlite:///path/to/file")
    return plugins.stores().find(scheme)(url)


def _run(app: Starlette, listener: socket.socket, home: Path, url: str) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                _announce(home, url)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.stop_waiting()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        backlog=BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    Server(config).run(sockets=[listener])


def _announce(home: Path, url: str) -> None:
    """Tell people, and programs that wait for the file."""
    import gc

    import orjson

    gc.freeze()  # what was imported stays; the collector need not look at it again
    fresh = home / f"{ADDRESS}.{os.getpid()}"
    fresh.write_bytes(orjson.dumps({"url": url, "pid": os.getpid()}))
    fresh.replace(home / ADDRESS)
    typer.echo(f"agl serve: {url} (key in {home / 'key'})")
    sys.stdout.flush()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection; asyncio forgets it for a listener that it did not make itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    return listener


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One server for one home: two would give out the same rollouts."""
    import fcntl

    with open(home / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another server uses {str(home)!r}; stop it, or give another --home") from error
        yield


def _raise_file_limit() -> None:
    """Every agent takes a connection to us and one to the upstream."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

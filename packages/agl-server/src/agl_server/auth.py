"""Who may do what: one key for the server, and one for each attempt that opens its own model calls and steps only."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from agl.errors import UsageError
from agl_server.http import Receive, Refused, Request, Scope, Send
from agl_server.store import ServerStore

SHORTEST_KEY = 16
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Keys:
    """Checks keys. Keys of attempts are derived from a secret in the store, so they outlive a restart."""

    def __init__(self, admin: str) -> None:
        self._admin = admin
        self._secret = b""

    async def load(self, store: ServerStore) -> None:
        """Read the store's secret, or make one."""
        self._secret = await store.setting("secret") or secrets.token_bytes(32)
        await store.set_setting("secret", self._secret)

    def of_attempt(self, rollout: str, attempt: int) -> str:
        """The key that opens one attempt."""
        return hmac.digest(self._secret, f"{rollout}/{attempt}".encode(), "sha256").hex()

    def admin(self, request: Request) -> None:
        """Guard: the server's own key."""
        if not _same(_bearer(request), self._admin):
            raise _wrong_key("the server's key")

    def attempt(self, request: Request) -> None:
        """Guard: the key of the attempt that the path names, or the server's own."""
        given = _bearer(request)
        own = self.of_attempt(request.params["rollout"], request.params["attempt"])
        if not (_same(given, own) or _same(given, self._admin)):
            raise _wrong_key("the key of this attempt")


def public(request: Request) -> None:
    """Guard: anybody."""


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def _bearer(request: Request) -> str:
    kind, _, key = (request.header(b"authorization") or "").partition(" ")
    if kind.lower() != "bearer" or not key:
        raise _wrong_key("a key, as `Authorization: Bearer KEY`")
    return key.strip()


def _wrong_key(needed: str) -> Refused:
    return Refused(401, f"this path needs {needed}", code="invalid_api_key", headers=[(b"www-authenticate", b"Bearer")])


def load_key(home: Path, given: str | None) -> str:
    """The server's key: the one given, else the one kept in ``home``, made at the first start.

    Raises:
        UsageError: it is too short to be secret.
    """
    path = home / "key"
    if given is None and path.exists():
        given = path.read_text().strip()
    key = secrets.token_urlsafe(32) if given is None else given
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"the server's key needs at least {SHORTEST_KEY} printable ASCII characters and no spaces")
    fresh = path.with_name(f"key.{os.getpid()}")
    with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(key + "\n")
    fresh.replace(path)
    return key


def check_bind(host: str, key_given: bool) -> None:
    """Refuse to listen to the world with a key that nobody chose.

    Raises:
        UsageError: the address is not loopback and no key was given.
    """
    if host not in LOOPBACK and not key_given:
        raise UsageError(
            f"--host {host} is reachable from other machines; choose a key first (set AGL_KEY), or use 127.0.0.1"
        )


class HostGuard:
    """Answers only requests that name this server, so that no web page can reach it through a forged DNS name."""

    def __init__(self, app: object, host: str) -> None:
        self._app = app
        # A server on all interfaces has names that it cannot know; there the key alone protects.
        self._names = None if host in {"0.0.0.0", "::"} else LOOPBACK | {host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse with 421."""
        if scope["type"] == "http" and self._names is not None:
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or _name(hosts[0]) not in self._names:
                refusal = Refused(421, f"this server is not {hosts!r}", code="wrong_host")
                await Request({**scope, "path_params": {}}, receive, send).answer(refusal.body(), refusal.status)
                return
        await self._app(scope, receive, send)  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues]


def _name(host: bytes) -> str:
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, colon, port = text.partition(":")
    return name if not colon or port.isdigit() else text

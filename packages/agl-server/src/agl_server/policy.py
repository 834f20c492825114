"""Which policy the gateway serves; kept in the store, so that a server that was killed serves on."""

from __future__ import annotations

import asyncio

from agl.wire import PolicyState, decode, encode
from agl_server.http import Refused, retry_after
from agl_server.store import ServerStore


class PolicyKeeper:
    """Holds the present policy, and the requests that arrive while its weights are updated."""

    def __init__(self, store: ServerStore) -> None:
        self._store = store
        self._serving = asyncio.Event()
        self._closing = False
        self.state: PolicyState | None = None

    async def load(self) -> None:
        """Read what the last server knew."""
        kept = await self._store.setting("policy")
        if kept is not None:
            self._apply(decode(PolicyState, kept))

    async def set(self, state: PolicyState) -> None:
        """Serve this from now on."""
        await self._store.set_setting("policy", encode(state))
        self._apply(state)

    def _apply(self, state: PolicyState) -> None:
        self.state = state
        if state.state == "serving":
            self._serving.set()
        else:
            self._serving.clear()

    def close(self) -> None:
        """Send away those who are held: the server stops."""
        self._closing = True
        self._serving.set()

    async def serving(self) -> PolicyState:
        """The policy, once no update of its weights is going on.

        Raises:
            Refused: there is none yet, or the server stops.
        """
        if self.state is None:
            raise Refused(
                503, "no policy is served yet: the trainer has not set one", code="no_policy", headers=retry_after(1)
            )
        while self.state.state != "serving" and not self._closing:
            await self._serving.wait()
        if self._closing and self.state.state != "serving":
            raise Refused(503, "the server is stopping", code="stopping", headers=retry_after(1))
        return self.state

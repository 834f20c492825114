"""The Lightning client: enqueue, lease, heartbeat, report, collect.

One layer of retries: a server that is killed and started again within ``patience`` seconds is survived. Every write
may be repeated without harm, so a lost answer costs nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from agl import wire
from agl.errors import ServerError, StaleAttempt, UsageError
from agl.records import Lease, Outcome, Reward, Rollout, Step

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

RETRIED = {429, 502, 503, 504}
"""Statuses that mean "later"; every other refusal is final."""
ENQUEUED_AT_ONCE = 256
"""Rollouts in one request."""
LARGEST_REQUEST = 8_000_000
"""Bytes of one request; the server refuses twice as many."""
REQUESTS_AT_ONCE = 16
"""Requests under way that do not wait for something to happen. The HTTP pool looks at every connection it has for each
request, so a connection for each of a hundred rollouts that end together would cost more than their reports."""
ANSWER_SECONDS = 30.0
"""How long an answer may take beyond what the request itself asked to wait."""


class LightningClient:
    """Talks to one Lightning server. Use it as an asynchronous context manager, from one event loop only.

    The connection pool belongs to the loop in which the client was entered; a second loop needs a second client.
    """

    def __init__(self, url: str, key: str, patience: float = 60.0) -> None:
        """Prepare; nothing is sent before the first method is awaited.

        Args:
            url: the server's address, without a path.
            key: the server's key; never shown in messages.
            patience: seconds for which a request is tried again while the server is away or busy.

        Raises:
            UsageError: the address is no URL.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"the Lightning server's address is {url!r}; write a URL such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.patience = patience
        self._key = key
        self._http: httpx2.AsyncClient | None = None
        self._turn = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def __aenter__(self) -> LightningClient:
        import httpx2

        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {self._key}"},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts to the queue; ids that are known already are left as they are."""
        message = wire.Enqueue(rollouts=tuple(rollouts))
        middle = len(rollouts) // 2
        if middle and (len(rollouts) > ENQUEUED_AT_ONCE or len(wire.encode(message)) > LARGEST_REQUEST):
            await self.enqueue(rollouts[:middle])
            await self.enqueue(rollouts[middle:])
        elif rollouts:
            await self._request("POST", "/api/rollouts", message)

    async def withdraw(self, prefix: str) -> None:
        """Take unfinished rollouts of batches whose names begin so out of the queue, until they are enqueued again.

        What runs of them is stale from now on, and does not count as one of its ``max_attempts``.
        """
        await self._request("POST", "/api/withdraw", wire.Withdraw(prefix=prefix))

    async def lease(self, worker: str, limit: int, seconds: float, wait: float = 0.0) -> Sequence[Lease]:
        """Up to ``limit`` rollouts to run, none when there are none within ``wait`` seconds."""
        message = wire.LeaseRequest(worker=worker, limit=limit, seconds=seconds, wait=wait, request=uuid.uuid4().hex)
        return wire.decode(wire.Leases, await self._request("POST", "/api/lease", message, wait)).leases

    async def heartbeat(self, rollout: str, attempt: int, seconds: float) -> None:
        """Renew a lease.

        Raises:
            StaleAttempt: it ran out and the rollout was given to another attempt.
        """
        await self._request("POST", f"{_path(rollout, attempt)}/heartbeat", wire.Heartbeat(seconds=seconds))

    async def add_steps(self, rollout: str, attempt: int, steps: Sequence[Step]) -> None:
        """Report steps; one whose id is known already is left as it is."""
        await self._request("POST", f"{_path(rollout, attempt)}/steps", wire.Steps(steps=tuple(steps)))

    async def finish(
        self, rollout: str, attempt: int, outcome: Outcome, returned: Reward | None = None, error: str | None = None
    ) -> None:
        """End an attempt.

        Raises:
            StaleAttempt: another attempt owns the rollout; nothing of this one is counted.
        """
        message = wire.Finish(outcome=outcome, returned=returned, error=error)
        await self._request("POST", f"{_path(rollout, attempt)}/finish", message)

    async def collect(
        self, batch: str, after: int = 0, limit: int = 100, wait: float = 0.0
    ) -> tuple[int, Sequence[Rollout]]:
        """Ended rollouts of a batch with their calls and steps, in the order they ended.

        Args:
            batch: which request of the trainer.
            after: cursor of the previous answer, 0 for the beginning.
            limit: at most so many.
            wait: seconds to wait for the first.

        Returns:
            The new cursor and the rollouts; the same cursor and none when nothing ended.
        """
        query = f"batch={quote(batch, safe='')}&after={after}&limit={limit}&wait={wait}"
        collected = wire.decode(wire.Collected, await self._request("GET", f"/api/rollouts?{query}", wait=wait))
        return collected.cursor, collected.rollouts

    async def rollout(self, rollout: str) -> Rollout:
        """One rollout as it stands, with the calls and steps of its latest attempt."""
        return wire.decode(Rollout, await self._request("GET", f"/api/rollouts/{quote(rollout, safe='')}"))

    async def set_policy(self, policy: wire.PolicyState) -> None:
        """Say which policy the gateway serves; it is kept over a restart of the server."""
        await self._request("PUT", "/api/policy", policy)

    async def policy(self) -> wire.PolicyState | None:
        """Which policy the gateway serves; None before the first `set_policy`."""
        answer = await self._request("GET", "/api/policy")
        return None if answer == b"null" else wire.decode(wire.PolicyState, answer)

    async def health(self) -> None:
        """Return when the server is well.

        Raises:
            ServerError: it is not, or cannot be reached for ``patience`` seconds; the message says why.
        """
        await self._request("GET", "/healthz")

    async def _request(self, method: str, path: str, message: Any = None, wait: float = 0.0) -> bytes:
        """Send, and send again while the server is away or busy, until patience ends."""
        import httpx2

        if self._http is None:
            raise UsageError("LightningClient is not open; write: async with LightningClient(url, key) as client")
        content = None if message is None else wire.encode(message)
        headers = {} if content is None else {"content-type": "application/json"}
        deadline = time.monotonic() + self.patience
        pause = 0.05
        while True:
            retry_after = 0.0
            try:
                async with nullcontext() if wait else self._turn:
                    response = await self._http.request(
                        method, path, content=content, headers=headers, timeout=wait + ANSWER_SECONDS
                    )
                if response.is_success:
                    return response.content
                failure = _failure(method, path, response)
                if response.status_code not in RETRIED:
                    raise failure
                retry_after = _seconds(response.headers.get("retry-after"))
            except httpx2.TransportError as error:
                failure = ServerError(
                    f"{method} {path.partition('?')[0]}: the Lightning server at {self.url} cannot be reached "
                    f"({type(error).__name__}: {error}); is `agl serve` running?"
                )
            delay = max(retry_after, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + delay > deadline:
                raise failure
            await asyncio.sleep(delay)
            pause = min(2 * pause, 1.0)


def _path(rollout: str, attempt: int) -> str:
    return f"/api/rollouts/{quote(rollout, safe='')}/{attempt}"


def _failure(method: str, path: str, response: httpx2.Response) -> ServerError:
    """The server's refusal as an exception, in the server's own words."""
    try:
        text = json.loads(response.content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = response.text[:200]
    status = response.status_code
    kind = StaleAttempt if status == 409 else ServerError
    return kind(f"{method} {path.partition('?')[0]}: HTTP {status}: {text}", status)


def _seconds(header: str | None) -> float:
    """``Retry-After`` in seconds; dates and rubbish count as none."""
    try:
        return min(max(float(header or 0), 0.0), 60.0)
    except ValueError:
        return 0.0

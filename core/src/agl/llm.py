"""What an agent function receives to reach its model: base URL, key, model name, and clients for any SDK."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agl import plugins
from agl.errors import UsageError

if TYPE_CHECKING:
    import ssl
    from contextlib import AbstractContextManager


@dataclass(slots=True)
class LLM:
    """The policy model, as one attempt of a rollout may use it.

    The base URL alone is enough for any program in any language. The HTTP clients of `openai` also tell the
    gateway which agent calls, by a request hook that reads the scope.
    """

    base_url: str
    """OpenAI-compatible, ends in ``/v1``; it names the rollout and the attempt."""
    key: str = field(repr=False)
    """Opens this attempt's model calls only."""
    model: str = "policy"
    _clients: list[Any] = field(default_factory=list[Any], repr=False)
    _sent: set[str] = field(default_factory=set[str], repr=False)
    """Call ids and requests that left already."""

    def openai(self) -> dict[str, Any]:
        """Keyword arguments for LangChain's ``ChatOpenAI``; for the plain SDK there are `client` and `async_client`."""
        return {
            "base_url": self.base_url,
            "api_key": self.key,
            "model": self.model,
            "http_client": self._http("Client", self._stamp),
            "http_async_client": self._http("AsyncClient", self._stamp_async),
        }

    def client(self) -> Any:
        """A ready ``openai.OpenAI``."""
        http = self._http("Client", self._stamp)
        return _import_openai().OpenAI(base_url=self.base_url, api_key=self.key, http_client=http)

    def async_client(self) -> Any:
        """A ready ``openai.AsyncOpenAI``."""
        http = self._http("AsyncClient", self._stamp_async)
        return _import_openai().AsyncOpenAI(base_url=self.base_url, api_key=self.key, http_client=http)

    def _http(self, kind: str, stamp: Any) -> Any:
        options: dict[str, Any] = {"timeout": None, "verify": _tls(), "trust_env": False}
        client = getattr(http_library(), kind)(**options, event_hooks={"request": [stamp]})
        self._clients.append(client)
        return client

    def reroute(self) -> AbstractContextManager[None]:
        """Inside the block, clients of ``openai`` that exist already ask this model, for the agents that are selected.

        Raises:
            UsageError: on entry, where the installed ``openai`` cannot be rerouted or ``AGL_WIRE_HOOK=0`` forbids it.
        """
        from agl import clients

        return clients.reroute(self)

    def labels(self, *, again: bool = False, request: str | None = None) -> dict[str, str]:
        """The headers that say who calls.

        Args:
            again: the SDK is known to send the same request once more.
            request: names the request, where all of the SDK's attempts at it have a name in common.
        """
        if request is not None:
            again = request in self._sent
            self._sent.add(request)
        info = plugins.current_call()
        if info is None:
            return {}
        if info.call_id is not None:
            # A label is good for one request and its retries. A second one comes from a context that a cancelled
            # or streaming call left its label in; it is a call of its own, made by nobody knows whom.
            if info.call_id in self._sent and not again:
                return {}
            self._sent.add(info.call_id)
        labels = (("x-agl-call", info.call_id), ("x-agl-agent", info.agent), ("x-agl-parent", info.parent))
        return {name: value for name, value in labels if value is not None}

    def _stamp(self, request: Any) -> None:
        """Write the caller's labels onto a request (an httpx event hook)."""
        request.headers.update(self.labels(again=request.headers.get("x-stainless-retry-count", "0") != "0"))

    async def _stamp_async(self, request: Any) -> None:
        """`_stamp`, for asynchronous clients."""
        self._stamp(request)

    def environment(self) -> dict[str, str]:
        """Environment variables for a program in another process or language."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": self.model}

    async def close(self) -> None:
        """Close the HTTP clients; the rollout is over."""
        for client in self._clients:
            if hasattr(client, "aclose"):
                await client.aclose()
            else:
                client.close()
        self._clients.clear()


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all rollouts: loading the certificates takes 20 ms, which would be most of a short rollout."""
    import ssl

    return ssl.create_default_context()


@functools.cache
def http_library() -> Any:
    """The HTTP library that the installed ``openai`` speaks: httpx2 since openai 3, httpx before.

    Asked once: to find a package's version reads its metadata from disk, which is a millisecond of every rollout.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        major = int(version("openai").split(".")[0])
    except PackageNotFoundError:
        major = 3
    if major < 3:
        import httpx  # pyright: ignore[reportMissingImports]

        return httpx  # pyright: ignore[reportUnknownVariableType]
    import httpx2

    return httpx2


def _import_openai() -> Any:
    try:
        import openai  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            "llm.client() needs the openai package: pip install openai. Any other client works with llm.base_url"
        ) from error
    return openai

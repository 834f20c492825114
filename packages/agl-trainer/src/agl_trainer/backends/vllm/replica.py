"""One vLLM server as the backend speaks to it: its weights, its version, tokens for the canary."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx2

from agl.errors import BackendError
from agl.protocols import Token
from agl_trainer.backends.vllm.server import Server
from agl_trainer.backends.vllm.weights import Weights

POLL_SECONDS = 0.1
RESET_SECONDS = 30.0


class Replica:
    """A server that runs, or is about to."""

    def __init__(self, name: str, *, server: Server | None = None, url: str = "http://vllm", key: str | None = None):
        self.name = name
        self.server = server
        """None where the user runs it."""
        self.state: Literal["serving", "updating", "down"] = "down"
        self.version: int | None = None
        """Of the weights that it serves."""
        self.loading: Weights | None = None
        """What it reads while it starts."""
        self.calls = 0
        """Under way."""
        self.answered = 0
        """Since it was started last."""
        self.http = httpx2.AsyncClient(
            base_url=url,
            transport=httpx2.AsyncHTTPTransport(
                uds=None if server is None else str(server.socket),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0),
            ),
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(None, connect=10.0),
        )

    async def alive(self) -> bool:
        """Whether it answers and its engine lives."""
        try:
            return (await self.http.get("/health", timeout=10.0)).is_success
        except httpx2.TransportError:
            return False

    async def wait(self, limit: float) -> None:
        """Until it is ready.

        Raises:
            BackendError: it never will be.
        """
        since = time.monotonic()
        while not await self.alive():
            if self.server is not None:
                self.server.check_started(since, limit)
            elif time.monotonic() - since > limit:
                raise BackendError(f"no vLLM answers at {self.name} within {limit:g} s; start it, or correct urls=")
            await asyncio.sleep(POLL_SECONDS)

    async def check_settings(self) -> None:
        """Refuse a server of the user's that would tell other logprobs, or cannot take weights.

        Raises:
            BackendError: it says what to do.
        """
        answer = await self.http.get("/agl")
        if answer.status_code == 401:
            raise BackendError(f"vLLM at {self.name} asks for a key; set AGL_VLLM_KEY to the same as there")
        if not answer.is_success:
            raise BackendError(
                f"vLLM at {self.name} was not started for a trainer, so it tells other logprobs and takes no weights: "
                "start it by `agl vllm MODEL` (docs/vllm.md)"
            )

    # ------------------------------------------------------------------------------------------------ weights

    async def take(self, weights: Weights, *, whole: bool = True) -> None:
        """Serve these weights from now on. Calls under way pause, and go on under the new ones.

        Args:
            weights: what to serve.
            whole: also the model itself, not only its adapters.
        """
        await self._post("/pause", params={"mode": "keep"})
        if whole:
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {"folder": str(weights.folder.resolve())}})
            await self._post("/finish_weight_update", {})
        for name, folder in weights.adapters.items():
            adapter = {"lora_name": name, "lora_path": str(folder.resolve()), "load_inplace": True}
            await self._post("/v1/load_lora_adapter", adapter)
        await self._forget_prefixes()
        await self.call_it(weights.version)
        await self._post("/resume")

    async def call_it(self, version: int) -> None:
        """Name the weights that it has."""
        await self._post("/update_weight_version", {"new_version": str(version)})
        self.version = version

    async def told_version(self) -> int | None:
        """The version by its own account; None when nobody named one since it was started."""
        answer = await self.http.get("/weight_info")
        told = _good(answer, self.name).json()["weight_version"]
        return int(told) if told.isdigit() else None

    async def _forget_prefixes(self) -> None:
        """Keys and values of the old weights must not serve the new ones; calls under way compute theirs anew."""
        deadline = time.monotonic() + RESET_SECONDS
        while True:
            answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if answer.json()["success"]:
                return
            if time.monotonic() > deadline:
                raise BackendError(f"vLLM at {self.name} does not let go of its prefix cache after new weights")
            await asyncio.sleep(POLL_SECONDS)

    async def _post(self, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> httpx2.Response:
        return _good(await self.http.post(path, json=body, params=params), self.name)

    # ------------------------------------------------------------------------------------------------- tokens

    async def sample(self, model: str, prompt_ids: Sequence[int], count: int) -> list[Token]:
        """Sample so many tokens at temperature 1."""
        wanted = {"max_tokens": count, "temperature": 1.0, "top_p": 1.0, "seed": 0, "ignore_eos": True}
        choice = await self._complete(model, prompt_ids, {**wanted, "logprobs": 0, "return_token_ids": True})
        version = await self.told_version()
        return [
            Token(id=token, logprob=logprob, version=-1 if version is None else version)
            for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        ]

    async def score(self, model: str, prompt_ids: Sequence[int], tokens: Sequence[Token]) -> list[float]:
        """Logprobs of tokens that follow a prompt."""
        ids = [*prompt_ids, *(token.id for token in tokens)]
        wanted = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        found = (await self._complete(model, ids, wanted))["prompt_logprobs"][len(prompt_ids) :]
        return [entry[str(token.id)]["logprob"] for entry, token in zip(found, tokens, strict=True)]

    async def _complete(self, model: str, prompt_ids: Sequence[int], wanted: Mapping[str, Any]) -> Any:
        body = {"model": model, "prompt": list(prompt_ids), **wanted}
        return (await self._post("/v1/completions", body)).json()["choices"][0]

    async def close(self) -> None:
        """End what is ours of it."""
        await self.http.aclose()
        if self.server is not None:
            await self.server.stop()


def _good(answer: httpx2.Response, name: str) -> httpx2.Response:
    if not answer.is_success:
        path = answer.request.url.path
        raise BackendError(f"vLLM at {name} refused {path} with status {answer.status_code}: {answer.text[:500]}")
    return answer


def key_of_environment() -> str | None:
    """The key of servers that the user runs."""
    return os.environ.get("AGL_VLLM_KEY") or None

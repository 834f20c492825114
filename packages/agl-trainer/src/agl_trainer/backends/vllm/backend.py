"""The backend ``vllm`` as the loop sees it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from agl import endpoint
from agl.errors import BackendError
from agl.protocols import Token
from agl_trainer import canary
from agl_trainer.backends.vllm import options
from agl_trainer.backends.vllm.fleet import Fleet
from agl_trainer.backends.vllm.replica import Replica, key_of_environment
from agl_trainer.backends.vllm.router import create_app
from agl_trainer.backends.vllm.server import Server
from agl_trainer.backends.vllm.weights import Exporter, Weights, served_as
from agl_trainer.chat import ChatFormat
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy


class VllmBackend:
    """Serves the policy by vLLM servers that it starts, or that run already (`agl.protocols.Backend`)."""

    shares_weights = False

    def __init__(self, policy: Policy, config: TrainConfig, **settings: Any) -> None:
        self.options = options.check(config, **settings)
        self.url = ""
        self.config = config
        self.policy = policy
        self.chat = ChatFormat(policy.tokenizer)
        self.gpu = torch.cuda.is_available()
        # On a CPU vLLM decodes adapters 4 to 9 times slower, so they are merged wherever one answers everybody.
        several = bool(policy.agents) or config.unselected == "frozen"
        self.apart = policy.adapters is not None and (self.gpu or several)
        self.home = Path(policy.folder or tempfile.mkdtemp(prefix="agl-")) / "vllm"
        self.exporter: Exporter | None = None
        self._sockets = Path(tempfile.mkdtemp(prefix="agl-vllm-"))  # short: a socket's path may have 107 bytes
        self._proof: dict[str, tuple[list[int], list[Token]]] = {}
        """By served model what the last canary saw."""
        self.fleet = Fleet(self._replicas(), self._start_server, self._prove, self.options.start_timeout)
        self._stack = AsyncExitStack()

    def _replicas(self) -> list[Replica]:
        if self.options.urls:
            return [Replica(url, url=url.rstrip("/"), key=key_of_environment()) for url in self.options.urls]
        devices = self.options.devices or [None] * self.options.replicas
        # Everything that a server of ours needs is in the run's folder; it ends when this process does.
        plain = options.environment(self.options.python) | {"AGL_PARENT": str(os.getpid()), "HF_HUB_OFFLINE": "1"}
        return [
            Replica(
                f"server {place}",
                server=Server(
                    plain | options.on_devices(device, self.gpu),
                    self._sockets / f"{place}.sock",
                    self.home / f"server-{place}.log",
                ),
            )
            for place, device in enumerate(devices)
        ]

    # ---------------------------------------------------------------------------------- agl.protocols.Backend

    async def start(self) -> None:
        """Start all servers with the policy's weights, and the endpoint in front of them."""
        self.exporter = Exporter(self.policy, self.home / "weights", apart=self.apart)
        await self.fleet.open(self.exporter.write(self.policy.version))
        app = create_app(self.fleet, self.chat, self._served_as)
        self.url = await self._stack.enter_async_context(endpoint.serve_hidden(app))

    async def update_weights(self, version: int) -> None:
        """Write the policy's weights, and have every server read them in place."""
        assert self.exporter is not None
        self._proof = {}  # nobody has confirmed the new ones yet
        weights = self.exporter.write(version)
        await self.fleet.update(weights)
        reading = {replica.loading.folder for replica in self.fleet.replicas if replica.loading is not None}
        self.exporter.forget(keep={weights.folder, *(f.parent for f in weights.adapters.values()), *reading})

    async def probe(self, prompt_ids: Sequence[int], tokens: int, agent: str = "") -> Sequence[Token]:
        """Every server continues what the one before it sampled, so one text speaks for all of them."""
        model = self._served_as(agent, frozen=False)
        sampled: list[Token] = []
        for replica in await self.fleet.serving():
            so_far = [*prompt_ids, *(token.id for token in sampled)]
            sampled += await replica.sample(model, so_far, tokens)
        self._proof[model] = (list(prompt_ids), sampled)
        return sampled

    def check(self) -> None:
        """Raise what ended the servers for good."""
        self.fleet.check()

    async def close(self) -> None:
        """Stop the endpoint and our servers; servers of the user's run on."""
        await self._stack.aclose()
        await self.fleet.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        if self.exporter is not None:
            self.exporter.close()

    # ------------------------------------------------------------------------------------------------- inside

    def _served_as(self, agent: str, frozen: bool) -> str:
        return served_as(self.policy, agent, frozen=frozen, apart=self.apart)

    def _start_server(self, replica: Replica, weights: Weights) -> None:
        assert replica.server is not None
        replica.loading, replica.version = weights, None
        line = options.command(self.options.python, weights.folder.resolve(), self.arguments())
        replica.server.start(line)

    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments: what follows from our settings, and the user's own."""
        config, given = self.config, self.options.arguments
        found: dict[str, Any] = {
            "dtype": config.precision,
            "max_model_len": config.max_length,
            "seed": config.seed,
            "enable_request_id_headers": True,  # the gateway's ids, for who reads vLLM's log beside the store
            "uvicorn_log_level": "warning",
        }
        if not self.gpu:
            found |= {"enforce_eager": True, "kv_cache_memory_bytes": options.CPU_CACHE_BYTES}
        if self.apart:
            assert self.policy.adapters is not None
            names = [*self.policy.adapters.of.values()]
            found |= {"enable_lora": True, "max_lora_rank": options.room_for(config.lora_rank)}
            found |= {"max_loras": options.several(names), "max_cpu_loras": options.several(names)}
        plain = {name.replace("-", "_"): value for name, value in given.items()}
        return found | options.tool_arguments(plain, self.chat.vllm_parser) | plain

    async def _prove(self, replica: Replica) -> None:
        """A server that has come back must agree with what the canary confirmed.

        Raises:
            BackendError: it serves other weights.
        """
        for model, (prompt, tokens) in list(self._proof.items()):
            scores = await replica.score(model, prompt, tokens)
            apart = [abs(score - token.logprob) for score, token in zip(scores, tokens, strict=True)]
            if not (difference := sum(apart) / len(apart)) <= canary.TOLERANCE[self.config.precision]:
                raise BackendError(
                    f"vLLM {replica.name} came back with other weights than it had: mean logprob difference "
                    f"{difference:.3g} at version {replica.version}"
                )

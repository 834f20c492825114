"""The embedded backend as the loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from agl import endpoint
from agl.protocols import Sampling, Token
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy


class TransformersBackend:
    """Serves the policy's own weights from this process (`agl.protocols.Backend`)."""

    shares_weights = True

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.engine = TransformersEngine(policy, slots=config.slots, max_length=config.max_length, seed=config.seed)
        self.url = ""
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Start the engine's thread and its endpoint, in the current event loop."""
        self.engine.start()
        self.url = await self._stack.enter_async_context(endpoint.serve_engine(self.engine))

    async def update_weights(self, version: int) -> None:
        """The weights are shared, so they are there already; what the old ones computed is forgotten."""
        self.engine.refresh(version)

    async def probe(self, prompt_ids: Sequence[int], tokens: int, agent: str = "") -> Sequence[Token]:
        """Sample a few tokens as an agent would."""
        sampling = Sampling(max_tokens=tokens, seed=0, labels={"agent": agent})
        return [token async for token in self.engine.generate(prompt_ids, sampling)]

    def check(self) -> None:
        """Raise what ended the engine's thread."""
        self.engine.check()

    async def close(self) -> None:
        """Stop the endpoint and the engine."""
        await self._stack.aclose()
        self.engine.stop()

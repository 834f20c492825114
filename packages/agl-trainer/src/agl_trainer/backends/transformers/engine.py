"""The embedded engine: one thread that decodes, any number of coroutines that wait for tokens."""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agl.errors import BackendError, UsageError
from agl.protocols import Sampling, Token
from agl_trainer.backends.transformers.scheduler import Request, Scheduler
from agl_trainer.backends.transformers.slots import refuse_unsupported
from agl_trainer.chat import ChatFormat
from agl_trainer.policy import Policy


class TransformersEngine:
    """Generates from the policy's own weights while the trainer is not using them (`agl.protocols.Engine`)."""

    def __init__(self, policy: Policy, *, slots: int, max_length: int, seed: int) -> None:
        refuse_unsupported(policy.model.config, max_length)
        self.policy = policy
        self.tokenizer = policy.tokenizer
        self.max_length = max_length
        self.version = policy.version
        self.chat = ChatFormat(policy.tokenizer)
        self._slots = slots
        self._seed = seed
        self._asked: dict[str, int] = {}
        """How often each rollout has asked each of its prompts of these weights."""
        self._schedulers: dict[str, Scheduler] = {}
        """One for each of the policy's weights that was asked for: they share no keys and values."""
        self._wake = threading.Condition()
        self._arrived: list[tuple[str, Request]] = []
        """Requests with the name of the weights that are to answer."""
        self._open: set[Request] = set()
        """Requests that somebody waits for."""
        self._outbox: list[tuple[asyncio.Queue[Token | BaseException], Token | BaseException]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="agl-engine", daemon=True)

    # ------------------------------------------------------------------------------------- agl.protocols.Engine

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Prompt token ids of a chat."""
        return self.chat.render(messages, tools)

    def extend(
        self,
        known: Sequence[int],
        place: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """Prompt token ids of a chat that goes on from known tokens (`agl.continuation.Extender`)."""
        return self.chat.extend(known, place, messages, tools)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, str]]]:
        """Split an answer into its content and tool calls."""
        return self.chat.parse(text, tools)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Token]:
        """Sample one answer; closing the iterator takes it out of the batch before the next token."""
        if sampling.frozen and not self.policy.keeps_frozen:
            raise UsageError("no frozen base is kept, so nothing can answer from it; train with unselected='frozen'")
        weights = self.policy.weights_of(sampling.labels.get("agent", ""), frozen=sampling.frozen)
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Token | BaseException] = asyncio.Queue()
        prompt = np.array(prompt_ids, dtype=np.int64)
        request = Request(
            prompt=prompt,
            sampling=sampling,
            random=random.Random(self._seed_of(prompt, sampling)),
            deliver=lambda token: self._outbox.append((queue, token)),
            stop_ids=self.policy.stop_ids,
        )
        with self._wake:
            self.check()
            self._arrived.append((weights, request))
            self._open.add(request)
            self._wake.notify()
        try:
            while True:
                token = await queue.get()
                if isinstance(token, BaseException):
                    raise BackendError(f"the embedded engine has died: {token!r}") from token
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            request.cancelled = True
            with self._wake:
                self._open.discard(request)

    # -------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """Start the decoding thread."""
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the decoding thread."""
        if self._failure is not None:
            raise BackendError(f"the embedded engine has died: {self._failure!r}") from self._failure

    def stop(self) -> None:
        """End the decoding thread; waiting requests fail."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def refresh(self, version: int) -> None:
        """The weights have changed: forget every key and value that the old ones made."""
        self._asked.clear()  # other rollouts ask from now on
        with self.policy.lock:
            self.version = version
            for scheduler in self._schedulers.values():
                scheduler.slots.forget()

    def counters(self) -> dict[str, int]:
        """Tokens of prompts, of prompts that were reused, and sampled, since the start."""
        names = ("prompt_tokens", "reused_tokens", "sampled_tokens")
        return {name: sum(getattr(s, name) for s in self._schedulers.values()) for name in names}

    def _seed_of(self, prompt: np.ndarray, sampling: Sampling) -> int:
        """A seed that depends on who asks what, not on when: runs repeat although requests arrive in any order."""
        if sampling.seed is not None:
            return sampling.seed
        who = f"{zlib.crc32(prompt.tobytes())}/{sampling.labels.get('rollout', '')}"
        self._asked[who] = self._asked.get(who, -1) + 1
        return zlib.crc32(f"{self._seed}/{who}/{self._asked[who]}".encode())

    def _work(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    with self.policy.lock:
                        self._step()
                    self._flush()
        except BaseException as error:
            self._fail(error)
        else:
            self._fail(BackendError("the engine was stopped"))

    def _receive(self) -> bool:
        """Take new requests; sleep when there is nothing to do. False once stopped."""
        with self._wake:
            while not self._arrived and not self._stopped and all(s.idle for s in self._schedulers.values()):
                self._wake.wait()
            for weights, request in self._arrived:
                if weights not in self._schedulers:
                    self._schedulers[weights] = Scheduler(
                        self.policy.module_of(weights), self._slots, lambda: self.version
                    )
                self._schedulers[weights].waiting.append(request)
            self._arrived.clear()
            return not self._stopped

    def _step(self) -> None:
        for weights, scheduler in self._schedulers.items():
            if not scheduler.idle:
                with self.policy.using(weights), self.policy.autocast():
                    scheduler.step()

    def _flush(self) -> None:
        """Hand over a whole step's tokens in one jump between threads."""
        if self._outbox and self._loop is not None:
            tokens, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_put_all, tokens)

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            waiting = list(self._open)
        for request in waiting:
            request.deliver(error)  # pyright: ignore[reportArgumentType]
        if self._loop is not None and not self._loop.is_closed():
            self._flush()


def _put_all(tokens: list[tuple[asyncio.Queue[Token | BaseException], Token | BaseException]]) -> None:
    for queue, token in tokens:
        queue.put_nowait(token)

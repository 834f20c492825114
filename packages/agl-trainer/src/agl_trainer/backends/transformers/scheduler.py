"""Continuous batching: requests join and leave a running batch between two decode steps.

A prompt that shares a beginning with a sequence in the slots copies its keys and values instead of computing them;
requests that arrive together and share a beginning wait one round for the first of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from agl.protocols import Sampling, Token
from agl_trainer.backends.transformers.slots import Slots, common_prefix

PREFILL_TOKENS = 2048
"""Padded tokens that one prefill pass may take; more wait, so that running sequences are not held up for long."""
WORTH_WAITING = 8
"""Tokens that two waiting prompts must share before one waits for the other."""


@dataclass(slots=True, eq=False)
class Request:
    """One answer to sample."""

    prompt: np.ndarray
    sampling: Sampling
    random: random.Random
    deliver: Callable[[Token], None]
    """Called from the engine's thread for every token."""
    stop_ids: frozenset[int]
    cancelled: bool = False
    sampled: list[int] = field(default_factory=list[int])

    def after(self, known: int) -> np.ndarray:
        """What follows the first ``known`` tokens of prompt and answer."""
        answer = self.sampled[max(0, known - len(self.prompt)) :]
        return np.concatenate([self.prompt[known:], np.array(answer, dtype=np.int64)])


class Scheduler:
    """Runs requests over the slots of one model. Not thread-safe; the engine owns it."""

    def __init__(self, model: Any, slots: int, version: Callable[[], int]) -> None:
        self.slots = Slots(model, slots)
        self.version = version
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        """``active[i]`` runs in row ``i``."""
        self.prompt_tokens = self.reused_tokens = self.sampled_tokens = 0

    @property
    def idle(self) -> bool:
        """Nothing to do."""
        return not self.waiting and not self.active

    def step(self) -> None:
        """Admit what fits, then sample one token for every active request."""
        self._drop_cancelled()
        while self.waiting and len(self.active) < self.slots.count:
            if not self._prefill():
                break
        if self.active:
            rows = list(range(len(self.active)))
            # One token each; after `Slots.forget` everything so far, so that an answer goes on with the new weights.
            inputs = [request.after(len(self.slots.tokens[row])) for row, request in enumerate(self.active)]
            self._sample(self.active[:], self.slots.forward(rows, inputs))

    def _drop_cancelled(self) -> None:
        self.waiting = deque(request for request in self.waiting if not request.cancelled)
        for request in [request for request in self.active if request.cancelled]:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Move the request's row behind the active ones; its keys and values stay reusable."""
        row, last = self.active.index(request), len(self.active) - 1
        self.slots.swap(row, last)
        self.active[row] = self.active[last]
        self.active.pop()

    def _prefill(self) -> bool:
        """Admit one round of waiting requests; false when none could be admitted."""
        room = self.slots.count - len(self.active)
        admitted: list[Request] = []
        deferred: list[Request] = []
        rows: list[int] = []
        inputs: list[np.ndarray] = []
        width = 0
        while self.waiting and len(admitted) < room:
            request = self.waiting.popleft()
            row, reused = self._place(request)
            sibling = max((common_prefix(other.prompt, request.prompt) for other in admitted), default=0)
            if sibling >= reused + WORTH_WAITING:
                deferred.append(request)
                continue
            rest = request.prompt[reused:]
            if admitted and max(width, len(rest)) * (len(admitted) + 1) > PREFILL_TOKENS:
                deferred.append(request)
                break
            width = max(width, len(rest))
            self._claim(request, row, reused, len(self.active) + len(admitted))
            admitted.append(request)
            rows.append(len(self.active) + len(admitted) - 1)
            inputs.append(rest)
        self.waiting.extendleft(reversed(deferred))
        if not admitted:
            return False
        self.active += admitted
        self._sample(admitted, self.slots.forward(rows, inputs))
        return True

    def _place(self, request: Request) -> tuple[int, int]:
        """The row with the longest usable beginning of the prompt (-1: none), and how much of it.

        The last prompt token is always computed: its logits are needed.
        """
        best, length = -1, 0
        for row, tokens in enumerate(self.slots.tokens):
            if len(tokens) > length and (shared := common_prefix(tokens, request.prompt)) > length:
                best, length = row, shared
        return best, min(length, len(request.prompt) - 1)

    def _claim(self, request: Request, source: int, reused: int, target: int) -> None:
        """Give the request row ``target``, filled with the reused beginning of its prompt."""
        slots = self.slots
        slots.reserve(len(request.prompt) + request.sampling.max_tokens)
        continues = source >= target and reused == len(slots.tokens[source])
        idle = range(target, slots.count)
        victim = source if continues else min(idle, key=lambda row: (len(slots.tokens[row]) > 0, slots.used[row]))
        slots.swap(victim, target)
        if source in (victim, target):
            source = target if source == victim else victim
        if source >= 0:
            slots.copy_prefix(source, target, reused)
        else:
            slots.tokens[target] = np.zeros(0, dtype=np.int64)
        self.prompt_tokens += len(request.prompt)
        self.reused_tokens += reused

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        ids, logprobs = sample(logits, [(request.sampling, request.random.random()) for request in requests])
        version = self.version()
        self.sampled_tokens += len(requests)
        for request, token_id, logprob in zip(requests, ids, logprobs, strict=True):
            request.sampled.append(token_id)
            reason = None
            if token_id in request.stop_ids:
                reason = "stop"
            elif len(request.sampled) >= request.sampling.max_tokens:
                reason = "length"
            if reason is not None:
                self._retire(request)
            request.deliver(Token(token_id, logprob, version, reason))


def sample(logits: torch.Tensor, wanted: list[tuple[Sampling, float]]) -> tuple[list[int], list[float]]:
    """Sample one token per row, with its processed logprob.

    Processed means: after temperature and after top-k and top-p, as the token was really drawn. Each row draws by
    inverse transform from its own uniform number, so that an answer does not depend on who shares the batch.
    A temperature of 0 takes the most likely token and reports its logprob at temperature 1, as vLLM does.

    Args:
        logits: ``[B, V]``.
        wanted: sampling parameters and a uniform number in [0, 1) for each row.
    """
    temperatures = torch.tensor([s.temperature or 1.0 for s, _ in wanted], dtype=logits.dtype, device=logits.device)
    scaled = logits / temperatures[:, None]
    for row, (sampling, _) in enumerate(wanted):
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            scaled[row] = _truncate(scaled[row], sampling)
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    uniform = torch.tensor([u for _, u in wanted], dtype=logits.dtype, device=logits.device)
    total = cumulative[:, -1]
    # A number that rounds to 1 must not fall behind the last token that has any probability.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))[:, None]
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    greedy = torch.tensor([s.temperature == 0 for s, _ in wanted], device=logits.device)
    ids = torch.where(greedy, logits.argmax(-1), drawn)
    return ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist()


def _truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Remove all but the ``top_k`` most likely tokens, then all outside the smallest set with mass ``top_p``."""
    ordered, order = logits.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        mass = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
        keep &= mass.cumsum(-1) - mass < sampling.top_p
    removed = torch.empty_like(keep)
    removed[order] = ~keep
    return logits.masked_fill(removed, float("-inf"))

"""What the loop awaits: the objects that plugins register."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agl.records import Call, Outcome, Reward, Rollout, Step

if TYPE_CHECKING:
    import torch

Register = Callable[[str, Any], None]
AgentFunction = Callable[..., Any]
"""``agent(task, llm) -> reward``, synchronous or not."""


class Store(Protocol):
    """Durable memory of the Lightning server: a rollout queue and the record of every call.

    A method returns when its effect is on disk. Writes that carry an attempt raise `StaleAttempt` when a newer
    attempt owns the rollout or it has already ended.
    """

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Add rollouts; one whose id is known already is left as it is."""
        ...

    async def lease(self, worker: str, limit: int, seconds: float) -> Sequence[tuple[Rollout, int]]:
        """Give up to ``limit`` waiting rollouts to a worker, each with its new attempt number."""
        ...

    async def heartbeat(self, rollout: str, attempt: int, seconds: float) -> None:
        """Renew a lease."""
        ...

    async def add_call(self, call: Call) -> None:
        """Keep one finished, failed or abandoned call."""
        ...

    async def add_steps(self, rollout: str, attempt: int, steps: Sequence[Step]) -> None:
        """Keep steps; one whose id is known already is left as it is."""
        ...

    async def finish(
        self, rollout: str, attempt: int, outcome: Outcome, returned: Reward | None, error: str | None
    ) -> None:
        """End an attempt. Repeating the same finish is allowed and changes nothing."""
        ...

    async def finished(self, batch: str, after: int, limit: int) -> tuple[int, Sequence[Rollout]]:
        """Ended rollouts of a batch in the order they ended, after a cursor; returns the new cursor as well."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...


class Runner(Protocol):
    """Runs agents: leases rollouts, opens the scope, calls the agent function, reports the end."""

    async def run(self) -> None:
        """Work until cancelled."""
        ...


class Policy(Protocol):
    """The model being trained, as a backend sees it."""

    model: Any
    """The module that generates; the backend must not change its weights."""
    tokenizer: Any
    version: int
    """Grows by one at each weight update."""


class Backend(Protocol):
    """Generates tokens. The gateway reaches it at ``url`` through vLLM's OpenAI-compatible interface."""

    url: str
    """Base URL without ``/v1``."""
    shares_weights: bool
    """Whether it computes with the trainer's own tensors, so that calls are held from the first gradient on; else they
    go on until `update_weights`."""

    async def start(self) -> None:
        """Begin to serve."""
        ...

    async def update_weights(self, version: int) -> None:
        """Serve the policy's present weights under this version, with no cache of older ones."""
        ...

    async def probe(self, prompt_ids: Sequence[int], tokens: int, agent: str = "") -> Sequence[Token]:
        """Sample a few tokens at temperature 1; the canary compares their logprobs with the trainer's.

        Args:
            prompt_ids: the prompt.
            tokens: how many to sample.
            agent: who asks, where each agent has weights of its own (``adapters="agent"``).
        """
        ...

    def check(self) -> None:
        """Raise what ended the backend by itself; asked several times a second while rollouts run.

        Raises:
            BackendError: it will not serve again.
        """
        ...

    async def close(self) -> None:
        """Stop serving and free memory."""
        ...


@dataclass(slots=True)
class LossInputs:
    """What a loss sees of one micro-batch: one entry per sampled token (shape ``[N]``)."""

    logprobs: torch.Tensor
    """Under the weights being trained; carries the gradient."""
    old_logprobs: torch.Tensor
    """Under the weights at the start of the step (the proximal policy)."""
    rollout_logprobs: torch.Tensor
    """As the sampler reported them (the behaviour policy)."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """Each token's share of the step; shares of all micro-batches and ranks sum to 1."""
    calls: torch.Tensor
    """Which call each token belongs to, from 0: the sequences of sequence-level ratios. A call is never split over
    micro-batches."""
    ref_logprobs: torch.Tensor | None = None
    """Under the reference model, when the algorithm needs ``ref_logprobs``."""
    entropies: torch.Tensor | None = None
    """Of the distribution each token was drawn from, with gradient, when the algorithm needs ``entropies``."""
    values: torch.Tensor | None = None
    """The critic's, with gradient, when the algorithm needs ``values``."""
    old_values: torch.Tensor | None = None
    """The critic's at the start of the step."""
    returns: torch.Tensor | None = None
    """What the critic should have said."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The sampled tokens of a whole step, before its first pass; one number for each unless told otherwise."""

    rewards: Sequence[float]
    """Of each token: 0, but at the last token of a call what that call earned. An agent's calls are one episode, and
    what `Algorithm.advantages` gave to a call is what is earned from it on, so a call earned its own minus the next
    one's. A reward that all calls of a rollout share is thereby counted once, at the end."""
    episodes: Sequence[Sequence[int]]
    """The tokens of each agent of each rollout, in the order of time. Observed tokens do not exist here: no value, no
    decay across them."""
    kl: Sequence[float] | None = None
    """``log pi - log pi_ref`` at the start of the step, when the algorithm needs ``kl``."""
    values: Sequence[float] | None = None
    """The critic's at the start of the step, when the algorithm needs ``values``."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What comes of `StepTokens`, one entry per token."""

    advantages: Sequence[float]
    returns: Sequence[float] | None = None
    """What the critic should have said."""


class Algorithm(Protocol):
    """How advantages and the loss are computed, by pure functions.

    An algorithm is made by a factory (a dataclass, usually) that was registered under its name and is called with the
    user's settings as keyword arguments. It may have more:

    * ``needs``: names of what the model must be asked for. ``old_logprobs`` (the default; an extra forward only when a
      step has several passes), ``ref_logprobs``, ``entropies`` and ``values`` arrive in `LossInputs`; ``kl`` is for
      the reward: it arrives in `StepTokens`, or is subtracted from the rewards, times ``kl_coef``, before
      ``advantages`` when there is no ``token_advantages``.
    * ``token_advantages(step: StepTokens) -> TokenAdvantages``: replaces the advantages of calls by those of tokens.
    """

    aggregation: Any
    """How token losses add up; see `agl_trainer.batch.weights`."""

    def advantages(self, values: Sequence[float], groups: Sequence[str]) -> Sequence[float]:
        """Advantage of each unit (a unique rollout, or a rollout's agent) against its group.

        Args:
            values: reward of each unit.
            groups: the group of each unit; equal strings share a baseline.
        """
        ...

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """A scalar to minimise (a sum over tokens, already weighted), and per-micro-batch sums to log."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one answer; the OpenAI names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    frozen: bool = False
    """Sample from the frozen base instead of the policy."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Who asks, from the gateway's headers: ``rollout`` and ``agent``, where there is one."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float
    version: int
    """Policy version that sampled it."""
    finish_reason: str | None = None
    """Set on the last token: ``stop`` or ``length``."""


class Engine(Protocol):
    """Generates inside this process; `agl.endpoint` serves it over HTTP as vLLM would."""

    tokenizer: Any
    """A Hugging Face tokenizer, or one that offers ``decode`` and ``convert_ids_to_tokens``."""
    max_length: int
    """Prompt and answer together, in tokens."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Prompt token ids of a chat.

        Raises:
            UsageError: the chat template refuses the messages; the text names what is wrong.
        """
        ...

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, str]]]:
        """Split an answer into its content and tool calls (``name``, ``arguments`` as JSON text)."""
        ...

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Token]:
        """Sample; closing the iterator aborts the generation."""
        ...

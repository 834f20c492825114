"""The records that travel between agents, server and trainer: frozen, validated where they are made.

Lengths are in tokens, times in seconds since the epoch. Token ids and logprobs are tuples, so a record can be
shared between threads without a copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from agl.errors import CaptureError, NonFiniteReward, RewardError, UsageError

Mode = Literal["train", "eval", "demo"]
Outcome = Literal["ok", "agent_error", "infra_error", "timeout", "truncated"]
CallState = Literal["done", "error", "client_gone"]
StepKind = Literal["model_start", "model_end", "model_error", "tool_start", "tool_end", "tool_error", "parser_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One input for the agent: a JSON object with an id."""

    id: str
    """Names the task; rollouts of one task form a group."""
    data: Mapping[str, Any]
    """What the agent function receives as its first argument."""

    def __post_init__(self) -> None:
        if not self.id:
            raise UsageError("a task needs a non-empty id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What the outcome earned: named parts, and parts that belong to one agent only."""

    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shared by every agent; summed."""
    agents: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Earned by one agent alone, on top of the shared parts."""

    def __post_init__(self) -> None:
        for name, value in self.parts.items():
            check_finite(name, value)
        for agent, parts in self.agents.items():
            for name, value in parts.items():
                check_finite(f"{agent}.{name}", value)
        check_finite("the sum of all parts", self.total)

    @classmethod
    def of(cls, returned: Any) -> Reward:
        """Read what an agent function returned.

        A number is one part named ``reward``. A mapping holds named parts; where a value is itself a mapping,
        its key is an agent and the inner parts are that agent's own.

        Raises:
            RewardError: for anything else, for a boolean inside a mapping of strings, NaN or infinity.
        """
        if isinstance(returned, Reward):
            return returned
        if isinstance(returned, Mapping):
            parts: dict[str, float] = {}
            agents: dict[str, Mapping[str, float]] = {}
            for name, value in cast("Mapping[Any, Any]", returned).items():
                if isinstance(value, Mapping):
                    own = cast("Mapping[Any, Any]", value)
                    agents[str(name)] = {str(part): as_number(f"{name}.{part}", own[part]) for part in own}
                else:
                    parts[str(name)] = as_number(str(name), value)
            return cls(parts=parts, agents=agents)
        return cls(parts={"reward": as_number("reward", returned)})

    @property
    def total(self) -> float:
        """Shared parts plus what every agent earned on its own."""
        return sum(self.parts.values()) + sum(sum(parts.values()) for parts in self.agents.values())

    def for_agent(self, agent: str) -> float:
        """Shared parts plus what this agent earned on its own."""
        return sum(self.parts.values()) + sum(self.agents.get(agent, {}).values())


def as_number(name: str, value: Any) -> float:
    """``value`` as a finite float; booleans count as 0 and 1, numpy and torch scalars are unwrapped."""
    item = getattr(value, "item", None)
    if callable(item):
        with suppress(ValueError, TypeError, RuntimeError):  # an array of several numbers is told below as what it is
            value = item()
    if not isinstance(value, (int, float)):
        raise RewardError(f"reward part {name!r} is {value!r} ({type(value).__name__}); return a number")
    try:
        return check_finite(name, float(value))
    except OverflowError:
        raise RewardError(f"reward part {name!r} has too many digits; a reward is a finite number") from None


def check_finite(name: str, value: float) -> float:
    """Refuse NaN and infinity at the door."""
    if not math.isfinite(value):
        raise NonFiniteReward(f"reward part {name!r} is {value!r}; a reward is a finite number, or None for unscored")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer of a call: exactly the tokens that were sampled."""

    response_ids: tuple[int, ...]
    """Sampled token ids, the stop token included when the model produced it."""
    logprobs: tuple[float, ...]
    """The sampler's processed logprob of each sampled token; as long as ``response_ids``."""
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.logprobs):
            raise CaptureError(
                f"a choice has {len(self.response_ids)} token ids but {len(self.logprobs)} logprobs; "
                "the backend must return one logprob per sampled token"
            )
        if not all(math.isfinite(value) for value in self.logprobs):
            raise CaptureError("a choice has a logprob that is not finite; the engine's weights are broken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to the policy model and its answer, as the gateway recorded it."""

    id: str
    """The gateway's own id, fresh for every generation."""
    rollout: str
    attempt: int
    call_id: str | None = None
    """The id that an adapter minted (``x-agl-call``); SDK retries share it."""
    agent: str = "main"
    parent: str | None = None
    retry: int = 0
    """``x-stainless-retry-count``: how often the SDK had retried before this request."""
    state: CallState = "done"
    error: str | None = None
    model: str = ""
    """Which model answered: ``policy``, ``frozen``, or the name at the user's own endpoint."""
    temperature: float = 1.0
    policy_version: int | None = None
    context: str | None = None
    """How the backend made the prompt, where it tells: see `agl.continuation.Context`."""
    prompt_ids: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    started: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a framework's callback reported."""

    id: str
    """Unique; the server keeps a step once however often it is sent."""
    kind: StepKind
    call_id: str
    """The framework's run id: of the model call for ``model_*``, of the tool call for ``tool_*``, of the output parser
    for ``parser_error``."""
    agent: str | None = None
    parent: str | None = None
    name: str | None = None
    """The model's or tool's name, where the framework tells."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the framework told; nothing of what was said. ``model_end``: ``tool_calls``, the ids of the tool calls
    that the answer makes, and ``unparsed``, how many more do not parse. ``tool_*``: ``tool_call_id``, which of those it
    runs. ``tool_end``: ``result_length`` in characters (see `agl.scope.result_length`), ``status`` ``"error"`` where
    what the tool returned is an error for the model to read. ``*_error``: ``error``."""
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One run of the agent on one task: the unit of grouping, dropping, batching and weighting."""

    id: str
    task: Task
    batch: str
    """Which request of the trainer it belongs to; finished rollouts are collected by batch."""
    mode: Mode = "train"
    optimize: tuple[str, ...] | None = None
    """Names or globs of the agents to train; None selects all."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Request fields that the gateway forces on calls to the policy, such as ``temperature``."""
    max_attempts: int = 2
    attempt: int = 0
    """The attempt whose data this record holds; 0 before the first lease."""
    outcome: Outcome | None = None
    error: str | None = None
    returned: Reward | None = None
    """What the agent function returned; None is unscored, which is not zero."""
    calls: tuple[Call, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def group(self) -> str:
        """Rollouts of one task in one batch share a baseline."""
        return f"{self.batch}/{self.task.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to run one attempt of a rollout until ``expires``; renewed by heartbeats."""

    rollout: Rollout
    attempt: int
    """Numbered from 1; the fencing token that every write must carry."""
    key: str
    """Opens this attempt's own model calls and steps, nothing else."""
    seconds: float
    """How long it lasts from now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One call that counts: state, action, reward of the Markov decision process."""

    rollout: str
    agent: str
    call: str
    """The gateway's id of the call."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    policy_version: int | None = None
    finish_reason: str | None = None
    signal: float = 0.0
    """Weighted sum of the intermediate rewards that the call caused."""
    reward: float | None = None
    """None until credit is assigned, which is not the same as zero."""

    def with_reward(self, reward: float) -> Transition:
        """The same transition with its credit."""
        return replace(self, reward=reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training sequence: transitions that extend one another merged, with a mask over sampled tokens.

    All per-token tuples have the length of ``token_ids``; where ``sampled`` is false their value means nothing.
    """

    rollout: str
    agent: str
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]
    temperatures: tuple[float, ...]
    transitions: tuple[int, ...]
    """Index (into the rollout's transitions) that sampled each token; -1 where not sampled."""


def total_tokens(transitions: Sequence[Transition]) -> int:
    """Sampled tokens of these transitions."""
    return sum(len(transition.response_ids) for transition in transitions)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids in four bytes each: quick to compare and to hash, and a beginning in bytes is one in tokens."""
    return struct.pack(f"{len(token_ids)}i", *token_ids)

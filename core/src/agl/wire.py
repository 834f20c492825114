"""What travels between the Lightning client and the Lightning server, as JSON.

Objects carry the names of the dataclass fields; tuples are lists. Both ends validate with the same dataclasses, so
a message that one end cannot read is refused with the path of the field that is wrong.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from agl.errors import AglError, UsageError
from agl.records import Lease, Outcome, Reward, Rollout, Step

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    """Add rollouts to the queue."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Take unfinished rollouts out of the queue, until they are enqueued again."""

    prefix: str
    """Of the names of their batches; the empty one is of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """Ask for rollouts to run."""

    worker: str
    """Who asks; for people who look for a stuck rollout."""
    limit: int = 1
    seconds: float = 60.0
    """How long the lease lasts without a heartbeat."""
    wait: float = 0.0
    """Seconds to wait for the first rollout."""
    request: str | None = None
    """Names this request: asked again with the same name, the server gives the same leases again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The answer to `LeaseRequest`."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Renew a lease."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What a framework's callbacks reported."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End an attempt."""

    outcome: Outcome
    returned: Reward | None = None
    """None is unscored, which is not zero."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Ended rollouts, and the cursor that asks for what comes after them."""

    cursor: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """An OpenAI-compatible endpoint of the user's own that serves the agents which are not optimised."""

    base_url: str
    """Ends in ``/v1``."""
    model: str
    api_key: str | None = field(default=None, repr=False)
    """Never told again: an answer of the server holds None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """Which policy the gateway serves, and where."""

    upstream: str
    """Base URL of the backend, without ``/v1``."""
    model: str = "policy"
    """The name that clients see."""
    version: int = 0
    state: Literal["serving", "updating"] = "serving"
    """While ``updating``, requests are held, never refused."""
    unselected: Literal["policy", "frozen"] | Upstream = "policy"
    """Who answers the agents that are not optimised."""

    def __post_init__(self) -> None:
        for name, url in (("upstream", self.upstream), ("unselected.base_url", self._own_url())):
            if not url.startswith(("http://", "https://")):
                raise UsageError(f"{name} is {url!r}; write a URL that starts with http:// or https://")

    def _own_url(self) -> str:
        return self.unselected.base_url if isinstance(self.unselected, Upstream) else self.upstream


def encode(record: Any) -> bytes:
    """A record of `agl.records`, or a message of this module, as JSON.

    Raises:
        UsageError: something inside is no JSON.
    """
    try:
        return _adapter(cast(type[Any], type(record))).dump_json((record,))[1:-1]
    except ValueError as error:
        raise UsageError(f"this {type(record).__name__} does not fit into JSON: {error}") from error


def decode(kind: type[T], data: bytes) -> T:
    """Read what `encode` wrote; unknown fields, other types, NaN and infinity are refused.

    Raises:
        UsageError: it names the path of the field that is wrong.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_json(b"[" + data + b"]", strict=True)[0]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"][1:])
        raise FieldError(path, f"{path or kind.__name__}: {first['msg']}, not {shorten(first['input'])}") from error
    except AglError as error:
        raise FieldError("", f"{kind.__name__}: {error}") from error


class FieldError(UsageError):
    """A message whose field at ``path`` is wrong."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def shorten(value: Any) -> str:
    """``repr`` of a value, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[tuple[Any]]:
    from pydantic import ConfigDict, TypeAdapter

    # A one-element tuple: pydantic takes a configuration for nested dataclasses only from a type around them.
    return TypeAdapter(
        cast(Any, GenericAlias(tuple, (kind,))),
        config=ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"),
    )

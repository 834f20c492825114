"""Every hook of agl, in firing order.

Four kinds: *register* (hand named things to the callback), *first result* (stops at the first answer that is not
None), *collect* (every answer counts) and *notify*. Hooks are synchronous; they hand over objects, and the hot
path calls methods of those objects. For before, after, around or on-error write ``@hookimpl(wrapper=True)``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from agl.credit import Baseline
    from agl.protocols import Register
    from agl.records import Rollout, Step, Transition
    from agl.scope import CallInfo

hookspec = pluggy.HookspecMarker("agl")
hookimpl = pluggy.HookimplMarker("agl")

# ---------------------------------------------------------------------------------------------- registration


@hookspec
def agl_register_commands(register: Register) -> None:
    """Register sub-commands of ``agl``: ``register("name", typer_app_or_function)``."""


@hookspec
def agl_register_algorithms(register: Register) -> None:
    """Register algorithms: ``register("name", factory)``, given the settings; see `agl.protocols.Algorithm`."""


@hookspec
def agl_register_backends(register: Register) -> None:
    """Register backends: ``register("name", factory)``, given policy and settings; see `agl.protocols.Backend`."""


@hookspec
def agl_register_stores(register: Register) -> None:
    """Register stores: ``register("scheme", factory)``, called with the store's URL; see `agl.protocols.Store`."""


@hookspec
def agl_register_runners(register: Register) -> None:
    """Register runners: ``register("name", factory)``; see `agl.protocols.Runner`."""


# --------------------------------------------------------------------------------------- transitions: capture


@hookspec
def agl_instrument() -> Callable[[], None] | None:
    """Report a framework's steps to `agl.scope` from now on; return how to stop. Called once per process of agents."""


@hookspec(firstresult=True)
def agl_current_call() -> CallInfo | None:
    """Say who makes the model call that is about to leave. Stops at the first result; the default is `agl.scope`."""


@hookspec(firstresult=True)
def agl_build_transitions(rollout: Rollout) -> Sequence[Transition] | None:
    """Turn a finished rollout into the calls that count. Stops at the first result; the default is the join rule."""


# ------------------------------------------------------------------------------------------- reward and credit


@hookspec
def agl_compute_reward(
    rollout: Rollout,
) -> Mapping[str, float] | Awaitable[Mapping[str, float] | None] | None:
    """Score a finished rollout outside the agent's reach; parts are summed by name. May be awaitable."""


@hookspec
def agl_signal_reward(step: Step) -> Mapping[str, float] | None:
    """Judge one step by named intermediate rewards, summed by name; each is off unless the trainer weighs it."""


@hookspec(firstresult=True)
def agl_assign_credit(
    rollout: Rollout, transitions: Sequence[Transition], discount: float | None
) -> Sequence[float] | None:
    """Spread the reward over the transitions, one number each. First result; the default gives each all of it."""


@hookspec(firstresult=True)
def agl_group_key(rollout: Rollout, transition: Transition, turn: int, baseline: Baseline) -> str | None:
    """Name the group of a transition, whose credits are compared. First result; the default follows the setting."""


# ------------------------------------------------------------------------------------------------------ trainer


@hookspec
def agl_train_start(trainer: Any) -> None:
    """Training is about to begin."""


@hookspec
def agl_weights_updated(version: int) -> None:
    """The backend serves the weights of this version, proven by the canary."""


@hookspec
def agl_log_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Keep or show these metrics. The default writes the local log."""


@hookspec
def agl_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """A training step is done."""


@hookspec
def agl_train_end(trainer: Any) -> None:
    """Training has ended, well or not."""

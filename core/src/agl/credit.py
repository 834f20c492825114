"""Credit: what each call earned, and with which other calls it is compared (LightningRL's upper level).

An agent earns the shared reward parts, its own parts, and the weighted signals of its calls (automatic intermediate
rewards, arXiv 2508.03680 §3.3). `call_rewards` says when: signals at the call that caused them, all the rest at the
agent's last call. From there

* identity (no discount): every call of an agent is credited with all that the agent earned (ibid. §3.2);
* a discount :math:`\\gamma`: a call is credited with the discounted return-to-go over that agent's calls,
  :math:`G_k = r_k + \\gamma G_{k+1}`;
* an algorithm with a critic starts GAE from `call_rewards` itself.

`group_key` says what a credit is compared with. All of this is pure; docs/credit.md has examples.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from agl.errors import RewardError
from agl.hookspecs import hookimpl
from agl.records import Rollout, Transition, token_bytes

Baseline = Literal["task", "agent", "turn", "state"]


@hookimpl(trylast=True)
def agl_assign_credit(
    rollout: Rollout, transitions: Sequence[Transition], discount: float | None
) -> Sequence[float] | None:
    """Identity without a discount, return-to-go with one; None for an unscored rollout."""
    if rollout.returned is None:
        return None
    if discount is None:
        return agent_rewards(rollout, transitions)
    return returns_to_go(call_rewards(rollout, transitions), transitions, discount)


@hookimpl(trylast=True)
def agl_group_key(rollout: Rollout, transition: Transition, turn: int, baseline: Baseline) -> str:
    """The group of the baseline that the trainer was set to."""
    return group_key(rollout, transition, turn, baseline)


def call_rewards(rollout: Rollout, transitions: Sequence[Transition]) -> list[float]:
    """Immediate reward of each transition: its signals, and on its agent's last one what the outcome earned.

    The terminal reward counts once: over the calls of an agent they sum to all that the agent earned.

    Args:
        rollout: scored.
        transitions: of this rollout, in the order their calls started; all of an agent's, or none.

    Raises:
        RewardError: the rollout is unscored, which is not zero.
    """
    if rollout.returned is None:
        raise RewardError(f"rollout {rollout.id!r} is unscored; it has no rewards to spread")
    last = {transition.agent: index for index, transition in enumerate(transitions)}
    return [
        transition.signal + (rollout.returned.for_agent(transition.agent) if last[transition.agent] == index else 0.0)
        for index, transition in enumerate(transitions)
    ]


def agent_rewards(rollout: Rollout, transitions: Sequence[Transition]) -> list[float]:
    """For each transition all that its agent earned in the rollout (arguments and errors as for `call_rewards`)."""
    earned: dict[str, list[float]] = defaultdict(list)
    for transition, reward in zip(transitions, call_rewards(rollout, transitions), strict=True):
        earned[transition.agent].append(reward)
    total = {agent: math.fsum(rewards) for agent, rewards in earned.items()}
    return [total[transition.agent] for transition in transitions]


def returns_to_go(rewards: Sequence[float], transitions: Sequence[Transition], discount: float) -> list[float]:
    r"""Discounted return of each transition over its agent's calls, :math:`G_k = r_k + \gamma G_{k+1}`.

    Calls of other agents in between discount nothing. Choices of one call share its return.
    """
    own: dict[tuple[str, int], float] = defaultdict(float)
    places = [(transition.agent, turn) for transition, turn in zip(transitions, turns(transitions), strict=True)]
    for place, reward in zip(places, rewards, strict=True):
        own[place] += reward
    for agent, turn in sorted(own, key=lambda place: -place[1]):
        if (agent, turn + 1) in own:
            own[agent, turn] += discount * own[agent, turn + 1]
    return [own[place] for place in places]


def turns(transitions: Sequence[Transition]) -> list[int]:
    """Number of each transition's call among the calls of its agent, from 0."""
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    return [numbers[one.agent].setdefault(one.call, len(numbers[one.agent])) for one in transitions]


def group_key(rollout: Rollout, transition: Transition, turn: int, baseline: Baseline) -> str:
    """Calls of a step whose keys are equal are compared with each other.

    ``task``: whole rollouts of a task. ``agent``: rollouts of a task, agent by agent, so that each is measured by its
    own rewards (Dr. MAS, arXiv 2602.08847). ``turn``: an agent's calls of the same number (AT-GRPO, 2510.11062).
    ``state``: an agent's calls in equal states, whenever they came (GiGPO, 2505.10978); see `anchor`.

    Args:
        rollout: of one task and batch, which every key names.
        transition: the call.
        turn: its number among its agent's calls, from 0.
        baseline: what is to be compared.
    """
    match baseline:
        case "task":
            return f"{rollout.group!r}"
        case "agent":
            return f"{rollout.group!r} {transition.agent!r}"
        case "turn":
            return f"{rollout.group!r} {transition.agent!r} turn {turn}"
        case "state":
            return f"{rollout.group!r} {transition.agent!r} state {anchor(transition)}"


def anchor(transition: Transition) -> str:
    """Names the state that the call was made in: a digest of all its prompt tokens.

    The prompt is the state of the token-level decision process, so equal prompts are equal states. An agent that sends
    its whole history meets an equal state only where the history is equal too; one that sends what it sees now meets
    it in loops and from different ways. To compare by something else, implement ``agl_group_key``.
    """
    return hashlib.blake2b(token_bytes(transition.prompt_ids), digest_size=12).hexdigest()

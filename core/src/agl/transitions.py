"""The join rule (which calls count) and the merge rule (which calls share a training row).

A call is a transition if and only if the gateway finished it **and**, where an adapter minted its id, the
framework reported its end. Of an SDK's retries the highest counts. Cancelled, timed-out, abandoned, failed and
cached calls are therefore no transitions. Calls without an id come from programs without an adapter and all count,
but a retry takes the place of the call it repeats: its answer was lost on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

from agl.hookspecs import hookimpl
from agl.records import Call, Rollout, Row, Transition


@hookimpl(trylast=True)
def agl_build_transitions(rollout: Rollout) -> Sequence[Transition]:
    """The join rule; one transition for every choice of every call that counts, in the order the calls started."""
    ended = {step.call_id for step in rollout.steps if step.kind == "model_end"}
    agents = {step.call_id: step.agent for step in rollout.steps if step.kind == "model_start" and step.agent}
    last: dict[str, Call] = {}
    unlabelled: list[Call] = []
    for call in rollout.calls:
        if call.state != "done":
            continue
        if call.call_id is None:
            unlabelled.append(call)
        elif call.call_id in ended:
            rival = last.get(call.call_id)
            if rival is None or (call.retry, call.ended) > (rival.retry, rival.ended):
                last[call.call_id] = call
    counted = sorted([*_without_lost(unlabelled), *last.values()], key=_order)
    return [
        Transition(
            rollout=rollout.id,
            # The framework knows better than the wire: a header may be missing behind a proxy.
            agent=agents.get(call.call_id or "") or call.agent,
            call=call.id,
            prompt_ids=call.prompt_ids,
            response_ids=choice.response_ids,
            logprobs=choice.logprobs,
            temperature=call.temperature,
            policy_version=call.policy_version,
        )
        for call in counted
        for choice in call.choices
        if choice.response_ids
    ]


def _order(call: Call) -> tuple[float, str]:
    return call.started, call.id


def _without_lost(calls: Sequence[Call]) -> list[Call]:
    """Leave out what a retry repeats: the latest earlier call of the agent with the same prompt and a lower count."""
    kept: list[Call] = []
    for call in sorted(calls, key=_order):
        if call.retry:
            for index in reversed(range(len(kept))):
                one = kept[index]
                if one.retry < call.retry and (one.agent, one.prompt_ids) == (call.agent, call.prompt_ids):
                    del kept[index]
                    break
        kept.append(call)
    return kept


def build_rows(transitions: Sequence[Transition]) -> list[Row]:
    """Merge the transitions of one rollout that extend one another; fork where the prefix differs.

    ``(P1, A1), (P1+A1+O2, A2), (P3, A3)`` becomes two rows: ``P1 A1 O2 A2`` with A1 and A2 sampled, and ``P3 A3``.
    Every sampled token stands in exactly one row, under the prefix it was sampled under. A prefix that differs by
    one token forks; it is never healed. Temperatures travel with the tokens.

    Args:
        transitions: of one rollout, in the order their calls started.
    """
    rows: list[Row] = []
    for index, transition in enumerate(transitions):
        parent = _longest_parent(rows, transition)
        if parent is None:
            rows.append(_extend(None, index, transition))
        else:
            rows[parent] = _extend(rows[parent], index, transition)
    return rows


def _longest_parent(rows: Sequence[Row], transition: Transition) -> int | None:
    best, length = None, 0
    for index, row in enumerate(rows):
        size = len(row.token_ids)
        same_agent = row.agent == transition.agent
        if same_agent and length < size <= len(transition.prompt_ids) and transition.prompt_ids[:size] == row.token_ids:
            best, length = index, size
    return best


def _extend(row: Row | None, index: int, transition: Transition) -> Row:
    known = len(row.token_ids) if row else 0
    observed = len(transition.prompt_ids) - known
    sampled = len(transition.response_ids)
    return Row(
        rollout=transition.rollout,
        agent=transition.agent,
        token_ids=transition.prompt_ids + transition.response_ids,
        sampled=(row.sampled if row else ()) + (False,) * observed + (True,) * sampled,
        logprobs=(row.logprobs if row else ()) + (0.0,) * observed + transition.logprobs,
        temperatures=(row.temperatures if row else ()) + (1.0,) * observed + (transition.temperature,) * sampled,
        transitions=(row.transitions if row else ()) + (-1,) * observed + (index,) * sampled,
    )

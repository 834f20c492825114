"""The join rule (which calls count, and which caused what) and the merge rule (which share a training row).

A call is a transition if and only if the gateway finished it **and**, where an adapter minted its id, the
framework reported its end and no error: a framework may throw away an answer that it had already taken. Of an SDK's
retries the highest counts. Cancelled, timed-out, abandoned, failed and cached calls are therefore no transitions. Calls
without an id come from programs without an adapter and all count, but a retry takes the place of the call it repeats:
its answer was lost on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from agl.hookspecs import hookimpl
from agl.records import Call, Rollout, Row, Step, Transition, token_bytes


@hookimpl(trylast=True)
def agl_build_transitions(rollout: Rollout) -> Sequence[Transition]:
    """The join rule; one transition for every choice of every call that counts, in the order the calls started."""
    failed = {step.call_id for step in rollout.steps if step.kind == "model_error"}
    ended = {step.call_id for step in rollout.steps if step.kind == "model_end"} - failed
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
            finish_reason=choice.finish_reason,
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


# ------------------------------------------------------------------------------------------- which call caused it


def causes(rollout: Rollout, transitions: Sequence[Transition]) -> list[int | None]:
    """For each step of a rollout the transition that caused it; None where none did (its call does not count).

    The first of these rules that applies decides, and the last choice of the call that it finds takes the step:

    1. A step of a model call belongs to that call.
    2. A tool that runs a tool call belongs to the call whose answer made it (``tool_calls`` of its ``model_end``).
    3. Else the last call that had ended when the tool or parser began, of those with the step's own parent.
    4. Else the last call of the step's agent that had ended by then.

    Args:
        rollout: with its calls and steps.
        transitions: of this rollout, in the order their calls started.
    """
    call_ids = {call.id: call.call_id for call in rollout.calls}
    ended = {step.call_id: step for step in rollout.steps if step.kind == "model_end"}
    began = {step.call_id: step for step in rollout.steps if step.kind == "tool_start"}
    gateway = {call.id: call.ended for call in rollout.calls}
    by_call: dict[str, int] = {}
    by_tool_call: dict[str, int] = {}
    by_parent: dict[str, list[tuple[float, int]]] = defaultdict(list)
    by_agent: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for index, transition in enumerate(transitions):
        call_id = call_ids.get(transition.call)
        end = ended.get(call_id) if call_id else None
        # Only where no framework reported the end do we go by the gateway's clock.
        place = (end.time if end else gateway.get(transition.call, 0.0), index)
        by_agent[transition.agent].append(place)
        if call_id and end:
            by_call[call_id] = index
            by_tool_call |= {str(tool_call): index for tool_call in end.data.get("tool_calls", ())}
            if end.parent:
                by_parent[end.parent].append(place)

    def last_before(places: Sequence[tuple[float, int]], time: float) -> int | None:
        return max((place for place in places if place[0] <= time), default=(0.0, None))[1]

    def cause(step: Step) -> int | None:
        if step.kind.startswith("model_"):
            return by_call.get(step.call_id)
        if (made := by_tool_call.get(str(step.data.get("tool_call_id")))) is not None:
            return made
        time = began.get(step.call_id, step).time
        beside = last_before(by_parent.get(step.parent or "", ()), time)
        return beside if beside is not None else last_before(by_agent.get(step.agent or "main", ()), time)

    return [cause(step) for step in rollout.steps]


# ------------------------------------------------------------------------------------------------- which share a row


def build_rows(transitions: Sequence[Transition]) -> list[Row]:
    """Merge the transitions of one rollout that extend one another; fork where the prefix differs.

    ``(P1, A1), (P1+A1+O2, A2), (P3, A3)`` becomes two rows: ``P1 A1 O2 A2`` with A1 and A2 sampled, and ``P3 A3``.
    Every sampled token stands in exactly one row, under the prefix it was sampled under. A prefix that differs by
    one token forks; it is never healed. Each agent has contexts of its own. A context is open until a call extends it:
    a second call that extends it forks, and its row holds the context as observed. Of several open contexts the
    longest goes on. Temperatures travel with the tokens.

    Args:
        transitions: of one rollout, in the order their calls started.
    """
    rows: list[list[int]] = []
    row_of: dict[int, list[int]] = {}
    """The row of each context that is open, by the transition it ends with."""
    for index, contexts in enumerate(_known_contexts(transitions)):
        parent = next((context for context in contexts if context in row_of), None)
        if parent is None:
            row: list[int] = []
            rows.append(row)
        else:
            row = row_of.pop(parent)
        row.append(index)
        row_of[index] = row
    return [_row(transitions, row) for row in rows]


def _known_contexts(transitions: Sequence[Transition]) -> list[list[int]]:
    """Earlier transitions of the same agent whose prompt and response each prompt begins with, the longest first.

    In sorted order a text comes right after all that it begins with, so one pass with a stack finds every beginning:
    N calls of L tokens cost O(N log N) comparisons of bytes, not O(N^2).
    """
    found: list[list[int]] = [[] for _ in transitions]
    marks: dict[str, list[tuple[bytes, bool, int]]] = defaultdict(list)
    for index, transition in enumerate(transitions):
        prompt = token_bytes(transition.prompt_ids)
        # Of equal texts contexts come before prompts, and the latest context first, so that the earliest is on top.
        marks[transition.agent].append((prompt, True, index))
        marks[transition.agent].append((prompt + token_bytes(transition.response_ids), False, -index))
    for texts in marks.values():
        stack: list[tuple[bytes, int]] = []
        for text, is_prompt, index in sorted(texts):
            while stack and not text.startswith(stack[-1][0]):
                stack.pop()
            if is_prompt:
                found[index] = [context for _, context in reversed(stack) if context < index]
            else:
                stack.append((text, -index))
    return found


def _row(transitions: Sequence[Transition], chain: Sequence[int]) -> Row:
    """The row of transitions each of which extends the one before."""
    sampled: list[bool] = []
    logprobs: list[float] = []
    temperatures: list[float] = []
    sources: list[int] = []
    for index in chain:
        transition = transitions[index]
        observed, count = len(transition.prompt_ids) - len(sampled), len(transition.response_ids)
        sampled += [False] * observed + [True] * count
        logprobs += [0.0] * observed + list(transition.logprobs)
        temperatures += [1.0] * observed + [transition.temperature] * count
        sources += [-1] * observed + [index] * count
    last = transitions[chain[-1]]
    return Row(
        rollout=last.rollout,
        agent=last.agent,
        token_ids=last.prompt_ids + last.response_ids,
        sampled=tuple(sampled),
        logprobs=tuple(logprobs),
        temperatures=tuple(temperatures),
        transitions=tuple(sources),
    )

"""Which call caused a step: the rules in their order."""

from __future__ import annotations

from typing import Any

import pytest

from agl.records import Call, Choice, Rollout, Step, Task
from agl.transitions import agl_build_transitions, causes


def call(name: str, call_id: str | None = None, *, agent: str = "main", started: float = 0.0, choices: int = 1) -> Call:
    one = Choice(response_ids=(5,), logprobs=(-0.1,))
    return Call(
        id=name,
        rollout="r",
        attempt=1,
        call_id=call_id,
        agent=agent,
        prompt_ids=(1,),
        choices=(one,) * choices,
        started=started,
        ended=started + 0.5,
    )


def step(
    kind: Any, call_id: str, time: float, parent: str | None = None, agent: str | None = None, **data: Any
) -> Step:
    return Step(id=f"{kind}{call_id}", kind=kind, call_id=call_id, parent=parent, agent=agent, data=data, time=time)


def caused(calls: list[Call], *steps: Step) -> dict[str, str | None]:
    """For each step of a tool or parser, and each end of a model call, the call that caused it."""
    rollout = Rollout(id="r", task=Task(id="t", data={}), batch="b", calls=tuple(calls), steps=steps)
    transitions = list(agl_build_transitions(rollout))
    named = [None if index is None else transitions[index].call for index in causes(rollout, transitions)]
    return {one.call_id: name for one, name in zip(steps, named, strict=True) if one.kind not in ("tool_start",)}


X, Y = call("a", "x", started=1.0), call("b", "y", started=2.0)


def test_a_step_of_a_model_call_belongs_to_it():
    got = caused([X, Y], step("model_end", "x", 1.5), step("model_end", "y", 2.5), step("model_error", "z", 3.0))
    assert got == {"x": "a", "y": "b", "z": None}


def test_a_tool_belongs_to_the_answer_that_asked_for_it_whoever_spoke_since():
    """Two sub-agents of one name at once: only the tool call's id tells them apart."""
    ends = [step("model_end", "x", 1.5, tool_calls=["t1", "t2"]), step("model_end", "y", 2.5, tool_calls=["t3"])]
    tools = [step("tool_end", name, 9.0, tool_call_id=name) for name in ("t3", "t1", "t2")]
    assert caused([X, Y], *ends, *tools) == {"x": "a", "y": "b", "t3": "b", "t1": "a", "t2": "a"}


def test_a_parser_belongs_to_the_last_call_of_its_own_chain():
    ends = [step("model_end", "x", 1.5, parent="one"), step("model_end", "y", 2.5, parent="two")]
    parsers = [step("parser_error", "p", 3.0, parent="one"), step("parser_error", "q", 3.0, parent="two")]
    assert caused([X, Y], *ends, *parsers) == {"x": "a", "y": "b", "p": "a", "q": "b"}


def test_else_it_belongs_to_the_last_call_of_its_agent_that_had_ended_when_it_began():
    calls = [X, Y, call("c", "z", agent="judge", started=3.0)]
    ends = [step("model_end", name, time) for name, time in (("x", 1.5), ("y", 2.5), ("z", 3.5))]
    slow = [step("tool_start", "slow", 2.0), step("tool_end", "slow", 4.0)]
    rest = [step("tool_end", "late", 4.0), step("tool_end", "early", 1.0), step("tool_error", "j", 4.0, agent="judge")]
    got = caused(calls, *ends, *slow, *rest)
    assert {name: got[name] for name in ("slow", "late", "early", "j")} == {
        "slow": "a",  # though b had ended before the tool did
        "late": "b",
        "early": None,
        "j": "c",
    }


def test_calls_that_no_framework_reported_go_by_the_gateways_clock():
    got = caused(
        [call("a", started=1.0), call("b", started=2.0)], step("tool_end", "t", 2.2), step("tool_end", "u", 3.0)
    )
    assert got == {"t": "a", "u": "b"}


def test_a_call_that_does_not_count_causes_nothing():
    lost = [step("model_end", "x", 1.5, tool_calls=["t1"]), step("tool_end", "t", 2.0, tool_call_id="t1")]
    refused = call("a", "x", choices=0)
    assert caused([refused], *lost) == {"x": None, "t": None}


def test_the_last_choice_of_a_call_takes_the_step():
    rollout = Rollout(
        id="r",
        task=Task(id="t", data={}),
        batch="b",
        calls=(call("a", "x", choices=3),),
        steps=(step("model_end", "x", 1.5), step("tool_end", "t", 2.0)),
    )
    assert causes(rollout, list(agl_build_transitions(rollout))) == [2, 2]


@pytest.mark.parametrize("parent", [None, "nowhere"])
def test_an_unknown_parent_or_tool_call_falls_through_to_the_agent(parent: str | None):
    got = caused([X], step("model_end", "x", 1.5), step("tool_end", "t", 2.0, parent=parent, tool_call_id="unknown"))
    assert got["t"] == "a"

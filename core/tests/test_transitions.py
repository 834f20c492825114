"""Which calls count (the join rule) and which share a training row (the merge rule)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.records import Call, Choice, Rollout, Step, Task, Transition
from agl.transitions import agl_build_transitions, build_rows


def choice(*ids: int) -> Choice:
    return Choice(response_ids=ids, logprobs=tuple(-0.1 * token for token in ids))


def call(name: str, call_id: str | None = None, *, ids: tuple[int, ...] = (5,), **fields: Any) -> Call:
    return Call(
        **{
            "id": name,
            "rollout": "r",
            "attempt": 1,
            "call_id": call_id,
            "prompt_ids": (1, 2),
            "choices": (choice(*ids),),
        }
        | fields
    )


def step(kind: Any, call_id: str, agent: str | None = None) -> Step:
    return Step(id=f"{kind}/{call_id}", kind=kind, call_id=call_id, agent=agent)


def joined(calls: list[Call], *steps: Step) -> list[Transition]:
    task = Task(id="t", data={})
    return list(agl_build_transitions(Rollout(id="r", task=task, batch="b", calls=tuple(calls), steps=steps)))


def counted(calls: list[Call], *steps: Step) -> list[str]:
    return [transition.call for transition in joined(calls, *steps)]


# --------------------------------------------------------------------------------------------------- which count

END = step("model_end", "x")


@pytest.mark.parametrize(
    ("calls", "steps", "names"),
    [
        pytest.param([call("a")], [], ["a"], id="no adapter: every finished call counts"),
        pytest.param([call("a", "x")], [END], ["a"], id="labelled and ended"),
        pytest.param([call("a", "x")], [], [], id="labelled without an end: cancelled, timed out"),
        pytest.param([call("a", "x")], [step("model_error", "x")], [], id="the framework saw an error"),
        pytest.param([call("a", "x")], [END, step("model_error", "x")], [], id="ended, and then thrown away"),
        pytest.param([call("a", "x")], [step("model_start", "x")], [], id="started only"),
        pytest.param([call("a", state="error")], [], [], id="the gateway saw an error"),
        pytest.param([call("a", state="client_gone")], [], [], id="the client left"),
        pytest.param([call("a", "x", state="client_gone")], [END], [], id="ended, and still the client left"),
        pytest.param([], [END], [], id="an end without a call: a cache hit"),
        pytest.param([call("a", "x"), call("b", "x", retry=1)], [END], ["b"], id="the last retry counts"),
        pytest.param([call("a", "x", retry=1), call("b", "x", retry=0)], [END], ["a"], id="whatever came first"),
        pytest.param(
            [call("a", "x"), call("b", "x", retry=1, state="error")], [END], ["a"], id="a retry that failed is none"
        ),
        pytest.param(
            [call("a", "x", ended=2.0), call("b", "x", ended=1.0)], [END], ["a"], id="two of one retry: the later"
        ),
        pytest.param([call("a"), call("b")], [END], ["a", "b"], id="two equal calls without an id stay two"),
        pytest.param([call("a"), call("b", "x")], [END], ["a", "b"], id="with and without an id"),
        pytest.param([call("a"), call("b", retry=1)], [], ["b"], id="a retry without an id: the first answer was lost"),
        pytest.param([call("a"), call("b"), call("c", retry=1)], [], ["a", "c"], id="it repeats the latest alone"),
        pytest.param([call("a", prompt_ids=(9,)), call("b", retry=1)], [], ["a", "b"], id="of the same prompt"),
        pytest.param([call("a", agent="x"), call("b", retry=1)], [], ["a", "b"], id="of the same agent"),
        pytest.param([call("a"), call("b", retry=1), call("c", retry=2)], [], ["c"], id="retry after retry"),
        pytest.param([call("a", state="error"), call("b", retry=1)], [], ["b"], id="after an error"),
        pytest.param([call("a", "x"), call("b", "y")], [END], ["a"], id="another call's end is not mine"),
        pytest.param([call("a", choices=())], [], [], id="no choice"),
        pytest.param([call("a", ids=())], [], [], id="an empty answer"),
    ],
)
def test_the_join_rule(calls: list[Call], steps: list[Step], names: list[str]):
    assert counted(calls, *steps) == names


def test_transitions_come_in_the_order_their_calls_started():
    calls = [call("late", started=3.0), call("x", "x", started=2.0), call("early", started=1.0)]
    assert counted(calls, END) == ["early", "x", "late"]


def test_every_choice_of_a_call_is_a_transition():
    several = call("a", choices=(choice(5), choice(), choice(6, 7)))
    assert [one.response_ids for one in joined([several])] == [(5,), (6, 7)]


def test_a_transition_holds_exactly_what_the_gateway_kept():
    kept = call("a", agent="writer", temperature=0.7, policy_version=4, ids=(8, 9))
    assert joined([kept]) == [
        Transition(
            rollout="r",
            agent="writer",
            call="a",
            prompt_ids=(1, 2),
            response_ids=(8, 9),
            logprobs=choice(8, 9).logprobs,
            temperature=0.7,
            policy_version=4,
        )
    ]


def test_the_framework_names_the_agent_where_the_wire_did_not():
    calls = [call("a", "x"), call("b", "y", agent="wire"), call("c", agent="alone")]
    ends = [END, step("model_end", "y")]
    named = joined(calls, *ends, step("model_start", "x", "writer"), step("model_start", "y"))
    assert [one.agent for one in named] == ["writer", "wire", "alone"]


# ------------------------------------------------------------------------------------------------- which share


def turn(prompt: list[int], response: list[int], agent: str = "main") -> Transition:
    logprobs = tuple(-0.01 * token for token in response)
    return Transition(
        rollout="r",
        agent=agent,
        call="c",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        logprobs=logprobs,
        temperature=0.5 + len(prompt),
    )


def shapes(transitions: list[Transition]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Token ids of each row, and which transition sampled each of them (-1: observed)."""
    return [(row.token_ids, row.transitions) for row in build_rows(transitions)]


def test_a_conversation_is_one_row():
    got = shapes([turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6]), turn([1, 2, 3, 4, 5, 6], [7])])
    assert got == [((1, 2, 3, 4, 5, 6, 7), (-1, -1, 0, -1, 1, 1, 2))]


def test_a_branch_is_a_row_of_its_own_and_the_trunk_is_trained_once():
    got = shapes([turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 8], [9])])
    assert got == [((1, 2, 3, 4), (-1, 0, -1, 1)), ((1, 2, 8, 9), (-1, -1, -1, 2))]


def test_a_history_that_was_rewritten_forks_and_is_never_healed():
    got = shapes([turn([1, 2], [3, 4]), turn([1, 2, 3, 99, 5], [6])])
    assert got == [((1, 2, 3, 4), (-1, -1, 0, 0)), ((1, 2, 3, 99, 5, 6), (-1, -1, -1, -1, -1, 2 - 1))]


def test_an_answer_that_was_cut_from_the_history_forks():
    """Thinking stripped by a chat template: the next prompt ends before the last answer does."""
    got = shapes([turn([1], [2, 3, 4]), turn([1, 2, 9], [5])])
    assert [ids for ids, _ in got] == [(1, 2, 3, 4), (1, 2, 9, 5)]


def test_choices_of_one_prompt_fork_and_the_chosen_one_goes_on():
    got = shapes([turn([1], [2]), turn([1], [3]), turn([1, 3, 4], [5])])
    assert got == [((1, 2), (-1, 0)), ((1, 3, 4, 5), (-1, 1, -1, 2))]


def test_agents_that_speak_in_turn_have_rows_of_their_own():
    got = build_rows([turn([1], [2], "a"), turn([1, 2, 3], [4], "b"), turn([1, 2, 5], [6], "a")])
    assert [(row.agent, row.token_ids) for row in got] == [("a", (1, 2, 5, 6)), ("b", (1, 2, 3, 4))]


def test_the_longest_beginning_goes_on():
    got = shapes([turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2], [7]), turn([1, 2, 3, 4, 5], [6])])
    assert ((1, 2, 3, 4, 5, 6), (-1, 0, -1, 1, -1, 3)) in got


def test_parallel_calls_and_sub_agents_merge_each_into_its_own_row():
    """Two conversations of one agent and one of a sub-agent, whose calls come in turn."""
    starts: dict[str, list[int]] = {"left": [1, 7], "right": [1, 8], "sub": [1, 7]}
    agents = {"left": "main", "right": "main", "sub": "sub"}
    made: list[Transition] = []
    for number in range(4):
        for name, history in starts.items():
            made.append(turn(history, [20 + number], agents[name]))
            starts[name] = [*history, 20 + number, 30 + number]
    rows = build_rows(made)
    assert [(row.agent, sum(row.sampled)) for row in rows] == [("main", 4), ("main", 4), ("sub", 4)]
    assert [row.token_ids for row in rows] == [tuple(history[:-1]) for history in starts.values()]


def test_a_context_that_was_extended_is_extended_again_only_by_a_fork():
    got = shapes([turn([1], [2]), turn([1, 2], [3]), turn([1, 2], [4]), turn([1, 2, 4], [5])])
    assert got == [((1, 2, 3), (-1, 0, 1)), ((1, 2, 4, 5), (-1, -1, 2, 3))]


def test_of_two_equal_contexts_each_goes_on_once():
    got = shapes([turn([1], [2]), turn([1], [2]), turn([1, 2], [3]), turn([1, 2], [4])])
    assert got == [((1, 2, 3), (-1, 0, 2)), ((1, 2, 4), (-1, 1, 3))]


def merged_slowly(transitions: Sequence[Transition]) -> list[list[int]]:
    """The merge rule written down as it reads: every call is held against every open context."""
    chains: list[list[int]] = []
    for index, one in enumerate(transitions):
        best: list[int] | None = None
        for chain in chains:
            end = transitions[chain[-1]]
            text = end.prompt_ids + end.response_ids
            longer = best is None or len(text) > len(
                transitions[best[-1]].prompt_ids + transitions[best[-1]].response_ids
            )
            if end.agent == one.agent and one.prompt_ids[: len(text)] == text and longer:
                best = chain
        if best is None:
            chains.append([index])
        else:
            best.append(index)
    return chains


@given(st.integers(0, 100_000))
def test_sorting_finds_what_holding_every_call_against_every_context_finds(seed: int):
    made = walk(random.Random(seed), 12)
    rows = build_rows(made)
    got = [list(dict.fromkeys(index for index in row.transitions if index >= 0)) for row in rows]
    assert got == merged_slowly(made)


def test_a_long_conversation_is_merged_fast():
    """200 turns of 100 tokens; and as many calls that share all but their last tokens."""
    order = random.Random(0)
    history: list[int] = []
    made: list[Transition] = []
    for _ in range(200):
        history += [order.randrange(1000, 150_000) for _ in range(50)]
        made.append(turn(history, [order.randrange(1000, 150_000) for _ in range(50)]))
        history += made[-1].response_ids
    forks = [turn([*history[:2000], number], [5]) for number in range(1000)]
    assert len(build_rows(made)) == 1 and len(build_rows(forks)) == 1000
    assert cpu_seconds(made) < 0.2
    assert cpu_seconds(forks) < 2  # held against each other they would cost a thousand times the comparisons


def cpu_seconds(made: Sequence[Transition]) -> float:
    """The best of three, of this process alone: the machine may be busy."""
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        build_rows(made)
        times.append(time.process_time() - start)
    return min(times)


def test_logprobs_and_temperatures_travel_with_their_tokens():
    (row,) = build_rows([turn([1], [2]), turn([1, 2, 3], [4, 5])])
    assert row.sampled == (False, True, False, True, True)
    assert row.logprobs == (0.0, -0.02, 0.0, -0.04, -0.05)
    assert row.temperatures == (1.0, 1.5, 1.0, 3.5, 3.5)


def walk(order: random.Random, longest: int) -> list[Transition]:
    """A random walk over a tree of conversations, with few different tokens so that prefixes meet by chance."""
    known: list[list[int]] = [[1]]
    made: list[Transition] = []
    for _ in range(order.randrange(1, longest)):
        start = order.choice(known)
        prompt = [*start, *(order.randrange(2) for _ in range(order.randrange(3)))]
        response = [order.randrange(2) for _ in range(order.randrange(1, 4))]
        made.append(turn(prompt, response, order.choice("ab")))
        known += [[*prompt, *response], prompt]
    return made


@given(st.integers(0, 10_000))
def test_whatever_an_agent_does_each_sampled_token_stands_once_under_its_own_prefix(seed: int):
    made = walk(random.Random(seed), 9)
    rows = build_rows(made)
    seen = {index: 0 for index in range(len(made))}
    for row in rows:
        assert len({len(row.token_ids), len(row.sampled), len(row.logprobs), len(row.temperatures)}) == 1
        for place, index in enumerate(row.transitions):
            assert (index >= 0) == row.sampled[place]
            if index >= 0:
                one = made[index]
                offset = place - len(one.prompt_ids)
                assert row.token_ids[:place] == one.prompt_ids + one.response_ids[:offset]
                assert row.logprobs[place] == one.logprobs[offset] and row.agent == one.agent
                seen[index] += 1
    assert seen == {index: len(one.response_ids) for index, one in enumerate(made)}

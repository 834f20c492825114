"""Chats are recognised by what their messages say, however a framework writes them; nothing else is."""

from __future__ import annotations

from typing import Any

from agl.continuation import Continuations

ASK = {"role": "user", "content": "how warm is it?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Ulm", "day": 1}'}}],
}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def asked(**settings: Any) -> Continuations:
    chats = Continuations(**settings)
    chats.keep("r", [ASK], TOOLS, CALL, [1, 2, 3])
    return chats


def test_a_chat_that_goes_on_from_an_answer_is_known_by_its_tokens() -> None:
    chat, context = asked().find("r", [ASK, CALL, TOLD], TOOLS)
    assert context == "extended"
    assert chat is not None
    assert (chat.place, chat.tokens()) == (1, [1, 2, 3])


def test_what_frameworks_change_about_an_answer_does_not_matter() -> None:
    again: Any = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "tool_calls": [{"id": "other", "function": {"name": "weather", "arguments": {"day": 1, "city": "Ulm"}}}],
    }
    assert asked().find("r", [ASK, again, TOLD], TOOLS)[1] == "extended"


def test_the_longest_chat_goes_on_and_tokens_are_kept_once() -> None:
    chats = asked()
    first, _ = chats.find("r", [ASK, CALL, TOLD], TOOLS)
    answer = {"role": "assistant", "content": "3"}
    chats.keep("r", [ASK, CALL, TOLD], TOOLS, answer, [1, 2, 3, 4, 5], first)
    chat, _ = chats.find("r", [ASK, CALL, TOLD, answer, ASK], TOOLS)
    assert chat is not None
    assert (chat.place, chat.tokens(), chat.own.tolist()) == (3, [1, 2, 3, 4, 5], [4, 5])


def test_an_answer_that_was_edited_is_told_from_one_that_was_never_given() -> None:
    edited = {"role": "assistant", "content": "no idea"}
    assert asked().find("r", [ASK, edited, TOLD], TOOLS) == (None, "edited")
    example = [{"role": "user", "content": "an example"}, edited]
    assert asked().find("r", [*example, ASK], TOOLS) == (None, "rendered")


def test_other_rollouts_other_tools_and_other_questions_know_nothing_of_it() -> None:
    chats = asked()
    assert chats.find("other", [ASK, CALL, TOLD], TOOLS) == (None, "rendered")
    assert chats.find("r", [ASK, CALL, TOLD], None) == (None, "rendered")
    assert chats.find("r", [{**ASK, "content": "what?"}, CALL, TOLD], TOOLS) == (None, "rendered")


def test_rollouts_that_rested_longest_are_forgotten_when_the_room_is_full() -> None:
    chats = asked(capacity=5)
    chats.keep("s", [ASK], TOOLS, CALL, [1, 2, 3])
    assert chats.find("r", [ASK, CALL], TOOLS)[0] is None
    assert chats.find("s", [ASK, CALL], TOOLS)[0] is not None

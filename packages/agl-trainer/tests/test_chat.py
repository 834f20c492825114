"""Chats become the model's own prompt; answers become tool calls where they are some, and stay text where not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agl.chat import ChatRequest
from agl.errors import UsageError
from agl_trainer.chat import ChatFormat
from agl_trainer.testing import tiny_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NATIVE = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


@pytest.fixture
def chat() -> ChatFormat:
    """A ChatML model whose template knows no tools."""
    return ChatFormat(tiny_tokenizer())


@pytest.fixture
def native() -> ChatFormat:
    """A model whose template shows tools, and messages as they are."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = NATIVE
    return ChatFormat(tokenizer)


def text(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return chat.tokenizer.decode(chat.render(messages, tools))


def turns(chat: ChatFormat, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[str, str]]:
    """Role and content of each turn of a rendered ChatML prompt."""
    rendered = text(chat, messages, tools)
    assert rendered.endswith("<|im_start|>assistant\n")
    parts = rendered.removesuffix("<|im_start|>assistant\n").split("<|im_end|>\n")[:-1]
    return [(part.removeprefix("<|im_start|>").split("\n", 1)[0], part.split("\n", 1)[1]) for part in parts]


def test_a_chat_is_rendered_by_the_models_own_template(chat: ChatFormat):
    assert turns(chat, [{"role": "developer", "content": "be short"}, {"role": "user", "content": "hi é"}]) == [
        ("system", "be short"),
        ("user", "hi é"),
    ]


def test_content_may_come_in_parts_or_not_at_all(chat: ChatFormat):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns(chat, [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]) == [
        ("user", "ab"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize("system", [None, "be short"])
def test_tools_are_told_in_the_system_message_where_the_template_knows_none(chat: ChatFormat, system: str | None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    (role, content), user = turns(chat, [*messages, {"role": "user", "content": "hi"}], [WEATHER])
    assert role == "system" and content.startswith(system or "You can call")
    assert json.dumps(WEATHER["function"]) in content and "<tool_call>" in content
    assert user == ("user", "hi")


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}], ids=["as text", "as an object"])
def test_earlier_tool_calls_and_results_become_text(chat: ChatFormat, arguments: Any):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    got = turns(
        chat,
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ],
    )
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert got == [("user", "?"), ("assistant", written), ("user", "<tool_response>sunny</tool_response>")]


def test_a_second_turn_with_tools_comes_through_the_endpoints_own_reading(chat: ChatFormat):
    """The endpoint turns arguments into objects before it hands messages over."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]}
    request = ChatRequest.read(json.dumps(body).encode())
    assert '"arguments": {"city": "Rome"}' in text(chat, [message.rendered() for message in request.messages])


def test_a_call_of_the_model_reads_back_as_it_was_written(chat: ChatFormat):
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
    _, (call,) = chat.parse(written, [WEATHER])
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert "weather" in (again := text(chat, [message])) and json.loads(call["arguments"]) == {"city": "Zürich"}
    assert json.dumps({"city": "Zürich"}) in again


def test_a_native_template_gets_tools_and_arguments_as_objects(native: ChatFormat):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    shown = text(native, [{"role": "assistant", "content": None, "tool_calls": [call]}], [WEATHER])
    assert shown.startswith(f"TOOLS {json.dumps([WEATHER])}\n")
    assert json.loads(shown.splitlines()[1])["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}


def test_broken_arguments_are_shown_to_the_model_as_it_wrote_them(native: ChatFormat):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    shown = text(native, [{"role": "assistant", "content": None, "tool_calls": [call]}], [WEATHER])
    assert json.loads(shown.splitlines()[1])["tool_calls"][0]["function"]["arguments"] == '{"city": '


def test_a_template_that_refuses_is_the_callers_error():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"messages.*roles must alternate"):
        ChatFormat(tokenizer).render([{"role": "user", "content": "hi"}], None)


def test_a_model_without_a_template_is_refused_with_what_to_do():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match=r"no chat template.*instruct model"):
        ChatFormat(tokenizer)


# ------------------------------------------------------------------------------------------------------- answers

ROME = {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.mark.parametrize(
    ("answer", "content", "calls"),
    [
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "", [ROME]),
        ('I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "I look.", [ROME]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),  # it stopped before the end mark
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "", [ROME]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [{"name": "now", "arguments": "{}"}]),
        (2 * '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n', "", [ROME, ROME]),
        ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),  # Llama 3
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ],
)
def test_tool_calls_are_taken_out_of_an_answer(chat: ChatFormat, answer: str, content: str, calls: list[Any]):
    assert chat.parse(answer, [WEATHER]) == (content, calls)


@pytest.mark.parametrize(
    "answer",
    [
        "It is sunny.",
        '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>["weather"]</tool_call>',
        '{"city": "Rome"}',
        '{"name": "weather"',
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call> <tool_call>broken</tool_call>',
    ],
)
def test_what_is_no_call_stays_content_for_the_agent_to_see(chat: ChatFormat, answer: str):
    """verifiers#1763: broken JSON must not end a rollout."""
    assert chat.parse(answer, [WEATHER]) == (answer, [])


def test_without_tools_nothing_is_a_call(chat: ChatFormat):
    answer = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert chat.parse(answer, None) == (answer, [])

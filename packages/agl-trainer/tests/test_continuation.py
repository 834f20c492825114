"""Prompts that go on from an answer are made of its tokens, under templates of the Qwen and Llama families."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from agl import endpoint
from agl.continuation import Continuations, ShownDifferently
from agl.records import Transition
from agl.transitions import build_rows
from agl_trainer.backends.transformers.engine import TransformersEngine
from agl_trainer.chat import ChatFormat
from agl_trainer.testing import tiny_tokenizer

WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

QWEN = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen 2.5 writes turns and tool calls."""

THINKING = QWEN.replace(
    "{{ m.content }}{% for c in",
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}{% for c in",
)
"""As Qwen 3 does: the thoughts of earlier answers are left out."""

LLAMA = """<|begin_of_text|>{% macro turn(role, said) %}<|start_header_id|>{{ role }}<|end_header_id|>

{{ said }}{% endmacro %}{% if tools %}{{ turn('system', tools | tojson) }}<|eot_id|>{% endif %}{% for m in messages %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ turn('assistant', '') -}}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ turn('ipython' if m.role == 'tool' else m.role, m.content | trim) }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ turn('assistant', '') }}{% endif %}"""
"""As Llama 3.1 writes turns and tool calls."""


def chat_format(template: str) -> ChatFormat:
    """Over bytes and some words, so that a text has more than one way to be written in tokens."""
    tokenizer = tiny_tokenizer(("weather", "arguments", "parameters", "degrees", "HAV", "AVING"))
    if template is LLAMA:
        names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": names, "eos_token": "<|eot_id|>"})
    tokenizer.chat_template = template
    return ChatFormat(tokenizer)


def bytewise(chat: ChatFormat, text: str) -> list[int]:
    """A way to write a text that its tokenizer would not choose: letter by letter."""
    return [token for letter in text for token in chat.tokenizer(letter, add_special_tokens=False)["input_ids"]]


CALLS = {
    QWEN: '<tool_call>{"arguments":{"day":1,  "city":"Ulm"},"name":"weather"}</tool_call>',
    LLAMA: '{"name":"weather","parameters":{"day":1,  "city":"Ulm"}}',
}
CALLS[THINKING] = CALLS[QWEN]


class Agent:
    """A rollout whose model answers with given texts, letter by letter, before a tool or a user speaks on."""

    def __init__(self, template: str, continues: bool) -> None:
        self.chat = chat_format(template)
        self.chats = Continuations() if continues else None
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "how warm is it?"}]
        self.transitions: list[Transition] = []
        self.contexts: list[str] = []

    def turn(self, text: str, then: str | None = None, *, cut: bool = False) -> None:
        """One call, and what is said after it."""
        before, context = self.chats.find("r", self.messages, WEATHER) if self.chats else (None, "rendered")
        prompt = self.chat.render(self.messages, WEATHER)
        if before is not None:
            try:
                prompt = self.chat.extend(before.tokens(), before.place, self.messages, WEATHER)
            except ShownDifferently:
                before, context = None, "template"
        answer = bytewise(self.chat, text) + ([] if cut else [self.chat.tokenizer.eos_token_id])
        content, calls = self.chat.parse(text, WEATHER)
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            said["tool_calls"] = [{"id": "c", "type": "function", "function": call} for call in calls]
        if self.chats:
            self.chats.keep("r", self.messages, WEATHER, said, [*prompt, *answer], before)
        self.transitions.append(
            Transition(
                rollout="r",
                agent="main",
                call=str(len(self.transitions)),
                prompt_ids=tuple(prompt),
                response_ids=tuple(answer),
                logprobs=(-1.0,) * len(answer),
            )
        )
        self.contexts.append(context)
        # As clients do: arguments parsed, and written anew with other spaces.
        for call in said.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}
        self.messages.append(said)
        if then is not None:
            self.messages.append({"role": "tool" if calls else "user", "content": then})

    def rows(self) -> int:
        return len(build_rows(self.transitions))


def conversation(template: str, continues: bool) -> Agent:
    agent = Agent(template, continues)
    agent.turn(CALLS[template], "HAVING 3 degrees")
    agent.turn("it HAVING 3 degrees", "and tomorrow?")
    agent.turn(CALLS[template], "4 degrees")
    agent.turn("4 degrees", cut=True, then="go on")
    agent.turn("that is all")
    return agent


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_every_call_merges_where_none_did(template: str) -> None:
    without, with_tokens = conversation(template, continues=False), conversation(template, continues=True)
    assert without.rows() == 5, "the same text in other tokens extends nothing"
    assert with_tokens.rows() == 1
    assert with_tokens.contexts == ["rendered", *["extended"] * 4]


@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_the_model_reads_what_the_template_would_have_shown_it(template: str) -> None:
    agent = conversation(template, continues=True)
    read = agent.chat.tokenizer.decode(agent.transitions[-1].prompt_ids)
    shown = agent.chat.tokenizer.decode(agent.chat.render(agent.messages[:-1], WEATHER))
    assert CALLS[template] in read
    assert CALLS[template] not in shown
    spaceless = ["".join(sorted(text.replace("\n", "").replace(" ", ""))) for text in (read, shown)]
    assert spaceless[0] == spaceless[1], "but for spaces and the order of fields"
    tail = "<|eot_id|>" if template is LLAMA else "<|im_end|>"
    assert read.count(tail) == shown.count(tail)


def test_thoughts_that_the_template_leaves_out_fork_and_the_reason_is_told() -> None:
    agent = Agent(THINKING, continues=True)
    agent.turn("<think>a guess</think>\n3 degrees", "sure?")
    agent.turn("yes", "really?")
    agent.turn("yes")
    assert agent.contexts == ["rendered", "template", "extended"]
    assert agent.rows() == 2
    assert "a guess" not in agent.chat.tokenizer.decode(agent.transitions[1].prompt_ids)


def test_an_edited_answer_forks_and_the_reason_is_told() -> None:
    agent = Agent(QWEN, continues=True)
    agent.turn("3 degrees", "sure?")
    agent.messages[1]["content"] = "4 degrees"
    agent.turn("yes")
    assert agent.contexts == ["rendered", "edited"]
    assert agent.rows() == 2


def test_a_chat_that_branches_extends_the_answer_it_branches_from() -> None:
    agent = Agent(QWEN, continues=True)
    agent.turn("3 degrees", "sure?")
    start = list(agent.messages)
    agent.turn("yes", "thanks")
    agent.messages = [*start[:-1], {"role": "user", "content": "in Ulm?"}]
    agent.turn("no")
    assert agent.contexts == ["rendered", "extended", "extended"]
    first, _, branch = agent.transitions
    assert branch.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_embedded_engine_goes_on_from_what_it_sampled(engine: TransformersEngine, streaming: bool) -> None:
    """A model of random weights answers with bytes that are no text; their tokens come back all the same."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "say something"}]
    ids: list[list[int]] = []
    contexts: list[str] = []
    async with endpoint.serve_engine(engine) as url, httpx2.AsyncClient(trust_env=False) as client:
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 12, "return_token_ids": True, "stream": streaming}
            got = await client.post(f"{url}/v1/chat/completions", json=body, headers={"x-agl-rollout": "r"})
            assert got.status_code == 200, got.text
            events = [got.json()] if not streaming else events_of(got.text)
            prompt = next(event["prompt_token_ids"] for event in events if "prompt_token_ids" in event)
            contexts.append(next(event["context"] for event in events if "context" in event))
            choices = [choice for event in events for choice in event["choices"]]
            said = "".join((c.get("message") or c.get("delta")).get("content") or "" for c in choices)
            ids += [prompt, prompt + [token for c in choices for token in c.get("token_ids", ())]]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    assert contexts[0] == "rendered"
    for context, before, after in zip(contexts[1:], ids[1::2], ids[2::2], strict=False):
        # Bytes that are no text decode to replacement marks, which the template shows as they came back.
        assert context == "extended"
        assert after[: len(before)] == before


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]

"""Chat format: messages to prompt tokens, answer text to tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agl.continuation import ShownDifferently
from agl.errors import UsageError

HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""Tool calls of the Hermes, Qwen and SmolLM families."""
TAGGED_CALL = re.compile(r"\s*<tool_call>\s*(?P<call>.*?)\s*</tool_call>\s*", re.DOTALL)
"""The same in a whole chat, with the space around, which is the template's."""
BARE_CALL = re.compile(
    r"(?<=<\|end_header_id\|>\n\n)(?:<\|python_tag\|>)?(?P<call>\{(?:(?!<\|).)*\})(?=<\|eo[tm]_id\|>|$)", re.DOTALL
)
"""A tool call of the Llama 3 family in a whole chat: all that a message says."""
PYTHON_TAG = "<|python_tag|>"
"""Precedes a tool call of the Llama 3 family."""

MARK = "\ue000answer\ue001"
"""Of a private-use character, so that no text contains it."""

TOOLS_HEAD = (
    "You can call these functions. To call one, answer with\n"
    '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>\n'
)


class ChatFormat:
    """Renders with the tokenizer's own chat template.

    A ChatML model whose template knows no tools (SmolLM2) gets them in the system message, in Hermes form.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        if template is None:
            raise UsageError(
                "the tokenizer has no chat template, so chats cannot be served; use an instruct model, or set "
                "tokenizer.chat_template and save it with the model"
            )
        self._native_tools = "tools" in template
        self.vllm_parser = _parser_for(template) if self._native_tools else "hermes"
        """What vLLM calls the parser of this family's tool calls; None where it is not known."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Prompt token ids, ending where the assistant begins.

        Raises:
            UsageError: the template refuses the messages.
        """
        return self._apply(messages, tools, tokenize=True)

    def extend(
        self,
        known: Sequence[int],
        place: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """Prompt token ids of a chat whose messages up to the answer at ``place`` are known as tokens.

        What the template writes after that answer is found by putting a mark in the answer's place. The known tokens
        must read as the template would write them, but for the spaces and the order of fields in tool calls.

        Raises:
            ShownDifferently: they do not.
        """
        whole: str = self._apply(messages, tools, tokenize=False)
        marked = [*messages[:place], {"role": "assistant", "content": MARK}, *messages[place + 1 :]]
        parts = self._apply(marked, tools, tokenize=False).split(MARK)
        rest: str = parts[-1]
        known = list(known)
        last = self.tokenizer.decode(known[-1:])
        ended = known[-1] in self.tokenizer.all_special_ids and rest.startswith(last)
        shown = whole.removesuffix(rest) + (last if ended else "")
        if len(parts) != 2 or not whole.endswith(rest) or _alike(self.tokenizer.decode(known)) != _alike(shown):
            raise ShownDifferently
        rest = rest.removeprefix(last) if ended else rest
        return known + self.tokenizer(rest, add_special_tokens=False)["input_ids"]

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, tokenize: bool
    ) -> Any:
        chat = self.spoken(messages, tools)
        if not self._native_tools:
            tools = None
        try:
            return self.tokenizer.apply_chat_template(
                chat,
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
            )
        except Exception as error:  # templates raise whatever they like: jinja errors, KeyError, TypeError
            raise UsageError(f"messages: the model's chat template refuses them: {error}") from error

    def spoken(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """The messages as the template is to see them; tools stand in the text where it knows none."""
        chat = [_plain(message) for message in messages]
        return chat if self._native_tools else _tools_as_text(chat, tools)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, str]]]:
        """Content and tool calls of an answer; what does not parse stays content, for the agent to see."""
        if not tools:
            return text, []
        if text.lstrip().startswith((PYTHON_TAG, "{")):
            call = _call_of(text.strip().removeprefix(PYTHON_TAG))
            return ("", [call]) if call else (text, [])
        calls = [_call_of(match) for match in HERMES_CALL.findall(text)]
        if not calls or None in calls:
            return text, []
        return HERMES_CALL.sub("", text).strip(), [call for call in calls if call]


def _alike(text: str) -> str:
    """The text with every tool call that parses written in one way."""

    def written(match: re.Match[str]) -> str:
        call = _call_of(match["call"])
        if call is None:
            return match[0]
        with suppress(ValueError):
            call["arguments"] = json.loads(call["arguments"])
        return json.dumps(call, sort_keys=True)

    return BARE_CALL.sub(written, TAGGED_CALL.sub(written, text))


def _parser_for(template: str) -> str | None:
    if "<tool_call>" in template:
        return "hermes"
    return "llama3_json" if PYTHON_TAG in template else None


def _call_of(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return {"name": call["name"], "arguments": arguments}
    return {"name": call["name"], "arguments": json.dumps(arguments)}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects, ``developer`` as ``system``."""
    plain = dict(message)
    if plain["role"] == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(part.get("text", "") for part in content)
    elif content is None:
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # the model wrote broken JSON; show it as it was
            arguments = json.loads(arguments)
    function["arguments"] = arguments
    return {**call, "function": function}


def _tools_as_text(chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for message in chat:
        if message["role"] == "tool":
            plain.append({"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"})
        elif message.get("tool_calls"):
            calls = "".join(f"<tool_call>{_as_json(call)}</tool_call>" for call in message["tool_calls"])
            plain.append({"role": message["role"], "content": message["content"] + calls})
        else:
            plain.append(message)
    if tools:
        head = TOOLS_HEAD + "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": plain[0]["content"] + "\n\n" + head}
        else:
            plain.insert(0, {"role": "system", "content": head})
    return plain


def _as_json(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]})

"""Chat format: messages to prompt tokens, answer text to tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agl.errors import UsageError

HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""Tool calls of the Hermes, Qwen and SmolLM families."""
PYTHON_TAG = "<|python_tag|>"
"""Precedes a tool call of the Llama 3 family."""

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

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Prompt token ids, ending where the assistant begins.

        Raises:
            UsageError: the template refuses the messages.
        """
        chat = [_plain(message) for message in messages]
        if not self._native_tools:
            chat = _tools_as_text(chat, tools)
            tools = None
        try:
            return self.tokenizer.apply_chat_template(
                chat, tools=list(tools) if tools else None, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates raise whatever they like: jinja errors, KeyError, TypeError
            raise UsageError(f"messages: the model's chat template refuses them: {error}") from error

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


def _call_of(text: str) -> dict[str, str] | None:
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

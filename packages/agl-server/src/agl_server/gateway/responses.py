"""A request of the Responses API as the chat completion that it is: the policy's tokens are captured from that alone.

What a chat completion cannot do is refused with the name of the field, never left out in silence: responses that the
server would remember, tools that the server would run, input that is neither text nor image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agl.wire import shorten
from agl_server.http import Refused

REFUSED = {
    "background": "answers are given while the client waits",
    "conversation": "nothing is remembered between calls; send the whole conversation as input",
    "previous_response_id": "nothing is remembered between calls; send the whole conversation as input",
    "context_management": "nothing is compacted",
    "prompt": "prompts are not kept here; send instructions and input",
    **dict.fromkeys(("access_programs", "background_options", "image", "moderation"), "it has no meaning here"),
}
"""Fields that change the answer and cannot be served, unless they are null, false or empty; and why not."""

OURS = ("input", "instructions", "include", "tools", "tool_choice", "text", "reasoning", "stream_options", "metadata")
OURS += ("store", "truncation", "max_output_tokens", "max_tool_calls", "parallel_tool_calls")
"""Fields that are translated, or told again in the answer and of no effect. All others mean the same in both APIs."""

LOGPROBS = "message.output_text.logprobs"


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The body of the same request as a chat completion.

    Raises:
        Refused: 400 with the path of the field that is wrong or cannot be served.
    """
    for name, reason in REFUSED.items():
        if body.get(name):
            raise _unsupported(name, reason)
    if body.get("truncation") not in (None, "disabled"):
        raise _unsupported("truncation", "input is never cut")
    if body.get("n") not in (None, 1):
        raise _unsupported("n", "a response is one answer; ask again, or use chat completions")
    chat = {name: value for name, value in body.items() if name not in (*OURS, *REFUSED, "n")}
    chat["messages"] = [*_instructions(body), *_messages(body.get("input"))]
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = _limit(body["max_output_tokens"])
    if tools := _tools(body.get("tools")):
        chat["tools"] = tools
        if body.get("parallel_tool_calls") is not None:
            chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    chat |= _text(body.get("text"))
    if effort := _object(body, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if LOGPROBS in _include(body.get("include")):
        chat["logprobs"] = True
    if body.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    return chat


def _unsupported(param: str, reason: str) -> Refused:
    return Refused(400, f"{param}: is not supported: {reason}", code="unsupported_parameter", param=param)


def _bad(param: str, complaint: str, value: Any) -> Refused:
    return Refused(400, f"{param}: {complaint}, not {shorten(value)}", code="invalid_value", param=param)


def _limit(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise _bad("max_output_tokens", "must be a positive integer", value)
    return value


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise _bad(name, "must be an object", value)
    return value or {}


def _include(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _bad("include", "must be a list", value)
    for name in value or ():
        if name != LOGPROBS:
            raise _unsupported("include", f"only {LOGPROBS!r} can be included, not {shorten(name)}")
    return value or []


# --------------------------------------------------------------------------------------------------------- input


def _instructions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise _bad("instructions", "must be a string", instructions)
    return [{"role": "system", "content": instructions}] if instructions else []


def _messages(given: Any) -> list[dict[str, Any]]:
    """Items as messages: what the assistant said and the tools it called right after make one message, as it was."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise _bad("input", "must be a string or a list of at least one item", given)
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        here = f"input[{index}]"
        if not isinstance(item, dict):
            raise _bad(here, "must be an object", item)
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, here))
            case "function_call":
                _add_call(messages, item, here)
            case "function_call_output":
                content = _content(item.get("output"), f"{here}.output")
                messages.append({"role": "tool", "tool_call_id": _name(item, "call_id", here), "content": content})
            case "reasoning":
                pass  # as with chat completions, where no client sends an earlier turn's reasoning again
            case kind:
                raise _unsupported(f"{here}.type", f"items of type {shorten(kind)} have no place in a chat completion")
    return messages


def _message(item: Mapping[str, Any], here: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _bad(f"{here}.role", "must be 'user', 'assistant', 'system' or 'developer'", role)
    return {"role": role, "content": _content(item.get("content"), f"{here}.content")}


def _content(given: Any, here: str) -> str | list[dict[str, Any]]:
    """A single text as a string, so that it is rendered as it was when it was sampled."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _bad(here, "must be a string or a list of parts", given)
    parts = [_part(part, f"{here}[{index}]") for index, part in enumerate(given)]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, here: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    match kind:
        case "input_text" | "output_text" | "text" | "refusal":
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise _bad(f"{here}.text", "must be a string", text)
            return {"type": "text", "text": text}
        case "input_image" if isinstance(part.get("image_url"), str):
            detail = {"detail": part["detail"]} if part.get("detail") else {}
            return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
        case None:
            raise _bad(here, "must be an object with a type", part)
        case _:
            raise _unsupported(f"{here}.type", f"parts of type {shorten(kind)} are neither text nor an image's URL")


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], here: str) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise _bad(f"{here}.arguments", "must be a string", arguments)
    call = {
        "id": _name(item, "call_id", here),
        "type": "function",
        "function": {"name": _name(item, "name", here), "arguments": arguments},
    }
    messages[-1].setdefault("tool_calls", []).append(call)


def _name(item: Mapping[str, Any], key: str, here: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise _bad(f"{here}.{key}", "must be a name", value)
    return value


# --------------------------------------------------------------------------------------------------------- tools


def _tools(given: Any) -> list[dict[str, Any]]:
    if given is not None and not isinstance(given, list):
        raise _bad("tools", "must be a list", given)
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given or ()):
        here = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise _bad(here, "must be an object", tool)
        if tool.get("type") != "function":
            raise _unsupported(f"{here}.type", f"only functions can be called, not {shorten(tool.get('type'))}")
        if tool.get("defer_loading"):
            raise _unsupported(f"{here}.defer_loading", "all tools are shown to the model")
        _name(tool, "name", here)
        known = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in known if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": _name(choice, "name", "tool_choice")}}
    if choice not in ("none", "auto", "required"):
        raise _unsupported("tool_choice", f"write 'none', 'auto', 'required' or a function, not {shorten(choice)}")
    return choice


def _text(text: Any) -> dict[str, Any]:
    """``text`` as ``response_format`` and ``verbosity``."""
    if text is not None and not isinstance(text, dict):
        raise _bad("text", "must be an object", text)
    told = cast("dict[str, Any]", text or {})
    chat: dict[str, Any] = {}
    if told.get("verbosity") is not None:
        chat["verbosity"] = told["verbosity"]
    form = told.get("format") or {}
    if not isinstance(form, dict):
        raise _bad("text.format", "must be an object", form)
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            chat["response_format"] = {"type": "json_object"}
        case "json_schema":
            schema = {name: value for name, value in form.items() if name != "type" and value is not None}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        case kind:
            raise _unsupported("text.format.type", f"write 'text', 'json_object' or 'json_schema', not {shorten(kind)}")
    return chat

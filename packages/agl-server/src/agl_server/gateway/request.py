"""What an agent asked of the model: validated, and freed of the labels that are ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from agl.wire import shorten
from agl_server.http import Refused, Request

DEEPEST = 64
"""Levels of nesting in a body."""

MOST_CHOICES = 64

LABEL = re.compile(r"[^\x00-\x1f\x7f*?\[\]]{1,128}")
"""Agents, call ids and parents: no control characters, and no glob characters, which `optimize` gives a meaning."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One chat completion request."""

    body: dict[str, Any]
    """As the client sent it, without our labels; a request for a response is translated."""
    call_id: str | None
    agent: str
    parent: str | None
    retry: int
    response: dict[str, Any] | None = None
    """The body as the client sent it, where it asked for a response and not for a chat completion."""

    @property
    def model(self) -> str | None:
        """The model name that the client used; the answer carries it again."""
        return self.body.get("model")

    @property
    def stream(self) -> bool:
        """Whether the client wants server-sent events."""
        return self.body.get("stream") is True


Translate = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the body of a chat completion from that of another API."""


async def read(request: Request, translate: Translate | None = None) -> ModelRequest:
    """Read and check a request.

    Args:
        request: its body is read.
        translate: makes it a chat completion, where it is something else.

    Raises:
        Refused: 400 with the path of the field that is wrong, or 413.
    """
    body = parse(await request.body())
    call_id = _label(request, body, b"x-agl-call", "agl_call_id")
    agent = _label(request, body, b"x-agl-agent", "agl_agent")
    parent = _label(request, body, b"x-agl-parent", "agl_parent")
    if "agent" in request.params:
        agent = _checked(request.params["agent"], "the agent in the URL")
    response = None
    if translate is not None:
        response, body = body, translate(body)
    for name, check in CHECKS.items():
        value = body.get(name)
        if value is not None and (complaint := check(value)) is not None:
            raise _bad(name, f"{complaint}, not {shorten(value)}")
    check_messages(body.get("messages"))
    retry = request.headers.get(b"x-stainless-retry-count", b"0")
    return ModelRequest(body, call_id, agent or "main", parent, int(retry[:9]) if retry.isdigit() else 0, response)


def parse(content: bytes) -> dict[str, Any]:
    """A JSON object; invalid UTF-8, NaN, lone surrogates and bottomless nesting are refused."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {shorten(body)}; send a JSON object", code="invalid_json")
    # Counting brackets costs nothing; only a body that has many can be deep.
    if content.count(b"[") + content.count(b"{") > DEEPEST and _depth(body) > DEEPEST:
        raise Refused(400, f"the body is nested deeper than {DEEPEST} levels", code="invalid_json")
    return body


def _depth(value: Any) -> int:
    depth = 0
    level: list[Any] = [value]
    while level:
        depth += 1
        if depth > DEEPEST:
            break
        children: list[Any] = []
        for container in level:
            children += container.values() if isinstance(container, dict) else container
        level = [child for child in children if isinstance(child, (dict, list))]
    return depth


def _label(request: Request, body: dict[str, Any], header: bytes, key: str) -> str | None:
    """A label from its header, else from the body; it always leaves the body."""
    in_body = body.pop(key, None)
    in_header = request.header(header)
    if in_header is not None:
        return _checked(in_header, f"header {header.decode()}")
    return None if in_body is None else _checked(in_body, key)


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str) or not LABEL.fullmatch(value):
        raise _bad(where, f"{shorten(value)} is no name: use 1 to 128 characters, no control characters or *?[]")
    return value


def _bad(param: str, complaint: str) -> Refused:
    return Refused(400, f"{param}: {complaint}", code="invalid_value", param=param)


# ------------------------------------------------------------------------------------------------- fields


Check = Callable[[Any], str | None]
"""What is wrong with a value, or None."""


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
        return None if right else f"must be a number from {low:g} to {high:g}"

    return check


def _integer(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if right else f"must be an integer from {low} to {high}"

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _model(value: Any) -> str | None:
    return None if isinstance(value, str) and 0 < len(value) <= 512 else "must be a model name"


def _object(value: Any) -> str | None:
    return None if isinstance(value, dict) else "must be an object"


def _stop(value: Any) -> str | None:
    right = isinstance(value, str) or (
        isinstance(value, list) and len(value) <= 64 and all(isinstance(item, str) for item in value)
    )
    return None if right else "must be a string or a list of at most 64 strings"


def _tools(value: Any) -> str | None:
    if not isinstance(value, list):
        return "must be a list"
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return 'must hold {"type": "function", "function": {"name": ...}} objects'
    return None


CHECKS: dict[str, Check] = {
    "model": _model,
    "temperature": _number(0, 2),
    "top_p": _number(1e-6, 1),
    "n": _integer(1, MOST_CHOICES),
    "stop": _stop,
    "seed": _integer(-(2**63), 2**63 - 1),
    "max_tokens": _integer(1, 2**31 - 1),
    "max_completion_tokens": _integer(1, 2**31 - 1),
    "stream": _boolean,
    "stream_options": _object,
    "tools": _tools,
    "logprobs": _boolean,
    "top_logprobs": _integer(0, 20),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "return_token_ids": _boolean,
    "include_reasoning": _boolean,
}
"""Fields that are checked here; null counts as absent. Others are the upstream's own business."""


def check_messages(messages: Any) -> None:
    """Refuse messages that no chat template can take."""
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", f"must be a list of at least one message, not {shorten(messages)}")
    for index, message in enumerate(messages):
        here = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _bad(here, f"must be an object, not {shorten(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"{here}.role", f"must be a role such as 'user', not {shorten(role)}")
        content = message.get("content")
        if content is None:
            if role != "assistant":
                raise _bad(f"{here}.content", f"a {role} message needs content")
        elif isinstance(content, list):
            for number, part in enumerate(content):
                if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                    raise _bad(f"{here}.content[{number}]", f"must be an object with a type, not {shorten(part)}")
        elif not isinstance(content, str):
            raise _bad(f"{here}.content", f"must be a string or a list of parts, not {shorten(content)}")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise _bad(f"{here}.tool_calls", f"must be a list of objects, not {shorten(calls)}")

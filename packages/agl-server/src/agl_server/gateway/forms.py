"""In which form an answer goes to the client: as the chat completion that it is, or as a response made of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from agl_server.gateway import events
from agl_server.gateway.responses import LOGPROBS
from agl_server.http import Refused


class Form(Protocol):
    """Writes one answer; parts of a stream come in their order."""

    def whole(self, completion: dict[str, Any]) -> Any:
        """The whole answer."""
        ...

    def part(self, chunk: dict[str, Any]) -> bytes:
        """What the client is sent for a chunk."""
        ...

    def end(self) -> bytes:
        """What ends a stream as it should end."""
        ...

    def failure(self, refusal: Refused) -> bytes:
        """What ends a stream that failed."""
        ...


class ChatForm:
    """Chat completions, as they come."""

    def whole(self, completion: dict[str, Any]) -> Any:
        """As it is."""
        return completion

    def part(self, chunk: dict[str, Any]) -> bytes:
        """As it is; the upstream sends some for their tokens alone, and nothing is left of those."""
        choices = chunk.get("choices")
        says_something = not choices or any(
            choice.get("delta") or choice.get("finish_reason") or choice.get("logprobs") or choice.get("token_ids")
            for choice in choices
        )
        return events.event(chunk) if says_something else b""

    def end(self) -> bytes:
        """OpenAI's end mark."""
        return events.end()

    def failure(self, refusal: Refused) -> bytes:
        """An event that OpenAI's clients raise as an error."""
        return b"data: " + refusal.body() + b"\n\n"


class ResponseForm:
    """A response of OpenAI's Responses API: one message, then the tool calls, each an item of the output."""

    def __init__(self, asked: Mapping[str, Any], call: str) -> None:
        """Prepare.

        Args:
            asked: the request's body, most of which is told again.
            call: the gateway's id of the call; ids of the response and its items are made of it.
        """
        self._asked = asked
        self._call = call
        self._created = int(time.time())
        self._logprobs = LOGPROBS in (asked.get("include") or ())
        self._output: list[dict[str, Any]] = []
        self._usage: dict[str, Any] | None = None
        self._model = ""
        self._finish_reason: str | None = None
        self._events = 0
        self._open: dict[str, Any] | None = None
        """The item that is being written: the last of the output."""

    # ------------------------------------------------------------------------------------------------ whole answers

    def whole(self, completion: dict[str, Any]) -> Any:
        """The response."""
        choice = next(iter(completion.get("choices") or ()), {})
        message = choice.get("message") or {}
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        if reasoning:
            self._output.append(self._item("reasoning", reasoning))
        calls = message.get("tool_calls") or ()
        text = message.get("content") or message.get("refusal") or ""
        if text or not calls:
            self._output.append(self._item("message", text, self._text_logprobs(choice)))
        for call in calls:
            self._output.append(self._item("function_call", *_called(call)))
        self._finish(completion, choice.get("finish_reason"))
        return self._response()

    def _text_logprobs(self, choice: Mapping[str, Any]) -> list[Any]:
        """Of the tokens of an answer that is nothing but text; of a tool call there is no place for them."""
        return ((choice.get("logprobs") or {}).get("content") or []) if self._logprobs else []

    def _item(self, kind: str, text: str, logprobs: Any = (), name: str = "", id: str = "") -> dict[str, Any]:
        number = len(self._output)
        match kind:
            case "message":
                part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
                about: dict[str, Any] = {"id": f"msg_{self._call}_{number}", "role": "assistant", "content": [part]}
            case "reasoning":
                content = [{"type": "reasoning_text", "text": text}]
                about = {"id": f"rs_{self._call}_{number}", "summary": [], "content": content}
            case _:
                about = {"id": f"fc_{self._call}_{number}", "call_id": id, "name": name, "arguments": text}
        return {"type": kind, "status": "completed", **about}

    def _finish(self, message: Mapping[str, Any], finish_reason: str | None) -> None:
        self._model = message.get("model") or self._model
        self._finish_reason = finish_reason or self._finish_reason
        if usage := message.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
            self._usage = {
                "input_tokens": usage.get("prompt_tokens", 0),
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage.get("completion_tokens", 0),
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage.get("total_tokens", 0),
            }

    def _response(self, status: str | None = None) -> dict[str, Any]:
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self._finish_reason or "")
        asked = self._asked
        return {
            "id": f"resp_{self._call}",
            "object": "response",
            "created_at": self._created,
            "status": status or ("incomplete" if cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": cut} if cut and status is None else None,
            "model": self._model or asked.get("model") or "",
            "output": self._output if status is None else [],
            "usage": self._usage if status is None else None,
            "background": False,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.get("temperature"),
            "text": {"format": {"type": "text"}} | (asked.get("text") or {}),
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
        }

    # ------------------------------------------------------------------------------------------------------ streams

    def part(self, chunk: dict[str, Any]) -> bytes:
        """The events that a chunk becomes."""
        out = b"" if self._events else self._begin(chunk)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                out += self._delta("reasoning", reasoning)
            if text := delta.get("content") or delta.get("refusal"):
                out += self._delta("message", text, self._text_logprobs(choice))
            for call in delta.get("tool_calls") or ():
                out += self._call_delta(call)
            self._finish({}, choice.get("finish_reason"))
        self._finish(chunk, None)
        return out

    def end(self) -> bytes:
        """The rest, and the response as a whole."""
        out = b"" if self._output else self._start("message")
        out += self._close()
        response = self._response()
        return out + self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refused) -> bytes:
        """An event that tells what went wrong."""
        return self._event("error", code=refusal.code, message=refusal.message, param=refusal.param)

    def _begin(self, chunk: Mapping[str, Any]) -> bytes:
        self._finish(chunk, None)
        return b"".join(
            self._event(f"response.{what}", response=self._response("in_progress"))
            for what in ("created", "in_progress")
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        message = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(message) + b"\n\n"

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        where = {} if self._open["type"] == "function_call" else {"content_index": 0}
        place = {"output_index": len(self._output) - 1, "item_id": self._open["id"], **where}
        return self._event(kind, **place, **fields)

    def _delta(self, kind: str, text: str, logprobs: Any = ()) -> bytes:
        """More of a message or of reasoning."""
        out = b"" if self._open is not None and self._open["type"] == kind else self._start(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return out + self._of_item("response.reasoning_text.delta", delta=text)
        part["logprobs"] += logprobs
        return out + self._of_item("response.output_text.delta", delta=text, logprobs=logprobs)

    def _call_delta(self, call: Mapping[str, Any]) -> bytes:
        """More of a tool call; the first of one tells its id and name."""
        arguments, _, name, call_id = _called(call)
        out = b""
        if call_id or self._open is None or self._open["type"] != "function_call":
            out += self._start("function_call", name=name, id=call_id)
        assert self._open is not None
        self._open["arguments"] += arguments
        return out + (self._of_item("response.function_call_arguments.delta", delta=arguments) if arguments else b"")

    def _start(self, kind: str, **about: str) -> bytes:
        out = self._close()
        item = self._item(kind, "", **about)
        self._output.append(item)
        self._open = item
        shown = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {})
        out += self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)
        if "content" in item:
            out += self._of_item("response.content_part.added", part=item["content"][0])
        return out

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            out = self._of_item("response.function_call_arguments.done", **told)
        else:
            part = item["content"][0]
            kind, more = "reasoning_text", {}
            if item["type"] == "message":
                kind, more = "output_text", {"logprobs": part["logprobs"]}
            out = self._of_item(f"response.{kind}.done", text=part["text"], **more)
            out += self._of_item("response.content_part.done", part=part)
        out += self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._open = None
        return out


def _called(call: Mapping[str, Any]) -> tuple[str, tuple[()], str, str]:
    """Arguments, no logprobs, name and id of a tool call, or of a piece of one."""
    function = call.get("function") or {}
    return function.get("arguments") or "", (), function.get("name") or "", call.get("id") or ""

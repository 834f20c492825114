"""What a chat completion request may say: OpenAI's body, checked, with an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agl.errors import UsageError

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
}
"""Sampling fields that are not supported, each with the values at which they do nothing."""


class BadRequest(UsageError):
    """The request cannot be served; answered with a 4xx that names the field."""

    def __init__(self, message: str, field: str | None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.code = code
        self.status = status


class _Part(BaseModel):
    type: Literal["text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # a template may know more fields than we do, such as reasoning_content

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part] | None, BeforeValidator(_as_parts)] = None
    tool_calls: list[_ToolCall] | None = None

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it: one string of content, arguments as objects."""
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"  # OpenAI's newer name of the same thing; templates know the older one
        message["content"] = "\n".join(part.text for part in self.content or ())
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _object_or_text(call["function"]["arguments"])
        return message


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``, as far as it is understood; other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    messages: list[_Message] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: _ResponseFormat | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """Parse and check a body.

        Raises:
            BadRequest: it names the first field that is wrong.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"]) or None
            raise BadRequest(f"{name or 'the body'}: {first['msg']}", name) from error
        for name, neutral in NEUTRAL.items():
            value = (request.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise BadRequest(f"{name}={value!r} is not supported by this engine; leave it out", name)
        return request

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one would stop at once and counts as none."""
        return tuple(stop for stop in self.stop or () if stop)

    def allowed_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model is shown.

        Raises:
            BadRequest: ``tool_choice`` names a tool that is not among them, or asks for one where there is none.
        """
        match self.tool_choice:
            case None | "auto":
                return self.tools or None
            case "none":
                return None
            case "required" if self.tools:
                return self.tools
            case {"function": {"name": str(name)}} if chosen := [
                tool for tool in self.tools or () if _name(tool) == name
            ]:
                return chosen
            case wanted:
                names = ", ".join(repr(_name(tool)) for tool in self.tools or ()) or "none"
                raise BadRequest(
                    f"tool_choice={wanted!r}: write 'none', 'auto', 'required', or name a function of tools ({names})",
                    "tool_choice",
                )


def _name(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", {}).get("name")


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments  # what the model wrote is no JSON; the template shows it as it is
    return value if isinstance(value, dict) else arguments  # pyright: ignore[reportUnknownVariableType]

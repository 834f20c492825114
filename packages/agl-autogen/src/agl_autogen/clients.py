"""Model clients: the one that stands in for an agent's own during a run, and where its calls are answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, cast

from autogen_core import CancellationToken, ComponentModel
from autogen_core.models import ChatCompletionClient, CreateResult, LLMMessage, ModelInfo, RequestUsage
from autogen_core.tools import Tool, ToolSchema
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient, OpenAIChatCompletionClient

from agl import LLM
from agl_autogen.reporting import Run, answered, model_call

MODEL_INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    multiple_system_messages=True,
    family="unknown",
)
SAMPLING = ("temperature", "top_p", "max_tokens", "stop", "seed", "frequency_penalty", "presence_penalty")
"""Settings that clients of other providers have under the same name and with the same meaning."""

ToolChoice = Tool | Literal["auto", "required", "none"]


def model_client(llm: LLM, *, model_info: ModelInfo | None = None, **settings: Any) -> OpenAIChatCompletionClient:
    """AutoGen's own client for ``llm``, for agents that are built for one rollout.

    Args:
        llm: what the agent function received.
        model_info: what the model can; the default is everything but images.
        settings: of ``OpenAIChatCompletionClient``, such as ``temperature``.
    """
    return _openai_client(llm.openai(), model_info or MODEL_INFO, settings)


def _openai_client(
    arguments: Mapping[str, Any], model_info: ModelInfo, settings: Mapping[str, Any]
) -> OpenAIChatCompletionClient:
    known = {key: arguments[key] for key in ("base_url", "api_key", "model")}
    known["http_client"] = arguments["http_async_client"]
    return OpenAIChatCompletionClient(**known, model_info=model_info, **settings)


class Route:
    """Makes clients that ask ``llm`` and are otherwise as their author made them; one for each of the author's."""

    def __init__(self, llm: LLM) -> None:
        self.model = llm.model
        self._arguments = llm.openai()
        self._openai: Any = _openai_client(self._arguments, MODEL_INFO, {})._client
        self._made: dict[int, ChatCompletionClient] = {}

    def __call__(self, own: ChatCompletionClient) -> ChatCompletionClient:
        """The client that answers in the place of ``own``; ``own`` is not changed."""
        if id(own) not in self._made:
            self._made[id(own)] = self._make(own)
        return self._made[id(own)]

    def _make(self, own: ChatCompletionClient) -> ChatCompletionClient:
        around = {key: value for key, value in vars(own).items() if isinstance(value, ChatCompletionClient)}
        if around:  # a cache, or another client around a client: it stays, what it asks is routed
            return _twin(own, **{key: self(value) for key, value in around.items()})
        if isinstance(own, BaseOpenAIChatCompletionClient):
            theirs: Any = own._client
            return _twin(
                own,
                _client=self._openai.with_options(timeout=theirs.timeout, max_retries=theirs.max_retries),
                _create_args={**own._create_args, "model": self.model},
                _resolved_model=self.model,
                _total_usage=RequestUsage(0, 0),
                _actual_usage=RequestUsage(0, 0),
            )
        return _openai_client(self._arguments, own.model_info, _sampling(own))

    async def close(self) -> None:
        """Close the connections, in the loop that opened them."""
        await self._arguments["http_async_client"].aclose()


def _twin(client: ChatCompletionClient, /, **changed: Any) -> ChatCompletionClient:
    """The same client with other attributes. No `copy.copy`: AutoGen's clients connect anew when they are copied."""
    twin: Any = object.__new__(type(client))
    vars(twin).update(vars(client), **changed)
    return twin


def _sampling(client: ChatCompletionClient) -> dict[str, Any]:
    try:
        config: dict[str, Any] = client._to_config().model_dump()
    except NotImplementedError:  # a client of the author's own that tells no settings
        return {}
    return {key: config[key] for key in SAMPLING if config.get(key) is not None}


class WatchedClient(ChatCompletionClient):
    """Stands in for an agent's client during a run: another may answer, and the run is told."""

    def __init__(self, own: ChatCompletionClient, route: Route | None, agent: str, run: Run) -> None:
        """Prepare.

        Args:
            own: the client that the agent's author gave it.
            route: where calls are answered; None leaves them to ``own``.
            agent: who calls.
            run: who is told.
        """
        self.own = own
        self.agent = agent
        self.run = run
        self._answering = own if route is None else route(own)
        self._model = _model_name(own) if route is None else route.model

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: Any = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """Ask the model."""
        with model_call(self.run, self.agent, self._model) as call:
            result = await self._answering.create(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                json_output=json_output,
                extra_create_args=extra_create_args,
                cancellation_token=cancellation_token,
            )
            answered(call, result)
            return result

    async def create_stream(
        self, messages: Sequence[LLMMessage], **arguments: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        """Ask the model, piece by piece. Clients take arguments of their own here, which are handed on."""
        with model_call(self.run, self.agent, self._model) as call:
            async with aclosing(self._answering.create_stream(messages, **arguments)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, CreateResult):
                        answered(call, piece)
                    yield piece

    async def close(self) -> None:
        """Close the author's client, as the author's program asked."""
        await self.own.close()

    def dump_component(self) -> ComponentModel:
        """The author's client: what is dumped during a run loads as it was written, and holds no key of ours."""
        return self.own.dump_component()

    def actual_usage(self) -> RequestUsage:
        """Of the client that answers."""
        return self._answering.actual_usage()

    def total_usage(self) -> RequestUsage:
        """Of the client that answers."""
        return self._answering.total_usage()

    def count_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """As the author's client counts."""
        return self.own.count_tokens(messages, tools=tools)

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """As the author's client counts."""
        return self.own.remaining_tokens(messages, tools=tools)

    @property
    def capabilities(self) -> Any:
        """As the author wrote; AutoGen's older name for `model_info`."""
        return self.model_info

    @property
    def model_info(self) -> ModelInfo:
        """As the author wrote."""
        return self.own.model_info


def _model_name(client: ChatCompletionClient) -> str | None:
    return cast("str | None", getattr(client, "_create_args", {}).get("model"))

"""The model that asks in every agent's place: it sends the calls of selected agents to the policy, and tells of all."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agents import (
    Agent,
    Model,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    RunConfig,
)
from agents.models import get_default_model_settings

from agl import LLM
from agl.scope import RolloutScope
from agl.selection import Selection, clean_name
from agl_openai_agents.reporting import Pending, Reported, model_call
from agl_openai_agents.tracing import watcher

if TYPE_CHECKING:
    from openai import AsyncOpenAI

asking: ContextVar[Agent[Any]] = ContextVar("agl_openai_agents_asking")
"""The agent that is about to ask; set by the input filter of the run configuration."""


class Route:
    """Models that ask ``llm`` and are otherwise as their author made them."""

    def __init__(self, llm: LLM, use_responses: bool | None) -> None:
        self.llm = llm
        self._use_responses = use_responses
        self._home = _running_loop()
        self._clients: dict[asyncio.AbstractEventLoop, _Client] = {}
        """One for each event loop: connections cannot be used in another than they were opened in."""

    def model(self, own: Any) -> Model:
        """The model that answers in the place of an agent's own, which is not changed."""
        client = self._client().openai
        if isinstance(own, OpenAIChatCompletionsModel | OpenAIResponsesModel):
            client = client.with_options(timeout=own._client.timeout, max_retries=own._client.max_retries)
        kind = self._kind(own)
        if type(own) is not OpenAIResponsesWSModel and isinstance(own, kind):
            twin: Any = copy.copy(own)
            twin.model, twin._client = self.llm.model, client
            return twin
        return kind(self.llm.model, client)

    def _kind(self, own: Any) -> type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]:
        if self._use_responses is None:
            return OpenAIResponsesModel if isinstance(own, OpenAIResponsesModel) else OpenAIChatCompletionsModel
        return OpenAIResponsesModel if self._use_responses else OpenAIChatCompletionsModel

    def _client(self) -> _Client:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = _Client(self.llm.async_client())
        return self._clients[loop]

    @contextmanager
    def asked(self) -> Generator[None]:
        """A model of this route is at work inside the block."""
        client = self._client()
        client.calls += 1
        try:
            yield
        finally:
            client.calls -= 1

    async def run_ended(self) -> None:
        """Close the connections of a loop that may end with the run; those of the rollout's own loop stay open."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is not None and loop is not self._home and client.calls == 0:
            del self._clients[loop]
            await client.openai.close()


@dataclass(slots=True)
class _Client:
    openai: AsyncOpenAI
    calls: int = 0
    """Under way."""


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class RoutedModel(Model):
    """The model of a whole run: which model answers is decided for each call, by the agent that asks."""

    def __init__(
        self, route: Route, optimize: Selection, author: RunConfig, rollout: RolloutScope | None, run_id: str
    ) -> None:
        """Prepare.

        Args:
            route: where selected agents ask.
            optimize: which agents are selected, as far as the rollout selects them too.
            author: the configuration that the run would have had without us.
            rollout: who is told.
            run_id: the parent of calls of which the SDK's traces tell none.
        """
        self._route = route
        self._optimize = optimize
        self._author = author
        self._rollout = rollout
        self._run_id = run_id
        self._pending = Pending()
        self._own: dict[int, Model] = {}
        """The authors' models that answered, to be told when a run ends."""

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: ModelSettings,
        tools: Any,
        output_schema: Any,
        handoffs: Any,
        tracing: Any,
        **more: Any,
    ) -> ModelResponse:
        """Ask the model."""
        with self._call(input, model_settings) as (call, model, settings):
            response = await model.get_response(
                system_instructions, input, settings, tools, output_schema, handoffs, tracing, **more
            )
            call.end(response.output)
            return response

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,
        model_settings: ModelSettings,
        tools: Any,
        output_schema: Any,
        handoffs: Any,
        tracing: Any,
        **more: Any,
    ) -> AsyncGenerator[Any]:
        """Ask the model, piece by piece."""
        with self._call(input, model_settings) as (call, model, settings):
            stream: Any = model.stream_response(
                system_instructions, input, settings, tools, output_schema, handoffs, tracing, **more
            )
            async with aclosing(stream) as events:
                async for event in events:
                    if event.type == "response.completed":
                        call.end(event.response.output)
                    yield event

    @contextmanager
    def _call(self, input: Any, settings: ModelSettings) -> Generator[tuple[Reported, Model, ModelSettings]]:
        """Tell of the call that is made inside the block: who answers it, and with which settings."""
        agent = asking.get()
        self._pending.tell_results(self._rollout, input)
        inside, run = watcher.here()
        model, settings = self._answering(agent, settings)
        name = getattr(model, "model", None)
        parent = inside or self._run_id
        with model_call(self._rollout, clean_name(agent.name), parent, name, self._pending) as call:
            if run is not None:
                run.calls.append((call, _may_reject(agent, self._author)))
            with self._route.asked():
                yield call, model, settings

    def _answering(self, agent: Agent[Any], settings: ModelSettings) -> tuple[Model, ModelSettings]:
        given = self._author.model if self._author.model is not None else agent.model
        if self._selects(clean_name(agent.name)):
            # What the author sends to the author's own endpoint stays out of ours.
            return self._route.model(given), replace(settings, extra_headers=None, extra_query=None)
        own = self._own_model(given)
        return own, _own_settings(agent, self._author, settings)

    def _selects(self, name: str) -> bool:
        return name in self._optimize and (self._rollout is None or name in self._rollout.selection)

    def _own_model(self, given: Any) -> Model:
        provider: ModelProvider = self._author.model_provider
        own = given if isinstance(given, Model) else provider.get_model(given)
        self._own[id(own)] = own
        return own

    def get_retry_advice(self, request: Any) -> Any:
        """As the model that answers advises."""
        return self._answering(asking.get(), ModelSettings())[0].get_retry_advice(request)

    def _supports_default_prompt_cache_key(self) -> bool:
        # The SDK asks each model by this name whether it may send a key of its own making.
        model: Any = self._answering(asking.get(), ModelSettings())[0]
        supports = getattr(model, "_supports_default_prompt_cache_key", None)
        return bool(supports()) if callable(supports) else False

    async def _cleanup_on_run_end(self, owner: object) -> None:
        for own in list(self._own.values()):
            await own._cleanup_on_run_end(owner)
        await self._route.run_ended()


def _own_settings(agent: Agent[Any], author: RunConfig, settings: ModelSettings) -> ModelSettings:
    """What the agent's own model is sent. Under a model for the whole run, the SDK leaves out what it would else
    choose for a model by its name, such as the effort of a reasoning model."""
    given = author.model if author.model is not None else agent.model
    if isinstance(given, Model):
        return settings
    usual = get_default_model_settings() if agent.model is None else _by_name(agent.model)
    if agent.model_settings != usual:
        return settings
    chosen = get_default_model_settings() if given is None else get_default_model_settings(given)
    return chosen.resolve(settings)


def _by_name(model: Any) -> ModelSettings:
    return get_default_model_settings(model) if isinstance(model, str) else ModelSettings()


def _may_reject(agent: Agent[Any], author: RunConfig) -> frozenset[str]:
    """Names of the input guardrails of a run that begins with this agent, but for what may be output guardrails too."""
    asked = {one.get_name() for one in (*agent.input_guardrails, *(author.input_guardrails or ()))}
    answered = {one.get_name() for one in (*agent.output_guardrails, *(author.output_guardrails or ()))}
    return frozenset(asked - answered)

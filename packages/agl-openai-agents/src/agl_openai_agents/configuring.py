"""The run configuration: the author's own, with a model for the whole run that knows which agent asks."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agents import RunConfig
from agents.run import CallModelData, ModelInputData

from agl import LLM, scope
from agl.selection import Selection
from agl_openai_agents import watch_if_asked
from agl_openai_agents.routing import Route, RoutedModel, asking


def run_config(
    llm: LLM,
    optimize: Sequence[str] | None = None,
    *,
    config: RunConfig | None = None,
    use_responses: bool | None = None,
) -> RunConfig:
    """Let the agents of a run ask ``llm``; give it as ``Runner.run(..., run_config=...)``.

    It reaches agents behind handoffs and agents that are tools (`Agent.as_tool`). Runs that a tool or a guardrail of
    the author's starts by itself need it too, or `install`.

    Args:
        llm: what the agent function received.
        optimize: exact names or globs of agents. It only narrows what the trainer selects; agents that are not selected
            by both keep their own model.
        config: the author's own configuration. Everything in it holds, its input filter included.
        use_responses: whether the selected agents ask through the Responses API. Left out, an agent with a model object
            keeps that object's API, and the others use Chat Completions.

    Raises:
        SelectionError: ``optimize`` is no list of names.
    """
    return routed(Route(llm, use_responses), Selection(optimize), config or RunConfig())


def routed(route: Route, optimize: Selection, author: RunConfig) -> RunConfig:
    """The author's configuration with our model and filter in it."""
    watch_if_asked()
    theirs = author.call_model_input_filter

    async def tell_who_asks(data: CallModelData[Any]) -> ModelInputData:
        asking.set(data.agent)
        if theirs is None:
            return data.model_data
        filtered = theirs(data)
        return await filtered if inspect.isawaitable(filtered) else filtered

    model = RoutedModel(route, optimize, author, scope.current_rollout(), uuid.uuid4().hex)
    return replace(author, model=model, call_model_input_filter=tell_who_asks)

"""Who answers a call: the policy, its frozen base, or an endpoint of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from yarl import URL

from agl.wire import PolicyState, Upstream
from agl_server.gateway.request import ModelRequest
from agl_server.queue import LiveAttempt

POLICY, FROZEN = "policy", "frozen"

FORCED = {"logprobs": True, "return_token_ids": True, "include_reasoning": True}
"""Without these the backend keeps tokens or logprobs to itself."""

SAME = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""Two names of one field: forcing one must not leave the other standing."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes and what it becomes."""

    url: URL
    model: str
    body: dict[str, Any]
    headers: dict[str, str]
    owned: bool
    """It is our backend, which must tell its tokens; not an endpoint of the user's own."""
    version: int | None
    """The policy's version when the request left; None for anything that is not the policy."""
    temperature: float


def choose(policy: PolicyState, request: ModelRequest, attempt: LiveAttempt | None) -> Target:
    """Route by agent: optimised agents reach the policy, the others what the policy's owner chose for them."""
    selected = attempt is None or request.agent in attempt.selection
    unselected = policy.unselected
    if not selected and isinstance(unselected, Upstream):
        return _foreign(unselected, request)
    model = POLICY if selected or unselected == POLICY else FROZEN
    body = {**request.body, **FORCED, "model": model}
    if model == POLICY and attempt is not None:
        _force(body, attempt.rollout.sampling)
    if body.get("temperature") is None:
        body["temperature"] = 1.0  # else the backend's own default would rule, and nobody would know it
    headers = {"content-type": "application/json"}
    if attempt is not None:
        headers["x-agl-rollout"] = attempt.rollout.id
        headers["x-agl-agent"] = quote(request.agent, safe=" /:|,;@+()#&=")
    return Target(
        url=_address(policy.upstream.rstrip("/") + "/v1"),
        model=model,
        body=body,
        headers=headers,
        owned=True,
        version=policy.version if model == POLICY else None,
        temperature=float(body["temperature"]),
    )


def _foreign(upstream: Upstream, request: ModelRequest) -> Target:
    """Nothing is forced: a strict endpoint refuses fields that it does not know."""
    headers = {"content-type": "application/json"}
    if upstream.api_key is not None:
        headers["authorization"] = f"Bearer {upstream.api_key}"
    temperature = request.body.get("temperature")
    return Target(
        url=_address(upstream.base_url.rstrip("/")),
        model=upstream.model,
        body={**request.body, "model": upstream.model},
        headers=headers,
        owned=False,
        version=None,
        temperature=1.0 if temperature is None else float(temperature),
    )


def _force(body: dict[str, Any], sampling: Mapping[str, Any]) -> None:
    for name, value in sampling.items():
        body[name] = value
        body.pop(SAME.get(name, ""), None)


@functools.lru_cache(maxsize=16)
def _address(base_url: str) -> URL:
    return URL(f"{base_url}/chat/completions")

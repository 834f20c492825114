"""The exact tokens of an answer, collected from it or from its chunks, and taken out of what the client sees."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from agl.errors import CaptureError
from agl.records import Choice
from agl_server.gateway.request import ModelRequest
from agl_server.gateway.target import Target

NO_IDS = (
    "the policy's backend returned no token ids ({what}): it must honour `return_token_ids`; "
    "use vLLM 0.10.2 or newer, or another backend that has it"
)
NO_LOGPROBS = (
    "the policy's backend returned {logprobs} logprobs for {ids} tokens: it must return one for each sampled token; "
    "with vLLM start it with --logprobs-mode processed_logprobs and without --max-logprobs 0"
)


@dataclass(slots=True)
class _Partial:
    ids: list[Any] = field(default_factory=list[Any])
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None


class Sampled:
    """Collects tokens with `take`; the same code reads whole answers and chunks of a stream."""

    def __init__(self, request: ModelRequest, target: Target) -> None:
        self._owned = target.owned
        self._wanted: int = target.body.get("n") or 1
        self._asked_model = request.model
        self._keep_ids = request.body.get("return_token_ids") is True
        self._keep_logprobs = request.body.get("logprobs") is True
        self._hide_reasoning = request.body.get("include_reasoning") is False
        self._choices: dict[int, _Partial] = {}
        self._finished = 0
        self.prompt_ids: list[Any] | None = None
        self._is_policy = target.version is not None
        self._version_at_start = target.version
        self._told_version: int | None = None
        self.context: str | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Collect from an answer or a chunk, and leave in it what the client asked for.

        Raises:
            CaptureError: it is not shaped as an answer.
        """
        try:
            self._take_head(message)
            for choice in message.get("choices", ()):
                self._take_choice(choice)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise CaptureError(
                f"the upstream's answer has an unknown shape: {type(error).__name__}: {error}"
            ) from error

    def _take_head(self, message: dict[str, Any]) -> None:
        if self._asked_model is not None:
            message["model"] = self._asked_model
        prompt_ids = message.get("prompt_token_ids")
        if prompt_ids is not None:
            self.prompt_ids = prompt_ids
        if not self._keep_ids:
            message.pop("prompt_token_ids", None)
        if self._owned:
            self.context = message.pop("context", None) or self.context
        version = message.pop("weight_version", None)
        if isinstance(version, int) and self._is_policy:
            # Choices of one call may end under different weights: the oldest says how stale the call can be.
            self._told_version = version if self._told_version is None else min(version, self._told_version)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        partial = self._choices.get(choice["index"])
        if partial is None:
            partial = self._choices[choice["index"]] = _Partial()
        ids = choice.get("token_ids") if self._keep_ids else choice.pop("token_ids", None)
        if ids:
            partial.ids += ids
        logprobs = choice.get("logprobs")
        if logprobs and logprobs.get("content"):
            partial.logprobs += [entry["logprob"] for entry in logprobs["content"]]
        if self._owned and not self._keep_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
        if self._hide_reasoning:
            spoken = choice.get("message") or choice.get("delta") or {}
            spoken.pop("reasoning", None)
            spoken.pop("reasoning_content", None)
        if choice.get("finish_reason") is not None and partial.finish_reason is None:
            partial.finish_reason = choice["finish_reason"]
            self._finished += 1

    @property
    def version(self) -> int | None:
        """Policy version that sampled it: what the backend told, else the one that was served at the start."""
        return self._version_at_start if self._told_version is None else self._told_version

    @property
    def complete(self) -> bool:
        """Every choice that was asked for has ended."""
        return self._finished >= self._wanted

    def check_prompt(self) -> None:
        """Refuse a policy's stream that does not begin with its prompt's tokens.

        Raises:
            CaptureError: it names the setting that is missing.
        """
        if self._owned and self.prompt_ids is None:
            raise CaptureError(NO_IDS.format(what="no prompt_token_ids"))

    def tokens(self) -> tuple[tuple[int, ...], tuple[Choice, ...]]:
        """Prompt ids and choices.

        An endpoint of the user's own need not tell its tokens: what is not whole counts as none there.

        Raises:
            CaptureError: our own backend withheld tokens or logprobs; the message names the setting.
        """
        try:
            if self.prompt_ids is None:
                raise CaptureError(NO_IDS.format(what="no prompt_token_ids"))
            prompt = _ids(self.prompt_ids)
            return prompt, tuple(self._choice(self._choices[index]) for index in sorted(self._choices))
        except CaptureError:
            if self._owned:
                raise
            return (), ()

    def _choice(self, partial: _Partial) -> Choice:
        ids = _ids(partial.ids)
        if len(ids) != len(partial.logprobs):
            if not ids:
                raise CaptureError(NO_IDS.format(what="no token_ids"))
            raise CaptureError(NO_LOGPROBS.format(logprobs=len(partial.logprobs), ids=len(ids)))
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in partial.logprobs):
            raise CaptureError("the upstream returned a logprob that is not a finite number; its weights are broken")
        return Choice(
            response_ids=ids, logprobs=tuple(map(float, partial.logprobs)), finish_reason=partial.finish_reason
        )


def _ids(values: Any) -> tuple[int, ...]:
    """Token ids, checked at the speed of C."""
    try:
        ids: tuple[int, ...] = tuple(array("i", values))
    except (TypeError, OverflowError) as error:
        raise CaptureError(f"the upstream's token ids are no 32-bit integers: {error}") from error
    if ids and min(ids) < 0:
        raise CaptureError(f"the upstream returned the negative token id {min(ids)}")
    return ids

"""Which chats go on from answers that were sampled here, so that their prompts are made of the sampled tokens.

Text does not tell its tokens: ``HAV`` + ``ING`` reads as ``H`` + ``AVING`` does, and a tool call comes back with other
spaces. A prompt that is rendered from messages alone may therefore differ from what was sampled; its call then extends
nothing, starts a row of its own, and the policy learns under a prefix that it never saw. So the tokens of a rollout's
chats are remembered here, by what their messages say, and the engine renders only what came after them (`Extender`).
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

Context = Literal["rendered", "extended", "template", "edited"]
"""How a prompt was made. ``rendered``: from its messages; no answer of this rollout stands in them. ``extended``: from
sampled tokens. ``template``: from its messages, because the chat template shows an earlier answer differently, as those
do that leave out old thoughts. ``edited``: from its messages, because the agent changed an earlier answer."""

CAPACITY = 1 << 24
"""Tokens that are remembered, of all rollouts together: 64 MB. The rollouts that rested longest are forgotten."""


class ShownDifferently(Exception):
    """The chat template shows an answer otherwise than it was sampled."""


class Extender(Protocol):
    """An `agl.protocols.Engine` that can go on from tokens."""

    def extend(
        self,
        known: Sequence[int],
        place: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """Prompt token ids of a chat: ``known``, and the template's own for what follows.

        Args:
            known: tokens of the messages up to the answer at ``place``, and of this, as it was sampled.
            place: of that answer in the messages.
            messages: the whole chat.
            tools: that it is shown.

        Raises:
            ShownDifferently: the template shows the known messages otherwise.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chat:
    """The tokens of a chat up to an answer."""

    place: int
    """Of that answer in the messages."""
    before: Chat | None
    own: array[int]
    """Tokens after those of the chat before."""

    def tokens(self) -> list[int]:
        """All of them."""
        parts: list[array[int]] = []
        chat: Chat | None = self
        while chat is not None:
            parts.append(chat.own)
            chat = chat.before
        return [token for part in reversed(parts) for token in part]


@dataclass(slots=True)
class _Rollout:
    chats: dict[bytes, Chat]
    """By what their messages say."""
    prompts: set[bytes]
    size: int = 0


class Continuations:
    """Remembers the chats of rollouts."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._rollouts: OrderedDict[str, _Rollout] = OrderedDict()
        self._room = capacity

    def find(
        self, rollout: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Chat | None, Context]:
        """The longest beginning of a chat that ends with an answer of this rollout; and if none does, why."""
        memory = self._rollouts.get(rollout)
        if memory is None:
            return None, "rendered"
        said = _said(messages, tools)
        for place in reversed(range(len(messages))):
            if (chat := memory.chats.get(said[place + 1])) is not None:
                return chat, "extended"
        # An answer was given to these messages, and another one stands in its place.
        edited = any(said[place] in memory.prompts for place, one in enumerate(messages) if one["role"] == "assistant")
        return None, "edited" if edited else "rendered"

    def keep(
        self,
        rollout: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        answer: Mapping[str, Any],
        tokens: Sequence[int],
        before: Chat | None = None,
    ) -> None:
        """Remember an answer.

        Args:
            rollout: whose.
            messages: that it answers.
            tools: that the chat was shown.
            answer: the message that the agent got.
            tokens: of the messages and the answer.
            before: the chat that the prompt extended, so that its tokens are kept once.
        """
        memory = self._rollouts.setdefault(rollout, _Rollout({}, set()))
        self._rollouts.move_to_end(rollout)
        said = _said([*messages, answer], tools)
        own = array("i", tokens[len(before.tokens()) if before else 0 :])
        memory.prompts.add(said[-2])
        memory.chats[said[-1]] = Chat(len(messages), before, own)
        memory.size += len(own)
        self._room -= len(own)
        while self._room < 0 and len(self._rollouts) > 1:
            self._room += self._rollouts.popitem(last=False)[1].size


def _said(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[bytes]:
    """A digest of what was said before each message, and one of everything."""
    digest = blake2b(_canonical(list(tools or ())), digest_size=16)
    digests = [digest.digest()]
    for message in messages:
        digest.update(_canonical(_essence(message)))
        digests.append(digest.digest())
    return digests


def _essence(message: Mapping[str, Any]) -> Any:
    """What a message says, however a framework writes it down."""
    if message["role"] != "assistant":
        return message
    calls = [
        [call["function"]["name"], _parsed(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    # Frameworks add fields to an answer and number its tool calls anew; templates show neither.
    return ["assistant", message.get("content") or "", calls]


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode("utf-8", "surrogatepass")

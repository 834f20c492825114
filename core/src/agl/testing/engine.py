"""An engine without a model: it says what a script tells it, in tokens that a person can read."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from agl.protocols import Sampling, Token

Reply = Callable[[str, Mapping[str, str]], str]
"""``reply(prompt, labels) -> text``: what to answer to a rendered prompt, and who asks."""

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ByteTokenizer:
    """One token for each byte of UTF-8 (byte + 3); 2 ends a turn."""

    end = 2
    """The end-of-turn token."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added."""
        return [byte + 3 for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of token ids; incomplete characters become replacement characters."""
        end = b"" if skip_special_tokens else b"<|im_end|>"
        pieces = (bytes([token - 3]) if token >= 3 else end for token in token_ids)
        return b"".join(pieces).decode(errors="replace")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token on its own."""
        return [self.decode([token]) for token in token_ids]


class ScriptedEngine:
    """Implements `agl.protocols.Engine`; an answer is what ``reply`` returns, or the next of given texts.

    The chat template is like ChatML and extends: the prompt of a second turn begins with the first turn's prompt
    and answer, token by token. Tool calls are written in Hermes' form; see `tool_call`.
    """

    def __init__(
        self,
        reply: Reply | Iterable[str] = ("ok",) * 1000,
        *,
        latency: float = 0.0,
        token_delay: float = 0.0,
        max_length: int = 100_000,
    ) -> None:
        """Prepare the script.

        Args:
            reply: a function of the prompt's text and the labels, or the texts to answer, in order.
            latency: seconds before the first token.
            token_delay: seconds before each token.
        """
        self.tokenizer = ByteTokenizer()
        self.max_length = max_length
        self.version = 0
        """The policy version that tokens claim."""
        self.latency = latency
        self.token_delay = token_delay
        self.running = 0
        """Generations in progress."""
        self.aborted = 0
        """Generations that were closed before their last token."""
        self._texts = None if callable(reply) else deque(reply)
        self._reply: Reply = reply if callable(reply) else self._next

    def _next(self, prompt: str, labels: Mapping[str, str]) -> str:
        assert self._texts is not None
        if not self._texts:
            raise LookupError("the script has no more texts; give ScriptedEngine as many as there are calls")
        return self._texts.popleft()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Prompt token ids: each turn as ``<|im_start|>role``, a line break, the content and the end token."""
        encode = self.tokenizer.encode
        ids: list[int] = []
        if tools:
            ids += [*encode(f"<|im_start|>tools\n{json.dumps(tools)}"), self.tokenizer.end, *encode("\n")]
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            content = message["content"] + "".join(_write(call["name"], call["arguments"]) for call in calls)
            ids += [*encode(f"<|im_start|>{message['role']}\n{content}"), self.tokenizer.end, *encode("\n")]
        return ids + encode("<|im_start|>assistant\n")

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[dict[str, str]]]:
        """Take the tool calls out of an answer; one that is no JSON stays in the content, arguments as text stay so."""
        calls: list[dict[str, str]] = []

        def take(match: re.Match[str]) -> str:
            try:
                call = json.loads(match[1])
                arguments = call["arguments"]
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                calls.append({"name": call["name"], "arguments": text})
            except (ValueError, KeyError, TypeError):
                return match[0]
            return ""

        return _CALL.sub(take, text), calls

    def logprob(self, position: int, token_id: int) -> float:
        """The logprob that the token at this position of an answer claims; the same for ever."""
        return -(1 + (31 * position + 7 * token_id) % 97) / 100

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Token]:
        """Answer as the script says, cut at ``max_tokens``."""
        text = self._reply(self.tokenizer.decode(prompt_ids), sampling.labels)
        ids = [*self.tokenizer.encode(text), self.tokenizer.end]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        finished = False
        self.running += 1
        try:
            await asyncio.sleep(self.latency)
            for position, token_id in enumerate(ids):
                await asyncio.sleep(self.token_delay)
                finished = position + 1 == len(ids)
                reason = ("length" if cut else "stop") if finished else None
                yield Token(token_id, self.logprob(position, token_id), self.version, reason)
        finally:
            self.running -= 1
            self.aborted += not finished


def tool_call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool, for scripts: ``tool_call("search", query="agl")``."""
    return _write(name, arguments)


def _write(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}</tool_call>"

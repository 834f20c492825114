"""Turns sampled tokens into text as they come: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Turns tokens into text as they come; text that the next token may still change is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ids: list[int] = []
        self._settled = 0  # tokens before this one only give context, so that word spaces come out right
        self._read = 0  # all text of the tokens before this one is in `text`
        self._shown = 0  # characters of the text since `_settled` that are in `text`
        self.text = ""
        self.sent = 0
        """How much of ``text`` was given out."""
        self.stopped_by: str | None = None
        """The stop string that was met; ``text`` ends before it."""

    def feed(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        self._ids.append(token_id)
        text = self._decode(self._settled)
        certain = _without_partial_character(text)
        self._append(certain[self._shown :])
        self._shown = max(self._shown, len(certain))
        if certain == text:
            self._settled, self._read = self._read, len(self._ids)
            self._shown = len(self._decode(self._settled))
        return self._give(len(self.text) - self._held())

    def flush(self) -> str:
        """No token will follow: return what was held back, an incomplete character as a replacement."""
        self._append(self._decode(self._settled)[self._shown :])
        return self._give(len(self.text))

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _append(self, text: str) -> None:
        if not text or self.stopped_by is not None:
            return
        before = len(self.text)
        self.text += text
        found = [
            (at, stop) for stop in self._stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]

    def _held(self) -> int:
        """Length of the longest end of the text that may grow into a stop string."""
        if self.stopped_by is not None:
            return 0
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        ends = range(min(longest, len(self.text)), 0, -1)
        return next((size for size in ends if any(stop.startswith(self.text[-size:]) for stop in self._stops)), 0)

    def _give(self, until: int) -> str:
        until = max(until, self.sent)
        given, self.sent = self.text[self.sent : until], until
        return given


def _without_partial_character(text: str) -> str:
    """Cut up to three replacement characters at the end: a character of UTF-8 may lack three bytes."""
    for _ in range(3):
        text = text.removesuffix("\ufffd")
    return text

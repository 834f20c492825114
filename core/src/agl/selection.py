"""Which agents are optimised: ``optimize=["writer", "re*"]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from agl.errors import SelectionError


class Selection:
    """Exact names or globs of agents. ``None`` selects every agent."""

    def __init__(self, patterns: Sequence[str] | None) -> None:
        if isinstance(patterns, str):
            raise SelectionError(f"optimize={patterns!r} is a string; write optimize=[{patterns!r}]")
        if patterns is not None and not patterns:
            raise SelectionError("optimize=[] selects no agent; leave it out to optimise all of them")
        self.patterns = tuple(patterns) if patterns is not None else None

    def __contains__(self, agent: str) -> bool:
        return self.patterns is None or any(fnmatchcase(agent, pattern) for pattern in self.patterns)

    def check(self, seen: Iterable[str]) -> None:
        """Refuse a pattern that matches no agent.

        Args:
            seen: the names of all agents that made a call.

        Raises:
            SelectionError: it lists the names that were seen.
        """
        names = sorted(set(seen))
        for pattern in self.patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                listing = ", ".join(repr(name) for name in names) or "none at all"
                raise SelectionError(
                    f"optimize={list(self.patterns or ())!r}: no agent is named {pattern!r}. Agents seen: {listing}"
                )


def clean_name(name: str) -> str:
    """An agent's name as it may travel in a header: 128 characters, none that `optimize` gives a meaning."""
    return re.sub(r"[^ -~]|[*?\[\]]", "_", name.strip())[:128]

"""Selecting agents by name or glob; a name that nobody bears is told with the names that were seen."""

from __future__ import annotations

import pytest

from agl.errors import SelectionError
from agl.selection import Selection


@pytest.mark.parametrize(
    ("patterns", "selected", "others"),
    [
        (None, ["writer", "", "anyone"], []),
        (["writer"], ["writer"], ["Writer", "rewriter", "writer2", ""]),
        (["re*", "judge"], ["rewriter", "re", "judge"], ["writer"]),
        (["team/*"], ["team/a", "team/a/b"], ["team", "other/a"]),
        (["w?iter", "[ab]"], ["writer", "a", "b"], ["wwriter", "c"]),
    ],
)
def test_agents_are_selected_by_exact_name_or_glob(patterns: list[str] | None, selected: list[str], others: list[str]):
    selection = Selection(patterns)
    assert [name for name in [*selected, *others] if name in selection] == selected


def test_a_string_is_not_taken_for_a_list_of_letters():
    with pytest.raises(SelectionError, match=r"optimize='writer' is a string; write optimize=\['writer'\]"):
        Selection("writer")


def test_an_empty_list_selects_nobody_and_is_refused():
    with pytest.raises(SelectionError, match=r"leave it out to optimise all"):
        Selection([])


def test_a_name_that_was_never_seen_is_told_with_those_that_were():
    Selection(["writer", "re*"]).check(["rewriter", "writer", "judge"])
    Selection(None).check([])
    with pytest.raises(SelectionError, match=r"no agent is named 'wirter'\. Agents seen: 'judge', 'writer'"):
        Selection(["writer", "wirter"]).check(["writer", "judge", "writer"])
    with pytest.raises(SelectionError, match=r"Agents seen: none at all"):
        Selection(["writer"]).check([])

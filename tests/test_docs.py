"""The pages tell the truth: links lead somewhere, code parses, named things exist, and pages stay short."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from agl import hookspecs

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "core/*.md", "packages/*/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)
SESSIONS = set(re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
WIRE_KEYS = {"agl_call_id", "agl_agent", "agl_parent"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


@pages
def test_code_parses(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)
    for code in blocks(page, "toml"):
        tomllib.loads(code)


@pages
def test_hooks_that_a_page_names_exist(page: Path) -> None:
    packages = {path.name for path in ROOT.glob("**/src/agl_*")}
    named = set(
        re.findall(r"\bagl_(?:register|compute|build|assign|signal|current|train|step|log)_\w+", page.read_text())
    )
    assert {name for name in named if not hasattr(hookspecs, name)} <= packages


@pages
def test_nox_sessions_that_a_page_names_exist(page: Path) -> None:
    assert set(re.findall(r"nox -s (\w+)", page.read_text())) <= SESSIONS


@pages
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 300


def test_the_configuration_page_tells_every_setting() -> None:
    from agl_trainer.config import as_markdown

    assert (ROOT / "docs/configuration.md").read_text() == as_markdown(), (
        "run: python -m agl_trainer.config > docs/configuration.md"
    )


@pages
def test_a_page_holds_no_placeholder(page: Path) -> None:
    text = page.read_text()
    assert not [word for word in ("TO BE MEASURED", "DEMO_" + "TABLE", "TODO", "FIXME") if word in text]

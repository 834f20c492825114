"""agl starts at once: nothing heavy is imported before it is needed. Seconds: ``benchmarks/startup.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = sorted(path.name for path in (Path(__file__).parent.parent / "packages").glob("*/src/*/"))
ADAPTERS = [name for name in PACKAGES if name not in ("agl_server", "agl_trainer", "agl_demo")]
HEAVY = ["torch", "transformers", "accelerate", "numpy", "starlette", "uvicorn", "aiohttp", "openai"]
SLOW = ["asyncio", "ssl", "httpx", "httpx2", "pydantic"]
"""Tens of milliseconds each: too much for a command that only prints its help."""


def imported(code: str, suspects: list[str]) -> str:
    """Those of the suspects that are loaded after the code ran in a fresh interpreter."""
    code = f"import sys\n{code}\nprint([name for name in {suspects!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return told.stdout.splitlines()[-1]


@pytest.mark.parametrize("module", ["agl", "agl.cli", *ADAPTERS])
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    assert imported(f"import {module}", HEAVY) == "[]"


def test_an_agent_that_imports_agl_does_not_wait_for_the_plugin_manager() -> None:
    assert imported("import agl", [*SLOW, "pluggy", "importlib.metadata", "typer"]) == "[]"


def test_the_help_of_agl_waits_for_nothing_that_it_does_not_show() -> None:
    run = "from agl.cli import main\nsys.argv = ['agl', '--help']\ntry: main()\nexcept SystemExit: pass"
    assert imported(run, [*HEAVY, *SLOW]) == "[]"


def test_every_public_name_can_be_imported() -> None:
    assert imported("from agl import *\nimport agl\nassert set(agl.__all__) <= set(globals())", HEAVY) == "[]"

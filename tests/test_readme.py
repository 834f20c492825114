"""The program in the README runs, as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PROGRAM = re.compile(r"<!-- program: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
"""A block is a program where ``<!-- program: name -->`` stands on the line above it."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    programs = PROGRAM.findall(README.read_text())
    assert programs, "README.md marks no program: put `<!-- program: name -->` above its ```python block"
    for name, code in programs:
        (tmp_path / f"{name}.py").write_text(code)
        done = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}"


def test_the_program_of_the_readme_is_short() -> None:
    for name, code in PROGRAM.findall(README.read_text()):
        statements = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(statements) <= 20, name


def test_the_readme_gives_the_two_commands() -> None:
    text = README.read_text()
    assert 'pip install "nox[uv]" && nox -s demo' in text
    assert 'pip install "nox[uv]" && nox -s tests' in text

"""What every test of the workspace shares: where the data lies, and what CI does not forgive."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent
DATA = Path(os.environ.get("AGL_DATA", ROOT.parent / "shared" / "data"))
NO_DATA = f"no data folder at {DATA}; set AGL_DATA to one (see docs/index.md)"
IN_CI = os.environ.get("CI") == "true"

settings.register_profile("agl", deadline=None, derandomize=IN_CI)
settings.load_profile("agl")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real tasks, traces and golden vectors; a test that asks for it is skipped where there is none."""
    return DATA


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the workspace."""
    return ROOT


def needs_data(item: pytest.Item) -> bool:
    """Whether a test reads the data folder, by its mark or by the fixture."""
    return item.get_closest_marker("needs_data") is not None or "data_dir" in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs data where there is none, and say so."""
    if needs_data(item) and not DATA.is_dir():
        pytest.skip(NO_DATA)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test that needs data is a failed one: the data is there, so nothing may look away."""
    report = yield
    if IN_CI and report.skipped and needs_data(item) and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs data, and CI allows no skip: {report.longrepr}"
    return report

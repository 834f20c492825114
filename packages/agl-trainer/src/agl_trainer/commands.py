"""``agl train``, ``agl eval`` and their relatives: a run described by a TOML file."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from agl.errors import ConfigError
from agl.plugins import nearest

FILE_KEYS = ("agent", "tasks", "eval_tasks", "warmup")
PATH_KEYS = ("model", "output_dir")
"""Settings that are paths relative to the file."""
WARMUP_KEYS = ("demonstrate", "agents", "tasks", "steps", "batch", "learning_rate")


def train(
    config: Annotated[Path, typer.Argument(help="A TOML file; see docs/configuration.md.")],
    resume: Annotated[Path | None, typer.Option(help="Folder of an interrupted run, to go on where it stood.")] = None,
) -> None:
    """Train the agent that a configuration file describes."""
    trainer = trainer_from(config, **({"resume": resume} if resume else {}))
    result = trainer.fit()
    if not trainer.session.ranks.leads:
        return
    typer.echo(f"run: {result.folder}\nmodel: {result.model}")
    if result.gain is not None:
        typer.echo(f"held-out gain: {result.gain}")


def evaluate(
    config: Annotated[Path, typer.Argument(help="The same TOML file.")],
    model: Annotated[str | None, typer.Option(help="Evaluate this model instead, such as runs/.../model.")] = None,
) -> None:
    """Evaluate a model on the held-out tasks of a configuration file; nothing is trained."""
    trainer = trainer_from(config, **(_instead(model) if model else {}))
    if not trainer.eval_tasks:
        raise ConfigError(f"{config}: eval_tasks is missing, so there is nothing to evaluate on")
    with trainer.session as session:
        evaluation = session.evaluate("evaluation", trainer.eval_tasks)
    assert evaluation is not None
    if not trainer.session.ranks.leads:
        return
    typer.echo(f"reward {evaluation.reward} on {len(evaluation.scores)} tasks, {evaluation.unscored} unscored")
    for name, value in evaluation.parts.items():
        typer.echo(f"  {name}: {value:.3f}")


def _instead(model: str) -> dict[str, Any]:
    """A single adapter is merged into its base; one for each agent is served as it is."""
    from agl_trainer.adapters import saved_adapters

    return {"model": model} if saved_adapters(model) else {"model": model, "lora_rank": 0, "adapters": "shared"}


def replay(folder: Annotated[Path, typer.Argument(help="runs/.../refused/...")]) -> None:
    """Find the rows of a refused step whose loss or gradient is not finite."""
    from agl_trainer import numerics

    culprits = numerics.replay(folder)
    for culprit in culprits:
        typer.echo(str(culprit))
    if not culprits:
        typer.echo("each row is finite on its own; only their sum is not")


def vllm(
    model: Annotated[str, typer.Argument(help="A directory or Hugging Face id of the architecture that is trained.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="After --, vLLM's own arguments.")] = None,
    host: Annotated[str, typer.Option(help="Other hosts than this need AGL_VLLM_KEY.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.")] = 8001,
    python: Annotated[str | None, typer.Option(help="Interpreter of the environment that has vLLM.")] = None,
) -> None:
    """Run a vLLM server for trainers that name it in backend={'name': 'vllm', 'urls': [...]}."""
    from agl_trainer.backends.vllm import options
    from agl_trainer.models import find_model

    key = os.environ.get("AGL_VLLM_KEY")
    if not key and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"host={host!r}: others can reach it, and its routes change weights; set a key in AGL_VLLM_KEY"
        )
    line = options.command(python, find_model(model), {"host": host, "port": port})
    environment = options.environment(python) | ({"AGL_VLLM_KEY": key} if key else {})
    os.execvpe(line[0], [*line, *(arguments or [])], environment)


def trainer_from(path: Path, **overrides: Any) -> Any:
    """A trainer from a file; paths in it are relative to the file.

    Raises:
        ConfigError: the file, a key or a value is wrong; an unknown key comes with the nearest known one.
    """
    from agl_trainer.config import TrainConfig

    try:
        settings = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"no configuration file {str(path)!r}: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError and TOMLDecodeError
        raise ConfigError(f"{path} is not TOML: {error}") from error
    known = [*FILE_KEYS, *TrainConfig.model_fields]
    for key in settings:
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}{nearest(key, known)}")
    for key in ("agent", "tasks", "model"):
        if key not in settings | overrides:
            raise ConfigError(f"{path}: setting {key!r} is missing")
    _check_kinds(path, settings)
    folder = path.parent.resolve()
    if "model" in settings and (folder / settings["model"]).is_dir():
        settings["model"] = str(folder / settings["model"])  # else it is the id of a model
    if "output_dir" in settings:
        settings["output_dir"] = str(folder / settings["output_dir"])
    for place in (os.getcwd(), str(folder)):
        if place not in sys.path:
            sys.path.insert(0, place)
    from agl_trainer.loop import Trainer  # only now: it loads torch, which a misspelt key need not wait for

    agent = _function(settings.pop("agent"), folder)
    tasks = folder / settings.pop("tasks")
    held_out = settings.pop("eval_tasks", None)
    return Trainer(
        agent,
        tasks,
        eval_tasks=folder / held_out if held_out else None,
        warmup=_warmup(settings.pop("warmup", None), folder),
        **(settings | overrides),
    )


def _check_kinds(path: Path, settings: dict[str, Any]) -> None:
    """The settings that are read here, before `TrainConfig` looks at the others."""
    kinds = dict.fromkeys((*PATH_KEYS, "agent", "tasks", "eval_tasks"), (str, "text")) | {"warmup": (dict, "a table")}
    for key, (kind, wanted) in kinds.items():
        if not isinstance(settings.get(key, kind()), kind):
            raise ConfigError(f"{path}: setting {key!r} = {settings[key]!r}: must be {wanted}")


def _function(path: str, folder: Path) -> Any:
    where, _, name = path.rpartition(":")
    if where.endswith(".py"):
        where = str(folder / where)
    from agl.runner import load_agent

    return load_agent(f"{where}:{name}")


def _warmup(table: dict[str, Any] | None, folder: Path) -> Any:
    if table is None:
        return None
    from agl_trainer.tasks import read_tasks
    from agl_trainer.warmup import Warmup

    for key in table:
        if key not in WARMUP_KEYS:
            raise ConfigError(f"unknown setting 'warmup.{key}'{nearest(key, WARMUP_KEYS)}")
    if "demonstrate" not in table:
        raise ConfigError("setting 'warmup.demonstrate' is missing")
    if "tasks" in table:
        table["tasks"] = [task.data for task in read_tasks(folder / table["tasks"])]
    return Warmup(**{**table, "demonstrate": _function(table["demonstrate"], folder)})

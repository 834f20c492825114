"""The command ``agl``; its sub-commands come from plugins."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agl import plugins
from agl.errors import AglError
from agl.hookspecs import hookimpl
from agl.protocols import Register

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"agl {version('agl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Reinforcement learning for the language model inside any agent."""


def list_plugins() -> None:
    """List the plugins that are loaded, and the hooks that each implements."""
    pm = plugins.manager()
    for name, plugin in sorted(pm.list_name_plugin()):
        hooks = sorted(caller.name for caller in pm.get_hookcallers(plugin) or [])
        typer.echo(f"{name:<12} {plugins.ORIGINS.get(name, 'built in'):<24} {', '.join(hooks)}")


class CorePlugin:
    """The commands that the core itself brings."""

    @hookimpl
    def agl_register_commands(self, register: Register) -> None:
        """Register ``agl plugins`` and ``agl worker``."""
        from agl.runner import worker

        register("plugins", list_plugins)
        register("worker", worker)


def main() -> None:
    """Run ``agl``; an error of ours is one line for people, not a traceback."""
    try:
        pm = plugins.manager()
        if not pm.has_plugin("cli"):
            plugins.register(pm, CorePlugin(), "cli")
        for name, command in sorted(plugins.commands().items()):
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
        app()
    except AglError as error:
        typer.secho(f"agl: {type(error).__name__}: {error}", err=True, fg="red")
        sys.exit(2)

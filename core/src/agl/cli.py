"""The command ``agl``; its sub-commands come from plugins."""

from __future__ import annotations

import os
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


def worker(
    agent: Annotated[str, typer.Argument(help="module:function or file.py:function")],
    url: Annotated[str, typer.Option(envvar="AGL_URL", help="The Lightning server.")],
    key: Annotated[str, typer.Option(envvar="AGL_KEY", help="Its key; better given by AGL_KEY than typed.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at once.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that one rollout may take.")] = 600.0,
) -> None:
    """Run agents for a Lightning server, in this process, until interrupted."""
    import asyncio  # here and below, because `agl --help` has no use for them

    from agl.client import LightningClient
    from agl.processes import end_with_parent
    from agl.runner import AsyncRunner, load_agent

    end_with_parent()
    sys.path.insert(0, os.getcwd())
    function = load_agent(agent)

    typer.echo(f"agl worker: runs {agent} for {url}; Ctrl-C ends it")

    async def work() -> None:
        async with LightningClient(url, key) as client:
            await AsyncRunner(function, client, concurrency=concurrency, timeout=timeout).run()

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        typer.echo("agl worker: stopped")


class CorePlugin:
    """The commands that the core itself brings."""

    @hookimpl
    def agl_register_commands(self, register: Register) -> None:
        """Register ``agl plugins`` and ``agl worker``."""
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

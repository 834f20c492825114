"""Runs agents: leases rollouts from the Lightning server, opens the scope, calls the agent function, reports the end.

All rollouts of one process share one event loop, because an asynchronous HTTP client cannot outlive its loop.
Synchronous agent functions run in threads that carry the scope. Nobody can end such a thread from outside: one that
never returns is given up when its time is over, and does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl import plugins, scope
from agl.errors import RewardError, ServerError, StaleAttempt, UsageError
from agl.llm import LLM
from agl.protocols import AgentFunction
from agl.records import Lease, Outcome, Reward
from agl.selection import Selection

if TYPE_CHECKING:
    from agl.client import LightningClient

INFRASTRUCTURE_ERRORS = {
    "APIConnectionError",
    "APIError",  # as such, of no status: the SDKs raise it for an answer that broke off in the middle
    "APITimeoutError",
    "InternalServerError",
    "ConnectError",
    "ReadError",
    "ReadTimeout",
    "RemoteProtocolError",
}
"""Names of exceptions that mean "the model could not be reached, or not to the end": not the agent's fault."""

LONGEST_ERROR = 4000
"""Characters of an agent's error that are kept: its beginning and its end."""


class AsyncRunner:
    """Runs up to ``concurrency`` rollouts at once in this process."""

    def __init__(
        self,
        agent: AgentFunction,
        client: LightningClient,
        *,
        concurrency: int = 32,
        timeout: float = 600.0,
        lease_seconds: float = 60.0,
    ) -> None:
        """Prepare; nothing runs before `run`.

        Args:
            agent: ``agent(task, llm) -> reward``, synchronous or not.
            client: used from the loop that `run` runs in.
            timeout: seconds after which an attempt is ended with outcome ``timeout``.
            lease_seconds: a dead runner's rollouts are given to another after this long.
        """
        self.agent = agent
        self.client = client
        self.concurrency = concurrency
        self.timeout = timeout
        self.lease_seconds = lease_seconds
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Lease and run rollouts until cancelled; then cancel what still runs."""
        stop = plugins.instrument()
        try:
            while True:
                free = self.concurrency - len(self._running)
                if free == 0:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for lease in await self.client.lease(self.name, free, self.lease_seconds, wait=10.0):
                    task = asyncio.create_task(self._attempt(lease), name=f"{lease.rollout.id}/{lease.attempt}")
                    self._running.add(task)
                    task.add_done_callback(self._ended)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            stop()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The lease will run out and the rollout will be tried again; the reason must not vanish with it.
            print(f"agl: attempt {task.get_name()} could not be reported: {error}", file=sys.stderr)

    async def _attempt(self, lease: Lease) -> None:
        heart = asyncio.create_task(self._beat(lease))
        try:
            await run_attempt(self.agent, self.client, lease, self.timeout)
        except StaleAttempt:
            pass  # another attempt owns the rollout; what this one did is not counted
        finally:
            heart.cancel()

    async def _beat(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(lease.seconds / 3)
            try:
                await self.client.heartbeat(lease.rollout.id, lease.attempt, lease.seconds)
            except StaleAttempt:
                return  # the attempt learns it when it reports its end
            except ServerError:
                continue  # the server may be back before the lease runs out


async def run_attempt(agent: AgentFunction, client: LightningClient, lease: Lease, timeout: float) -> None:
    """Run one attempt and report its steps, outcome and reward. An agent that fails is data, not an exception."""
    rollout = lease.rollout
    llm = LLM(base_url=f"{client.url}/r/{rollout.id}/{lease.attempt}/v1", key=lease.key)
    here = scope.RolloutScope(rollout.id, lease.attempt, Selection(rollout.optimize))
    outcome: Outcome = "ok"
    error: str | None = None
    returned: Reward | None = None
    limit = asyncio.timeout(timeout)
    try:
        with scope.rollout(here):
            async with limit:
                value = await _call(agent, rollout.task.data, llm)
        returned = None if value is None else Reward.of(value)
    except RewardError as problem:
        outcome, error = "agent_error", f"the agent returned no usable reward: {problem}"
    except BaseException as problem:
        if _is_ours_to_obey(problem):
            raise
        if limit.expired():  # an agent may raise a TimeoutError of its own, which is another thing
            outcome, error = "timeout", f"the agent did not return within {timeout:g} s"
        else:
            outcome, error = classify(problem), _describe(problem)
    finally:
        await llm.close()
    if here.steps:
        await client.add_steps(rollout.id, lease.attempt, list(here.steps))
    await client.finish(rollout.id, lease.attempt, outcome, returned, error)


def _is_ours_to_obey(problem: BaseException) -> bool:
    """The runner is being stopped; not an agent that lets a cancellation or an exit of its own escape."""
    if isinstance(problem, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(problem, KeyboardInterrupt):  # Ctrl-C reaches the main thread only; in any other the agent raised it
        return threading.current_thread() is threading.main_thread()
    return isinstance(problem, GeneratorExit)  # the loop is gone


def _describe(problem: BaseException) -> str:
    """An error as text that travels: with its place, of bounded length, without half characters."""
    text = f"{type(problem).__name__}: {problem}{_place(problem)}".encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR // 2]} ... {text[-LONGEST_ERROR // 2 :]}"


def _place(problem: BaseException) -> str:
    """The innermost line of the agent's own code: not of a library it called, and not of ours."""
    libraries = (os.sep + "site-packages" + os.sep, os.path.dirname(os.__file__), os.path.dirname(__file__))
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    return f" (at {own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


async def _call(agent: AgentFunction, task: Any, llm: LLM) -> Any:
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
        return await agent(task, llm)
    context = contextvars.copy_context()
    value = await _in_thread(lambda: context.run(agent, task, llm))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run in a daemon thread of its own; a pool would wait for its threads when the process ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def tell(value: Any, problem: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, problem))

    def work() -> None:
        value, problem = None, None
        try:
            value = function()
        except BaseException as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, value, problem)

    threading.Thread(target=work, name="agl-agent", daemon=True).start()
    value, problem = await ended
    if isinstance(problem, KeyboardInterrupt):  # not the user's: signals reach the main thread only
        raise RuntimeError("the agent raised KeyboardInterrupt") from problem
    if problem is not None:
        raise problem
    return value


def classify(error: BaseException | None) -> Outcome:
    """``infra_error`` when the model could not be reached, else ``agent_error``."""
    while error is not None:
        if type(error).__name__ in INFRASTRUCTURE_ERRORS:
            return "infra_error"
        error = error.__cause__ or error.__context__
    return "agent_error"


def load_agent(path: str) -> AgentFunction:
    """The function named by ``module:function`` or ``file.py:function``.

    Raises:
        UsageError: it says which half was not found.
    """
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise UsageError(f"agent {path!r}: write module:function or file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (ImportError, FileNotFoundError) as error:
        raise UsageError(f"agent {path!r}: cannot import {where!r}: {error}") from error
    except Exception as error:  # a module may raise whatever it likes while it is imported
        raise UsageError(f"agent {path!r}: cannot import {where!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"agent {path!r}: {where!r} has no function {name!r}{plugins.nearest(name, names)}")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}")
    sys.path.insert(0, str(path.parent.resolve()))  # so that the file finds its neighbours, as when it is run
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module

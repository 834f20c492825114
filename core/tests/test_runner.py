"""The runner: every leased rollout is reported with the outcome it had, and one that goes wrong harms no other."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agl
from agl import scope
from agl.errors import ServerError, StaleAttempt, UsageError
from agl.records import Lease, Reward, Rollout, Step, Task
from agl.runner import AsyncRunner, classify, load_agent


@dataclass
class FakeClient:
    """A Lightning server in memory: gives out leases, keeps what is reported."""

    waiting: list[Lease] = field(default_factory=list[Lease])
    ended: dict[str, tuple[str, Reward | None, str | None]] = field(default_factory=dict[str, Any])
    steps: dict[str, list[Step]] = field(default_factory=dict[str, Any])
    beats: list[str] = field(default_factory=list[str])
    limits: list[int] = field(default_factory=list[int])
    stale: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    url: str = "http://127.0.0.1:9"

    async def lease(self, worker: str, limit: int, seconds: float, wait: float = 0.0) -> Sequence[Lease]:
        self.limits.append(limit)
        while not self.waiting:
            await asyncio.sleep(0.005)
        given, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return given

    async def heartbeat(self, rollout: str, attempt: int, seconds: float) -> None:
        self.beats.append(rollout)
        if rollout in self.stale:
            raise StaleAttempt("another attempt", 409)

    async def add_steps(self, rollout: str, attempt: int, steps: Sequence[Step]) -> None:
        self.steps[rollout] = list(steps)

    async def finish(
        self, rollout: str, attempt: int, outcome: str, returned: Reward | None = None, error: str | None = None
    ) -> None:
        if rollout in self.stale:
            raise StaleAttempt("another attempt owns it", 409)
        if rollout in self.broken:
            raise ServerError("disk full", 500)
        assert rollout not in self.ended, "reported twice"
        self.ended[rollout] = (outcome, returned, error)


def leases(*names: str, seconds: float = 60.0, **fields: Any) -> list[Lease]:
    return [
        Lease(
            rollout=Rollout(id=name, task=Task(id=name, data={"name": name}), batch="b", **fields),
            attempt=1,
            key=f"key of {name}",
            seconds=seconds,
        )
        for name in names
    ]


@asynccontextmanager
async def running(agent: Any, client: FakeClient, **settings: Any) -> AsyncIterator[asyncio.Task[None]]:
    runner = AsyncRunner(agent, client, **settings)  # pyright: ignore[reportArgumentType]
    task = asyncio.create_task(runner.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


async def outcome_of(agent: Any, **settings: Any) -> tuple[str, Reward | None, str | None]:
    client = FakeClient(leases("r"))
    async with running(agent, client, **settings):
        await until(lambda: "r" in client.ended)
    return client.ended["r"]


def both(function: Callable[[], Any]) -> list[Any]:
    """The same agent twice: synchronous and asynchronous."""

    def synchronous(task: Any, llm: agl.LLM) -> Any:
        return function()

    async def asynchronous(task: Any, llm: agl.LLM) -> Any:
        return function()

    return [pytest.param(synchronous, id="sync"), pytest.param(asynchronous, id="async")]


def fails(error: BaseException) -> Callable[[], Any]:
    def function() -> Any:
        raise error

    return function


# ------------------------------------------------------------------------------------------------------ outcomes


class Remote(Exception):
    """Stands in for errors of SDKs, which are told by their names."""


def named(name: str) -> Exception:
    return type(name, (Remote,), {})("no answer")


def caused(cause: Exception) -> Exception:
    error = ValueError("chain failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("agent", both(lambda: 0.5))
async def test_what_an_agent_returns_is_its_reward(agent: Any):
    assert await outcome_of(agent) == ("ok", Reward(parts={"reward": 0.5}), None)


@pytest.mark.parametrize("agent", both(lambda: None))
async def test_none_is_unscored(agent: Any):
    assert await outcome_of(agent) == ("ok", None, None)


@pytest.mark.parametrize("agent", both(lambda: float("nan")))
async def test_a_broken_reward_is_the_agents_error(agent: Any):
    outcome, returned, error = await outcome_of(agent)
    assert (outcome, returned) == ("agent_error", None) and error is not None and "'reward' is nan" in error


@pytest.mark.parametrize("agent", both(fails(KeyError("sql"))))
async def test_an_exception_is_data_with_its_name_and_place(agent: Any):
    outcome, returned, error = await outcome_of(agent)
    assert (outcome, returned) == ("agent_error", None)
    assert error is not None and error.startswith("KeyError: 'sql' (at ") and "test_runner.py:" in error


@pytest.mark.parametrize(
    "agent",
    [
        *both(fails(SystemExit(1))),
        *both(fails(TimeoutError("my tool"))),
        *both(fails(asyncio.CancelledError())),
        *both(fails(StopIteration())),
        *both(fails(ExceptionGroup("two", [ValueError("a"), KeyError("b")]))),
    ],
)
async def test_whatever_an_agent_raises_is_its_error_and_the_next_one_runs(agent: Any):
    client = FakeClient(leases("r"))
    async with running(agent, client, timeout=5) as task:
        await until(lambda: "r" in client.ended)
        client.waiting += leases("next")
        await until(lambda: "next" in client.ended)
        assert not task.done()
    assert client.ended["r"][0] == "agent_error" and client.ended["r"][2]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (named("APIConnectionError"), "infra_error"),
        (named("InternalServerError"), "infra_error"),
        (caused(named("APITimeoutError")), "infra_error"),
        (caused(caused(named("ConnectError"))), "infra_error"),
        (named("APIError"), "infra_error"),
        (caused(named("RemoteProtocolError")), "infra_error"),
        (named("BadRequestError"), "agent_error"),
        (caused(named("RateLimit")), "agent_error"),
        (ConnectionError("the agent's own database"), "agent_error"),
    ],
)
def test_a_model_that_cannot_be_reached_is_not_the_agents_fault(error: Exception, outcome: str):
    assert classify(error) == outcome


def test_an_error_in_the_handling_of_a_lost_model_is_still_the_models():
    try:
        try:
            raise named("ReadError")
        except Remote:
            raise KeyError("answer")  # noqa: B904
    except KeyError as error:
        assert classify(error) == "infra_error"


async def test_an_agent_that_takes_too_long_is_ended():
    cleaned: list[bool] = []

    async def agent(task: Any, llm: agl.LLM) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)
        return 1.0

    assert await outcome_of(agent, timeout=0.05) == ("timeout", None, "the agent did not return within 0.05 s")
    assert cleaned == [True]


async def test_threads_that_never_return_do_not_hold_up_others():
    """More stuck agents than there is room for at once."""
    release = threading.Event()

    def agent(task: Any, llm: agl.LLM) -> float:
        if task["name"].startswith("stuck"):
            release.wait(20)
        return 1.0

    client = FakeClient(leases("stuck1", "stuck2", "stuck3", "quick1", "quick2"))
    async with running(agent, client, timeout=0.1, concurrency=2):
        await until(lambda: len(client.ended) == 5)
    release.set()
    assert sorted(outcome for outcome, _, _ in client.ended.values()) == ["ok", "ok", "timeout", "timeout", "timeout"]


def test_a_thread_that_never_returns_does_not_keep_the_process_alive():
    program = (
        "import asyncio, threading\nfrom agl.runner import _in_thread\n"
        "async def main():\n    async with asyncio.timeout(0.1):\n        await _in_thread(threading.Event().wait)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert "TimeoutError" in done.stderr and done.returncode == 1


# --------------------------------------------------------------------------------------------------------- scope

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_each_rollout_has_a_scope_an_llm_and_steps_of_its_own(kind: str):
    barrier = threading.Barrier(3)
    seen: dict[str, tuple[Any, ...]] = {}

    def work(task: Any, llm: agl.LLM) -> float:
        here = agl.current_rollout()
        assert here is not None
        here.emit("tool_end", f"call of {task['name']}")
        COLOUR.set(task["name"])
        seen[task["name"]] = (here.rollout, here.attempt, "writer" in here.selection, llm.base_url, llm.key)
        return 1.0

    def synchronous(task: Any, llm: agl.LLM) -> float:
        barrier.wait(5)  # all three at once, in three threads
        return work(task, llm)

    async def asynchronous(task: Any, llm: agl.LLM) -> float:
        await asyncio.sleep(0.01)
        return work(task, llm)

    client = FakeClient(leases("a", "b", "c", optimize=("judge",)))
    async with running(synchronous if kind == "sync" else asynchronous, client):
        await until(lambda: len(client.ended) == 3)
    for name in "abc":
        assert seen[name] == (name, 1, False, f"http://127.0.0.1:9/r/{name}/1/v1", f"key of {name}")
        assert [step.call_id for step in client.steps[name]] == [f"call of {name}"]
    assert scope.current_rollout() is None and COLOUR.get() == "none"


async def test_steps_are_reported_however_the_agent_ended():
    async def agent(task: Any, llm: agl.LLM) -> float:
        here = agl.current_rollout()
        assert here is not None
        here.emit("model_error", "c")
        raise ValueError("bad")

    client = FakeClient(leases("r"))
    async with running(agent, client):
        await until(lambda: "r" in client.ended)
    assert [step.kind for step in client.steps["r"]] == ["model_error"]


async def test_the_models_clients_are_closed_when_the_rollout_is_over():
    kept: list[Any] = []

    async def agent(task: Any, llm: agl.LLM) -> float:
        kept.extend(llm.openai()[name] for name in ("http_client", "http_async_client"))
        assert not any(client.is_closed for client in kept)
        return 1.0

    await outcome_of(agent)
    assert len(kept) == 2 and all(client.is_closed for client in kept)


@pytest.mark.parametrize("kind", ["object", "async object", "returns a coroutine"])
async def test_any_callable_is_an_agent(kind: str):
    class Plain:
        def __call__(self, task: Any, llm: agl.LLM) -> float:
            assert threading.current_thread() is not threading.main_thread()
            return 1.0

    class Later:
        async def __call__(self, task: Any, llm: agl.LLM) -> float:
            return 1.0

    agent = {"object": Plain(), "async object": Later(), "returns a coroutine": lambda task, llm: Later()(task, llm)}
    assert (await outcome_of(agent[kind]))[0] == "ok"


# -------------------------------------------------------------------------------------------------------- leases


async def test_no_more_run_at_once_than_were_asked_for():
    active, most = 0, 0

    async def agent(task: Any, llm: agl.LLM) -> float:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.01)
        active -= 1
        return 1.0

    client = FakeClient(leases(*(str(place) for place in range(12))))
    async with running(agent, client, concurrency=3):
        await until(lambda: len(client.ended) == 12)
    assert most == 3 and max(client.limits) == 3


async def test_a_lease_is_renewed_while_the_agent_runs_and_not_after():
    async def agent(task: Any, llm: agl.LLM) -> float:
        await asyncio.sleep(0.2)
        return 1.0

    client = FakeClient(leases("r", seconds=0.1))
    async with running(agent, client):
        await until(lambda: "r" in client.ended)
        beats = len(client.beats)
        assert 3 <= beats <= 6
        await asyncio.sleep(0.1)
        assert len(client.beats) == beats


async def test_a_stale_attempt_ends_quietly_and_the_next_one_runs(capfd: pytest.CaptureFixture[str]):
    async def agent(task: Any, llm: agl.LLM) -> float:
        await asyncio.sleep(0.05)  # long enough for a heartbeat that is refused
        return 1.0

    client = FakeClient([*leases("old", seconds=0.06), *leases("new")], stale=frozenset({"old"}))
    async with running(agent, client) as task:
        await until(lambda: "new" in client.ended)
        await asyncio.sleep(0.05)
        assert not task.done()
    assert set(client.ended) == {"new"} and capfd.readouterr().err == ""


async def test_an_attempt_that_cannot_be_reported_is_told_and_the_next_one_runs(capfd: pytest.CaptureFixture[str]):
    async def agent(task: Any, llm: agl.LLM) -> float:
        return 1.0

    client = FakeClient(leases("lost", "kept"), broken=frozenset({"lost"}))
    async with running(agent, client):
        await until(lambda: "kept" in client.ended)
        await asyncio.sleep(0.02)
    assert "attempt lost/1 could not be reported: disk full" in capfd.readouterr().err


async def test_stopping_the_runner_cancels_its_agents_and_reports_nothing():
    """The lease runs out and somebody else tries again: being stopped is no outcome."""
    cancelled = asyncio.Event()

    async def agent(task: Any, llm: agl.LLM) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    client = FakeClient(leases("r"))
    async with running(agent, client) as task:
        await until(lambda: not client.waiting)
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 2)
    assert cancelled.is_set() and not client.ended


# --------------------------------------------------------------------------------------------------- load_agent


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of agents, one of which imports its neighbour."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("agents_of_this_test", "neighbour_of_this_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "neighbour_of_this_test.py").write_text("REWARD = 0.25\n")
    (tmp_path / "agents_of_this_test.py").write_text(
        "from neighbour_of_this_test import REWARD\n\nNUMBER = 3\n\ndef answer(task, llm):\n    return REWARD\n"
    )
    return tmp_path


def test_an_agent_is_found_in_a_file_beside_its_neighbours(agents: Path):
    assert load_agent(f"{agents}/agents_of_this_test.py:answer")(None, None) == 0.25


def test_an_agent_is_found_in_a_module(agents: Path):
    sys.path.insert(0, str(agents))
    assert load_agent("agents_of_this_test:answer")(None, None) == 0.25


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("answer", r"agent 'answer': write module:function or file\.py:function"),
        ("agents_of_this_test:", r"write module:function"),
        (":answer", r"write module:function"),
        ("no_such_module_here:answer", r"cannot import 'no_such_module_here': No module named"),
        ("nowhere.py:answer", r"cannot import 'nowhere\.py': no file 'nowhere\.py'"),
        ("FOLDER/agents_of_this_test.py:anwser", r"has no function 'anwser'; did you mean 'answer'\?"),
        ("FOLDER/agents_of_this_test.py:NUMBER", r"has no function 'NUMBER'"),
    ],
)
def test_an_agent_that_is_not_there_is_told_by_half(agents: Path, path: str, text: str):
    with pytest.raises(UsageError, match=text):
        load_agent(path.replace("FOLDER", str(agents)))

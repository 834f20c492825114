"""Who is calling: rollout, agent and call, through tasks and threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

import agl
from agl import scope
from agl.scope import CallInfo, RolloutScope
from agl.selection import Selection
from agl.testing import ModelServer


def new_scope(name: str = "r1") -> RolloutScope:
    return RolloutScope(name, 1, Selection(None))


def test_outside_of_a_rollout_there_is_none():
    assert scope.current_rollout() is None
    assert scope.current_call() is None
    with scope.rollout(new_scope()) as here:
        assert agl.current_rollout() is here
    assert scope.current_rollout() is None


def test_steps_carry_what_was_told_and_an_id_of_their_own():
    here = new_scope()
    here.emit("tool_end", "c1", agent="writer", parent="p1", name="search", status="ok")
    here.emit("tool_end", "c1")
    first, second = here.steps
    assert (first.kind, first.call_id, first.agent, first.parent, first.name) == (
        "tool_end",
        "c1",
        "writer",
        "p1",
        "search",
    )
    assert first.data == {"status": "ok"} and first.time > 0
    assert first.id != second.id


async def test_each_task_works_for_its_own_rollout():
    async def work(name: str) -> list[str]:
        seen: list[str] = []
        with scope.rollout(new_scope(name)):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(await asyncio.to_thread(lambda: scope.current_rollout().rollout))  # pyright: ignore
        return seen

    assert await asyncio.gather(*(work(str(n)) for n in range(10))) == [[str(n)] * 3 for n in range(10)]


def test_a_thread_sees_the_scope_only_when_it_is_wrapped():
    with scope.rollout(new_scope()) as here, ThreadPoolExecutor(1) as pool:
        assert pool.submit(scope.current_rollout).result() is None
        assert pool.submit(agl.wrap(scope.current_rollout)).result() is here


def test_a_wrapped_function_may_run_in_many_threads_at_once():
    barrier = threading.Barrier(3, timeout=5)

    def work(number: int) -> str:
        barrier.wait()
        return f"{scope.current_rollout().rollout} {number}"  # pyright: ignore

    with scope.rollout(new_scope()), ThreadPoolExecutor(3) as pool:
        assert list(pool.map(agl.wrap(work), range(3))) == ["r1 0", "r1 1", "r1 2"]


def test_the_agent_named_by_the_program_makes_the_calls_inside_the_block():
    with agl.agent("writer"):
        assert scope.current_call() == CallInfo(agent="writer")
        with agl.agent("critic"):
            assert scope.current_call() == CallInfo(agent="critic")
        assert scope.current_agent() == "writer"
    assert scope.current_call() is None


def test_an_adapters_label_goes_before_the_programs_name_until_it_is_withdrawn():
    def work() -> None:
        with agl.agent("program"):
            withdraw = scope.set_call(CallInfo("c1", "adapter"))
            assert scope.current_call() == CallInfo("c1", "adapter")
            withdraw()
            assert scope.current_call() == CallInfo(agent="program")

    agl.wrap(work)()


async def test_a_label_can_be_withdrawn_from_another_context():
    withdraw = scope.set_call(CallInfo("c1"))

    async def end() -> None:
        withdraw()

    await asyncio.create_task(end())
    assert scope.current_call() is None


def test_withdrawing_an_older_label_leaves_the_newer_one():
    def work() -> None:
        withdraw = scope.set_call(CallInfo("c1"))
        scope.set_call(CallInfo("c2"))
        withdraw()
        assert scope.current_call() == CallInfo("c2")

    agl.wrap(work)()


def test_naming_an_agent_sets_aside_a_label_that_an_earlier_call_left():
    def work() -> None:
        scope.set_call(CallInfo("c1", "adapter"))
        with agl.agent("judge"):
            assert scope.current_call() == CallInfo(agent="judge")

    agl.wrap(work)()


# ---------------------------------------------------------------------------------------------- labels on the wire


@pytest.fixture(scope="module")
def server() -> Any:
    with ModelServer() as server:
        yield server


def labels(server: ModelServer) -> list[dict[str, str]]:
    """What each request said of its caller."""
    told = [{k[6:]: v for k, v in one.headers.items() if k.startswith("x-agl-")} for one in server.exchanges]
    server.exchanges.clear()
    return told


async def test_the_clients_of_an_llm_tell_who_calls(server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "key")
    messages: Any = [{"role": "user", "content": "hi"}]
    with agl.agent("writer"):
        llm.client().chat.completions.create(model="policy", messages=messages)
    scope.set_call(CallInfo("c1", "critic", "p1"))
    await llm.async_client().chat.completions.create(model="policy", messages=messages)
    await llm.async_client().chat.completions.create(model="policy", messages=messages)
    assert labels(server) == [{"agent": "writer"}, {"call": "c1", "agent": "critic", "parent": "p1"}, {}]
    await llm.close()


def test_a_retry_keeps_its_label(server: ModelServer):
    llm = agl.LLM(f"{server.url}/v1", "key")
    http: httpx2.Client = llm.openai()["http_client"]

    def work() -> None:
        scope.set_call(CallInfo("c1"))
        for count in ("0", "1", "2"):
            http.post(f"{server.url}/v1/chat/completions", json={}, headers={"x-stainless-retry-count": count})

    agl.wrap(work)()
    assert labels(server) == [{"call": "c1"}] * 3
    asyncio.run(llm.close())


def test_an_llm_does_not_show_its_key():
    assert "secret" not in repr(agl.LLM("http://127.0.0.1:1/v1", "secret"))

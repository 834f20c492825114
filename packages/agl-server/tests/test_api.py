"""The control plane: long polls, refusals that name the field, a policy that is kept."""

import asyncio
import time
from typing import Any

import pytest

from agl.client import LightningClient
from agl.errors import ServerError, StaleAttempt
from agl.records import Reward, Step
from agl.wire import PolicyState, Upstream
from agl_server import queue

from .conftest import ADMIN, House, new_rollout, serve

OWNER = {"authorization": f"Bearer {ADMIN}"}


# -------------------------------------------------------------------------------------------------------- a life


async def test_a_rollout_lives_from_enqueue_to_collect(house: House):
    lease = await house.lease(optimize=("solver",), sampling={"temperature": 0.5})
    assert (lease.attempt, lease.seconds, lease.rollout.sampling) == (1, 60, {"temperature": 0.5})
    name = lease.rollout.id
    await house.client.heartbeat(name, 1, 60)
    await house.chat(lease, agent="solver")
    step = Step(id="s", kind="model_end", call_id="c", agent="solver", data={"x": 1})
    await house.client.add_steps(name, 1, [step])
    await house.client.finish(name, 1, "ok", Reward.of({"correct": 1, "solver": {"short": 0.5}}))
    cursor, (rollout,) = await house.client.collect("batch")
    assert cursor == 1
    assert rollout == await house.client.rollout(name)
    assert (rollout.outcome, rollout.attempt, rollout.steps) == ("ok", 1, (step,))
    assert rollout.returned is not None and rollout.returned.for_agent("solver") == 1.5
    assert [call.agent for call in rollout.calls] == ["solver"]
    assert await house.client.collect("batch", cursor) == (cursor, ())


async def test_a_lease_waits_until_something_is_enqueued(house: House):
    waiting = asyncio.create_task(house.client.lease("w", 4, 60, wait=10))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    started = time.monotonic()
    await house.client.enqueue([new_rollout("late")])
    assert [lease.rollout.id for lease in await waiting] == ["late"]
    assert time.monotonic() - started < 1


async def test_a_lease_waits_no_longer_than_asked(house: House):
    started = time.monotonic()
    assert await house.client.lease("w", 1, 60, wait=0.2) == ()
    assert 0.15 < time.monotonic() - started < 2


async def test_a_worker_that_goes_away_while_it_waits_takes_nothing(house: House):
    waiting = asyncio.create_task(house.client.lease("dead", 1, 60, wait=10))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.05)
    await house.client.enqueue([new_rollout("x")])
    (lease,) = await house.client.lease("alive", 1, 60)
    assert (lease.rollout.id, lease.attempt) == ("x", 1)


async def test_collecting_waits_for_the_next_end(house: House):
    lease = await house.lease()
    waiting = asyncio.create_task(house.client.collect("batch", 0, 9, wait=10))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await house.client.finish(lease.rollout.id, 1, "ok")
    cursor, (rollout,) = await waiting
    assert (cursor, rollout.id, rollout.returned) == (1, lease.rollout.id, None)


async def test_those_who_wait_are_woken_when_leases_run_out(house: House):
    lease = await house.lease(seconds=60, max_attempts=2)
    worker = asyncio.create_task(house.client.lease("second", 1, 60, wait=10))
    trainer = asyncio.create_task(house.client.collect("batch", 0, 9, wait=10))
    await asyncio.sleep(0.1)
    house.clock.now += 61
    (again,) = await worker
    assert (again.rollout.id, again.attempt) == (lease.rollout.id, 2)
    with pytest.raises(StaleAttempt):
        await house.client.heartbeat(lease.rollout.id, 1, 60)
    house.clock.now += 61
    _, (rollout,) = await trainer
    assert (rollout.outcome, rollout.attempt) == ("infra_error", 2)


async def test_a_failed_attempt_wakes_a_waiting_worker(house: House):
    lease = await house.lease()
    worker = asyncio.create_task(house.client.lease("second", 1, 60, wait=10))
    await asyncio.sleep(0.1)
    await house.client.finish(lease.rollout.id, 1, "infra_error", None, "no route to the tool")
    (again,) = await worker
    assert again.attempt == 2


async def test_the_same_finish_twice_gets_the_same_answer(house: House):
    lease = await house.lease()
    path = f"/api/rollouts/{lease.rollout.id}/1/finish"
    answers = [
        await house.http.post(path, headers=OWNER, json={"outcome": "ok", "returned": {"parts": {"x": 1.0}}})
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].content == answers[1].content
    other = await house.http.post(path, headers=OWNER, json={"outcome": "ok", "returned": {"parts": {"x": 2.0}}})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "stale_attempt")


# ------------------------------------------------------------------------------------------------------ refusals

TASK = {"id": "t", "data": {}}
ROLLOUT = {"id": "a", "task": TASK, "batch": "b"}
STEP = {"id": "s", "kind": "model_end", "call_id": "c"}


BAD_INPUT: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/api/rollouts", b"", 400, None),
    ("POST", "/api/rollouts", b"\xff\xfe", 400, None),
    ("POST", "/api/rollouts", b"[" * 100_000, 400, None),
    ("POST", "/api/rollouts", b'{"rollouts": [{"id": "\\ud800"}]}', 400, None),
    ("POST", "/api/rollouts", [], 422, None),
    ("POST", "/api/rollouts", {"rollouts": 1}, 422, "rollouts"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "task": {**TASK, "id": ""}}]}, 422, "rollouts.0.task"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "mode": "play"}]}, 422, "rollouts.0.mode"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "code": "os.system"}]}, 422, "rollouts.0.code"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "id": "../../etc"}]}, 422, "rollouts.0.id"),
    ("POST", "/api/rollouts", {"rollouts": [ROLLOUT, {**ROLLOUT, "id": ""}]}, 422, "rollouts.1.id"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "max_attempts": 0}]}, 422, "rollouts.0.max_attempts"),
    ("POST", "/api/rollouts", {"rollouts": [{**ROLLOUT, "optimize": []}]}, 422, "rollouts.0.optimize"),
    ("POST", "/api/lease", {"worker": 7}, 422, "worker"),
    ("POST", "/api/lease", {"worker": "w", "limit": 0}, 422, "limit"),
    ("POST", "/api/lease", {"worker": "w", "limit": True}, 422, "limit"),
    ("POST", "/api/lease", {"worker": "w", "seconds": -1}, 422, "seconds"),
    ("POST", "/api/lease", {"worker": "w", "wait": 1e9}, 422, "wait"),
    ("POST", "/api/withdraw", {}, 422, "prefix"),
    ("POST", "/api/rollouts/r/1/heartbeat", {"seconds": "60"}, 422, "seconds"),
    ("POST", "/api/rollouts/nobody/1/heartbeat", {"seconds": 60}, 404, None),
    ("POST", "/api/rollouts/r/9999999999999999999999/heartbeat", {"seconds": 60}, 404, None),
    ("POST", "/api/rollouts/r/0/heartbeat", {"seconds": 60}, 409, None),
    ("POST", "/api/rollouts/r/1/steps", {"steps": [{**STEP, "kind": "dance"}]}, 422, "steps.0.kind"),
    ("POST", "/api/rollouts/r/1/finish", {"outcome": "great"}, 422, "outcome"),
    ("GET", "/api/rollouts", None, 422, "batch"),
    ("GET", "/api/rollouts?batch=b&after=x", None, 422, "after"),
    ("GET", "/api/rollouts?batch=b&limit=0", None, 422, "limit"),
    ("GET", "/api/rollouts?batch=b&wait=nan", None, 422, "wait"),
    ("GET", "/api/rollouts/nobody", None, 404, None),
    ("PUT", "/api/policy", {"upstream": "file:///etc/passwd"}, 422, None),
    ("PUT", "/api/policy", {"upstream": "http://x", "version": -1}, 422, "version"),
    ("PUT", "/api/policy", {"upstream": "http://x", "state": "asleep"}, 422, "state"),
]  # fmt: skip


async def test_bad_input_is_refused_by_the_name_of_its_field(house: House):
    await house.lease(id="r")
    for method, path, body, status, param in BAD_INPUT:
        content = {"content": body} if isinstance(body, bytes) else {} if body is None else {"json": body}
        response = await house.http.request(method, path, headers=OWNER, **content)
        assert response.status_code == status, (path, body, response.text)
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"]
        assert error["param"] == param, (path, body, error)
    assert await house.client.collect("batch") == (0, ())
    assert await house.client.lease("w", 9, 60) == ()


async def test_a_reward_that_is_no_finite_number_is_refused_and_not_counted(house: House):
    lease = await house.lease()
    for reward in ("NaN", "Infinity", "-Infinity", "1e999", '"0.5"', "true", "null", "[1]"):
        body = f'{{"outcome": "ok", "returned": {{"parts": {{"correct": {reward}}}}}}}'.encode()
        response = await house.http.post(f"/api/rollouts/{lease.rollout.id}/1/finish", headers=OWNER, content=body)
        assert response.status_code in (400, 422), reward
        if response.status_code == 422:
            assert response.json()["error"]["param"] == "returned.parts.correct"
    assert (await house.client.rollout(lease.rollout.id)).outcome is None


async def test_a_full_queue_says_when_to_come_back(house: House, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queue, "MOST_WAITING", 3)
    await house.client.enqueue([new_rollout(f"r{i}") for i in range(3)])
    body = {"rollouts": [{**ROLLOUT, "id": "one-more"}]}
    response = await house.http.post("/api/rollouts", headers=OWNER, json=body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "5")
    await house.client.lease("w", 1, 60)
    assert (await house.http.post("/api/rollouts", headers=OWNER, json=body)).status_code == 201


# -------------------------------------------------------------------------------------------------------- policy


async def test_the_policy_is_told_without_the_users_secret(house: House):
    policy = PolicyState(
        upstream="http://127.0.0.1:1",
        version=3,
        unselected=Upstream(base_url="https://api.example/v1", model="big", api_key="sk-secret"),
    )
    await house.client.set_policy(policy)
    response = await house.http.get("/api/policy", headers=OWNER)
    assert "sk-secret" not in response.text and "api.example" in response.text
    told = await house.client.policy()
    assert told is not None and (told.version, told.state) == (3, "serving")


async def test_before_the_first_policy_nobody_is_served(tmp_path: Any):
    from agl_server.app import create_app
    from agl_server.store.sqlite import SqliteStore

    app = create_app(SqliteStore(tmp_path / "x.sqlite"), ADMIN)
    async with (
        app.router.lifespan_context(app),
        serve(app) as url,
        LightningClient(url, ADMIN, patience=0.1) as client,
    ):
        assert await client.policy() is None
        await client.health()
        with pytest.raises(ServerError, match="no policy is served yet"):
            await client._request("GET", "/v1/models")


async def test_health_tells_the_cause(house: House):
    assert (await house.http.get("/healthz")).json() == {"ok": True, "cause": None}
    house.store.writer.trouble = "the store cannot write: database or disk is full"
    response = await house.http.get("/healthz")
    assert response.status_code == 503 and "full" in response.json()["cause"]

"""The Lightning client outlives a server that goes away, repeats only what is worth it, and says what was refused."""

import asyncio
import json
import math
import socket
import time
from typing import Any

import pytest

from agl import wire
from agl.client import LightningClient
from agl.endpoint import serve
from agl.errors import ServerError, StaleAttempt, UsageError
from agl.records import Call, Choice, Lease, Reward, Rollout, Step, Task

ROLLOUT = Rollout(
    id="r",
    task=Task(id="t", data={"question": "naïve?", "n": [1, None, 2**70]}),
    batch="b/1 &?",
    optimize=("writer",),
    sampling={"temperature": 0.7},
    attempt=1,
    outcome="ok",
    returned=Reward(parts={"correct": 0.1 + 0.2}, agents={"writer": {"short": -1.0}}),
    calls=(
        Call(
            id="c",
            rollout="r",
            attempt=1,
            prompt_ids=(1, 2),
            choices=(Choice(response_ids=(3,), logprobs=(-1e-17,)),),
        ),
    ),
    steps=(Step(id="s", kind="tool_end", call_id="c", data={"ok": True}),),
)


class FakeServer:
    """Answers with what the script says, one entry for each request, the last one for ever."""

    def __init__(self, *script: tuple[int, bytes, dict[str, str]]) -> None:
        self.script = list(script)
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.times: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive()).get("body", b"")
        headers = dict(scope["headers"])
        self.times.append(time.monotonic())
        path = f"{scope['raw_path'].decode()}?{scope['query_string'].decode()}".rstrip("?")
        self.requests.append((scope["method"], path, headers[b"authorization"].decode(), body))
        status, content, extra = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        sent = [(name.encode(), value.encode()) for name, value in extra.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": content})


def refusal(status: int, message: str = "no", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    return status, json.dumps({"error": {"message": message}}).encode(), headers


OK = (200, b"{}", {})


# --------------------------------------------------------------------------------------------------------- methods


async def test_each_method_sends_what_the_server_expects():
    leases = wire.Leases(leases=(Lease(rollout=ROLLOUT, attempt=1, key="k", seconds=60.0),))
    collected = wire.Collected(cursor=7, rollouts=(ROLLOUT,))
    policy = wire.PolicyState(upstream="http://x", unselected=wire.Upstream(base_url="http://y/v1", model="m"))
    fake = FakeServer(
        OK, (200, wire.encode(leases), {}), OK, OK, OK, OK, (200, wire.encode(collected), {}),
        OK, (200, wire.encode(policy), {}), (200, b"null", {}), OK, (200, wire.encode(ROLLOUT), {}),
    )  # fmt: skip
    async with serve(fake) as url, LightningClient(f"{url}/", "secret") as client:
        await client.enqueue([ROLLOUT])
        assert await client.lease("w", 3, 60, wait=0.5) == leases.leases
        await client.withdraw("b")
        await client.heartbeat("r", 1, 30)
        await client.add_steps("r", 1, ROLLOUT.steps)
        await client.finish("r", 1, "ok", ROLLOUT.returned)
        assert await client.collect("b/1 &?", after=3, limit=9, wait=0.5) == (7, (ROLLOUT,))
        await client.set_policy(policy)
        assert await client.policy() == policy
        assert await client.policy() is None
        await client.health()
        assert await client.rollout("r") == ROLLOUT
    assert {key for _, _, key, _ in fake.requests} == {"Bearer secret"}
    assert [(method, path) for method, path, _, _ in fake.requests] == [
        ("POST", "/api/rollouts"),
        ("POST", "/api/lease"),
        ("POST", "/api/withdraw"),
        ("POST", "/api/rollouts/r/1/heartbeat"),
        ("POST", "/api/rollouts/r/1/steps"),
        ("POST", "/api/rollouts/r/1/finish"),
        ("GET", "/api/rollouts?batch=b%2F1%20%26%3F&after=3&limit=9&wait=0.5"),
        ("PUT", "/api/policy"),
        ("GET", "/api/policy"),
        ("GET", "/api/policy"),
        ("GET", "/healthz"),
        ("GET", "/api/rollouts/r"),
    ]
    bodies = [json.loads(body) if body else None for _, _, _, body in fake.requests]
    assert wire.decode(wire.Enqueue, fake.requests[0][3]).rollouts == (ROLLOUT,)
    assert {**bodies[1], "request": None} == {"worker": "w", "limit": 3, "seconds": 60, "wait": 0.5, "request": None}
    assert bodies[2:4] == [{"prefix": "b"}, {"seconds": 30}]
    assert bodies[5] == {
        "outcome": "ok",
        "returned": {"parts": {"correct": 0.1 + 0.2}, "agents": {"writer": {"short": -1.0}}},
        "error": None,
    }


async def test_many_rollouts_travel_in_several_requests():
    rollouts = [Rollout(id=f"r{index}", task=ROLLOUT.task, batch="b") for index in range(600)]
    fake = FakeServer(OK)
    async with serve(fake) as url, LightningClient(url, "k") as client:
        await client.enqueue(rollouts)
    sent = [wire.decode(wire.Enqueue, body).rollouts for _, _, _, body in fake.requests]
    assert [rollout for part in sent for rollout in part] == rollouts
    assert max(len(part) for part in sent) <= 256


# --------------------------------------------------------------------------------------------------------- retries


async def test_a_busy_server_is_asked_again_with_the_same_request():
    empty = wire.encode(wire.Leases(leases=()))
    fake = FakeServer(*(refusal(status) for status in (503, 429, 502, 504)), (200, empty, {}))
    async with serve(fake) as url, LightningClient(url, "k", patience=10) as client:
        assert await client.lease("w", 1, 60) == ()
        assert len(fake.requests) == 5
        assert len({body for _, _, _, body in fake.requests}) == 1  # also the request's own name
        await client.lease("w", 1, 60)
    assert fake.requests[-1][3] != fake.requests[0][3]


async def test_the_server_says_when_to_come_back():
    fake = FakeServer(refusal(429, **{"retry-after": "1"}), OK)
    async with serve(fake) as url, LightningClient(url, "k") as client:
        await client.health()
    assert 1 <= fake.times[1] - fake.times[0] < 3


async def test_a_server_that_comes_back_is_found_again():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    fake = FakeServer(OK)
    async with LightningClient(f"http://127.0.0.1:{port}", "k", patience=20) as client:
        asking = asyncio.create_task(client.health())
        await asyncio.sleep(0.2)
        assert not asking.done()
        async with serve(fake, port=port):
            await asking
        with pytest.raises(ServerError):
            client.patience = 0.1
            await client.health()


async def test_patience_ends_and_the_error_names_the_server_and_not_the_key():
    async with LightningClient("http://127.0.0.1:1", "top-secret", patience=0.3) as client:
        started = time.monotonic()
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1 cannot be reached") as failure:
            await client.enqueue([ROLLOUT])
    assert time.monotonic() - started < 3
    assert failure.value.status is None
    assert "top-secret" not in str(failure.value)


async def test_a_server_that_stays_busy_ends_as_its_last_refusal():
    fake = FakeServer(refusal(503, "the disk sleeps"))
    async with serve(fake) as url, LightningClient(url, "k", patience=0.3) as client:
        with pytest.raises(ServerError, match="GET /healthz: HTTP 503: the disk sleeps") as failure:
            await client.health()
    assert failure.value.status == 503 and len(fake.requests) > 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500, 507])
async def test_a_refusal_is_final_and_told_in_the_servers_words(status: int):
    fake = FakeServer(refusal(status, "rollouts.0.id is odd"))
    async with serve(fake) as url, LightningClient(url, "k") as client:
        with pytest.raises(ServerError, match=r"rollouts\.0\.id is odd") as failure:
            await client.enqueue([ROLLOUT])
    assert type(failure.value) is ServerError and failure.value.status == status
    assert len(fake.requests) == 1


async def test_a_stale_attempt_is_told_as_such_at_once():
    fake = FakeServer(refusal(409, "attempt 2 owns it"))
    async with serve(fake) as url, LightningClient(url, "k") as client:
        with pytest.raises(StaleAttempt, match="attempt 2 owns it") as failure:
            await client.heartbeat("r", 1, 60)
    assert failure.value.status == 409 and len(fake.requests) == 1


async def test_an_answer_that_is_no_json_is_shown():
    fake = FakeServer((418, b"<html>teapot", {}))
    async with serve(fake) as url, LightningClient(url, "k") as client:
        with pytest.raises(ServerError, match="418: <html>teapot"):
            await client.health()


async def test_a_client_that_is_not_open_says_how_to_open_it():
    with pytest.raises(UsageError, match="async with"):
        await LightningClient("http://127.0.0.1:1", "k").health()


# ------------------------------------------------------------------------------------------------------------ wire


def test_records_come_back_as_they_went():
    for record in (ROLLOUT, ROLLOUT.calls[0], ROLLOUT.steps[0], Reward.of({"a": 1, "w": {"b": 2}})):
        assert wire.decode(type(record), wire.encode(record)) == record


@pytest.mark.parametrize(
    ("kind", "text", "path"),
    [
        (wire.Finish, '{"outcome": "good"}', "outcome"),
        (wire.Finish, "{}", "outcome"),
        (wire.Finish, '{"outcome": "ok", "rewrd": 1}', "rewrd"),
        (wire.Finish, '{"outcome": "ok", "returned": {"parts": {"x": "1"}}}', "returned.parts.x"),
        (wire.Finish, '{"outcome": "ok", "returned": {"parts": {"x": true}}}', "returned.parts.x"),
        (wire.Finish, '{"outcome": "ok", "returned": {"agents": {"w": {"x": NaN}}}}', "returned.agents.w.x"),
        (wire.Enqueue, '{"rollouts": [{"id": "r", "task": {"id": "", "data": {}}, "batch": "b"}]}', "rollouts.0.task"),
        (wire.Steps, '{"steps": [{"id": "s", "kind": "x", "call_id": "c"}]}', "steps.0.kind"),
        (wire.Finish, "", ""),
        (wire.Finish, "[]", ""),
        (wire.Finish, '{"outcome": "ok"}, {}', ""),
    ],
)
def test_what_does_not_fit_is_refused_by_the_path_of_its_field(kind: type[Any], text: str, path: str):
    with pytest.raises(wire.FieldError) as failure:
        wire.decode(kind, text.encode())
    assert failure.value.path == path
    assert (path or kind.__name__) in str(failure.value)


def test_a_record_that_is_no_json_is_refused_before_it_is_sent():
    with pytest.raises(UsageError, match="does not fit into JSON"):
        wire.encode(Step(id="s", kind="tool_end", call_id="c", data={"x": object()}))


def test_a_number_that_json_does_not_have_never_becomes_null():
    sent = wire.encode(Step(id="s", kind="tool_end", call_id="c", data={"x": math.inf}))
    assert json.loads(sent)["data"] == {"x": math.inf}


def test_a_policy_needs_urls():
    for fields in ({"upstream": "x"}, {"upstream": "http://x", "unselected": wire.Upstream(base_url="y", model="m")}):
        with pytest.raises(UsageError, match="http://"):
            wire.PolicyState(**fields)
    assert "sk-1" not in repr(wire.Upstream(base_url="http://y", model="m", api_key="sk-1"))

"""Every path but one needs a key, and a key opens no more than it should."""

import stat
from pathlib import Path

import pytest
from starlette.routing import Route

from agl.errors import UsageError
from agl_server.auth import check_bind, load_key, public
from agl_server.http import Endpoint

from .conftest import ADMIN, HELLO, House


def routes(house: House) -> list[tuple[str, str, Endpoint]]:
    """Method, path (filled in with the first rollout's attempt) and endpoint of all there is."""
    found: list[tuple[str, str, Endpoint]] = []
    for route in house.app.routes:
        assert isinstance(route, Route) and isinstance(route.app, Endpoint) and route.methods
        path = route.path.replace("{rollout}", "rollout-1").replace("{attempt:int}", "1").replace("{agent}", "x")
        assert "{" not in path
        found += [(method, path, route.app) for method in route.methods]
    return found


async def test_every_route_but_healthz_refuses_without_its_key(house: House):
    await house.lease()
    other = await house.lease()
    open_paths: set[str] = set()
    for method, path, endpoint in routes(house):
        if endpoint.guard is public:
            open_paths.add(path)
            continue
        for header in (None, "", "Bearer", "Bearer wrong", f"Basic {ADMIN}", ADMIN, f"Bearer {other.key}"):
            headers = {} if header is None else {"authorization": header}
            response = await house.http.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path, header)
            if method != "HEAD":
                assert response.json()["error"]["code"] == "invalid_api_key"
    assert open_paths == {"/healthz"}


async def test_an_attempts_key_opens_its_own_model_calls_and_steps_and_nothing_else(house: House):
    lease = await house.lease()
    opened: set[str] = set()
    for method, path, _ in routes(house):
        response = await house.http.request(
            method, path, headers={"authorization": f"Bearer {lease.key}"}, content=b"not json"
        )
        if response.status_code != 401:
            opened.add(path)
    run = "/r/rollout-1/1"
    assert opened == {
        "/healthz",
        "/api/rollouts/rollout-1/1/steps",
        f"{run}/v1/chat/completions",
        f"{run}/v1/responses",
        f"{run}/a/x/v1/responses",
        f"{run}/v1/models",
        f"{run}/a/x/v1/chat/completions",
        f"{run}/a/x/v1/models",
    }


async def test_the_key_of_an_attempt_does_not_open_the_next_attempt(house: House):
    lease = await house.lease(max_attempts=2)
    await house.client.finish(lease.rollout.id, 1, "timeout")
    (second,) = await house.client.lease("tester", 1, 60)
    assert second.attempt == 2 and second.key != lease.key
    path = f"/r/{lease.rollout.id}/2/v1/chat/completions"
    body = {"messages": HELLO}
    for key, status in ((lease.key, 401), (second.key, 200), (ADMIN, 200)):
        response = await house.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status


async def test_other_methods_are_refused(house: House):
    headers = {"authorization": f"Bearer {ADMIN}"}
    for method, path in (("DELETE", "/api/rollouts"), ("DELETE", "/api/policy"), ("GET", "/api/lease")):
        response = await house.http.request(method, path, headers=headers)
        assert response.status_code == 405
        assert response.json()["error"]["type"] == "invalid_request_error"
    for path in ("/docs", "/openapi.json", "/", "/api", "/v1/completions/x", "/r/a/1/v1/../../../api/policy"):
        assert (await house.http.get(path, headers=headers)).status_code == 404


FOREIGN = (
    "evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1/x",
    "localhost@evil.example",
    "127.0.0.1:1:2",
    "",
    "[::2]",
)


async def test_a_foreign_host_name_is_refused_before_anything_else(house: House):
    for host in FOREIGN:
        for path in ("/healthz", "/api/policy"):
            response = await house.http.get(path, headers={"host": host, "authorization": f"Bearer {ADMIN}"})
            assert response.status_code in (400, 421), host


async def test_loopback_names_are_welcome(house: House):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:7", "[::1]"):
        assert (await house.http.get("/healthz", headers={"host": host})).status_code == 200


def test_a_public_address_without_a_chosen_key_is_refused():
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.example"):
        with pytest.raises(UsageError, match="AGL_KEY"):
            check_bind(host, key_given=False)
        check_bind(host, key_given=True)
    for host in ("127.0.0.1", "localhost", "::1"):
        check_bind(host, key_given=False)


def test_a_key_is_made_once_and_kept_secret(tmp_path: Path):
    key = load_key(tmp_path, None)
    assert len(key) > 30 and load_key(tmp_path, None) == key
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert load_key(tmp_path, "chosen-by-the-user-1") == "chosen-by-the-user-1"
    assert load_key(tmp_path, None) == "chosen-by-the-user-1"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "key", ["", "short", "with spaces inside it", "schlüssel-schlüssel", "line\nbreak-and-more-of-it"]
)
def test_a_key_that_is_no_secret_is_refused(tmp_path: Path, key: str):
    with pytest.raises(UsageError, match="16 printable"):
        load_key(tmp_path, key)

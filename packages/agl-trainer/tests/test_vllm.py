"""The backend ``vllm`` without vLLM: settings, failing starts, stand-ins for servers. `on_vllm.py` has the real one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from agl import endpoint
from agl.errors import BackendError, ConfigError
from agl_trainer import Trainer
from agl_trainer.backends.vllm import options
from agl_trainer.backends.vllm.backend import VllmBackend
from agl_trainer.chat import ChatFormat
from agl_trainer.commands import vllm as command
from agl_trainer.policy import Policy

QUESTION = [{"role": "user", "content": "Hello"}]

# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"pyton": "x"}, "no setting 'pyton'; did you mean 'python'"),
        ({"replicas": 0}, "replicas = 0"),
        ({"urls": ["http://a"], "replicas": 2}, "cannot be set beside it"),
        ({"urls": ["a:1"]}, "http:// or https://"),
        ({"devices": ["0", "1"]}, "2 devices for 1 replicas"),
        ({"arguments": {"logprobs-mode": "raw_logprobs"}}, "agl sets them"),
        ({"arguments": {"max_model_len": 3}}, "agl sets them"),
    ],
)
def test_a_wrong_setting_is_told_before_a_model_is_loaded(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Trainer(print, [{"q": 1}], model="no such model", backend={"name": "vllm", **settings})


def test_other_settings_that_do_not_fit_are_told_too() -> None:
    for wrong, told in (({"unselected": "frozen"}, "set lora_rank"), ({"lora_rank": 1000}, "up to rank 512")):
        with pytest.raises(ConfigError, match=told):
            Trainer(print, [{"q": 1}], model="no such model", backend="vllm", **wrong)
    with pytest.raises(ConfigError, match="backend 'transformers' has no setting 'urls'"):
        Trainer(print, [{"q": 1}], model="no such model", backend={"name": "transformers", "urls": []})
    with pytest.raises(ConfigError, match="has no name"):
        Trainer(print, [{"q": 1}], model="no such model", backend={"urls": []})


def test_a_server_is_told_nothing_that_it_has_no_use_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_KEY", "AGL_VLLM_KEY", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    told = options.environment(None)
    assert told["OMP_NUM_THREADS"] == "3" and told["VLLM_PLUGINS"] == "mine,agl"
    assert not {"AGL_KEY", "AGL_VLLM_KEY", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_CPU"} & {*told}


def test_arguments_become_a_command_line() -> None:
    given = {"tool_call_parser": "hermes", "enforce_eager": True, "prefix-caching": False, "size": 2, "x": {"a": 1}}
    line = options.command("py", "model", given)
    assert line[0] == "py" and line[2] == "model"
    assert line[3:] == [
        *("--tool-call-parser", "hermes", "--enforce-eager", "--no-prefix-caching"),
        *("--size", "2", "--x", '{"a": 1}'),
    ]
    assert options.on_devices("2,3", gpu=True) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert options.on_devices("0-3", gpu=False) == {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}
    assert [options.room_for(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]


def test_the_tool_parser_follows_from_the_template(policy: Policy) -> None:
    assert ChatFormat(policy.tokenizer).vllm_parser == "hermes"  # whose tools we write into the messages
    for template, parser in (("{{ tools }}<tool_call>", "hermes"), ("{{ tools }}<|python_tag|>", "llama3_json")):
        policy.tokenizer.chat_template = template
        assert ChatFormat(policy.tokenizer).vllm_parser == parser
    policy.tokenizer.chat_template = "{{ tools }}"
    assert ChatFormat(policy.tokenizer).vllm_parser is None
    assert options.tool_arguments({}, None) == {}
    assert options.tool_arguments({"tool_call_parser": "mistral"}, "hermes")["tool_call_parser"] == "mistral"


def test_agl_vllm_refuses_a_public_address_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_VLLM_KEY", raising=False)
    with pytest.raises(ConfigError, match="AGL_VLLM_KEY"):
        command("model", host="0.0.0.0", python=sys.executable)


# ------------------------------------------------------------------------------------------------ failing starts


def script(tmp_path: Path, text: str) -> str:
    """An interpreter that does something else."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def fail_to_start(policy: Policy, tmp_path: Path, **settings: Any) -> str:
    policy.folder = tmp_path / "run"
    backend = VllmBackend(policy, policy.config, **settings)
    try:
        with pytest.raises(BackendError) as failure:
            await backend.start()
    finally:
        await backend.close()
    for replica in backend.fleet.replicas:
        assert replica.server is None or replica.server.pid is None or replica.server.exit_code is not None
    return str(failure.value)


async def test_an_environment_without_vllm_is_told(policy: Policy, tmp_path: Path) -> None:
    told = await fail_to_start(policy, tmp_path, python=sys._base_executable)  # pyright: ignore[reportAttributeAccessIssue]
    assert told.startswith("there is no vLLM in the environment of") and "vllm-cpu" in told


async def test_an_old_vllm_is_told(policy: Policy, tmp_path: Path) -> None:
    info = tmp_path / "site" / "vllm-0.9.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.2\n")
    python = script(tmp_path, f'PYTHONPATH="{info.parent}:$PYTHONPATH" exec {sys.executable} "$@"')
    assert "vLLM 0.9.2, which is too old: 0.32" in await fail_to_start(policy, tmp_path, python=python)


async def test_a_start_that_fails_is_told_with_the_end_of_the_log(policy: Policy, tmp_path: Path) -> None:
    python = script(tmp_path, "echo out of memory; exit 3")
    told = await fail_to_start(policy, tmp_path, python=python)
    assert "exit 3" in told and told.endswith("out of memory")


async def test_a_start_that_takes_too_long_is_told_with_the_end_of_the_log(policy: Policy, tmp_path: Path) -> None:
    python = script(tmp_path, "echo loading; sleep 100")
    told = await fail_to_start(policy, tmp_path, python=python, start_timeout=0.3)
    assert "within 0.3 s" in told and told.endswith("loading")


async def test_an_interpreter_that_is_not_there_is_told(policy: Policy, tmp_path: Path) -> None:
    assert "cannot be run" in await fail_to_start(policy, tmp_path, python=str(tmp_path / "none"))


async def test_a_server_that_was_not_started_for_training_is_told(policy: Policy, tmp_path: Path) -> None:
    async def health(_: Request) -> Response:
        return Response()

    async with endpoint.serve(Router([Route("/health", health)])) as url:
        assert "start it by `agl vllm MODEL`" in await fail_to_start(policy, tmp_path, urls=[url])


def test_what_runs_inside_vllm_ends_when_its_parent_was_killed() -> None:
    inner = "import agl_vllm, os, time; agl_vllm.watch_parent(); print(os.getpid(), flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]).wait()"
    environment = {**os.environ, "PYTHONPATH": str(options.INSIDE)}
    with subprocess.Popen([sys.executable, "-c", outer], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
            assert time.monotonic() < deadline, "it runs on"
            time.sleep(0.05)


# ----------------------------------------------------------------------------------------------------- stand-ins


class StandIn:
    """Answers as a vLLM server would, as far as the backend can tell."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "default"
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.breaks = 0
        """So many chats break off."""
        self.dead = False
        self.hold = asyncio.Event()
        self.hold.set()

    def app(self) -> Router:
        return Router([Route("/{path:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if self.dead:
            return Response(status_code=503)
        body: Any = json.loads(await request.body() or b"{}")
        match path:
            case "/v1/chat/completions":
                return await self.chat(body)
            case "/weight_info":
                return JSONResponse({"weight_version": self.version})
            case "/update_weights":
                assert (Path(body["update_info"]["folder"]) / "model.safetensors").is_file()
            case "/update_weight_version":
                self.version = body["new_version"]
            case _:
                pass
        self.asked.append(path)
        return JSONResponse({"success": True})

    async def chat(self, body: Any) -> Response:
        self.bodies.append(body)
        await self.hold.wait()
        if self.breaks:
            self.breaks -= 1
            self.dead = True
            return Response(status_code=500)
        if not body.get("stream"):
            return JSONResponse({"id": self.name, "weights": self.version})

        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b'data: {"id": "%d"}\n\n' % number
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


@asynccontextmanager
async def standing_in(
    policy: Policy, tmp_path: Path, count: int, limit: float = 60.0
) -> AsyncIterator[tuple[VllmBackend, list[StandIn]]]:
    async with AsyncExitStack() as stack:
        servers = [StandIn(f"server {place}") for place in range(count)]
        urls = [await stack.enter_async_context(endpoint.serve(server.app())) for server in servers]
        policy.folder = tmp_path
        backend = VllmBackend(policy, policy.config, urls=urls, start_timeout=limit)
        stack.push_async_callback(backend.close)
        await backend.start()
        yield backend, servers


async def ask(backend: VllmBackend, rollout: str = "", **body: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60.0, trust_env=False) as http:
        return await http.post(
            f"{backend.url}/v1/chat/completions",
            json={"messages": QUESTION, **body},
            headers={"x-agl-rollout": rollout} if rollout else {},
        )


async def test_every_server_gets_the_weights_before_it_serves_and_at_each_update(
    policy: Policy, tmp_path: Path
) -> None:
    async with standing_in(policy, tmp_path, 2) as (backend, servers):
        order = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
        for server in servers:
            assert [path for path in server.asked if path in order] == order
            assert server.version == "0"
        await backend.update_weights(1)
        for server in servers:
            assert [path for path in server.asked if path in order] == 2 * order
            assert server.version == "1" and server.asked[-1] == "/resume"
        answer = (await ask(backend)).json()
        assert answer["weight_version"] == 1 and answer["weights"] == "1"


async def test_a_call_whose_server_dies_is_answered_by_another_and_the_dead_one_comes_back_updated(
    policy: Policy, tmp_path: Path
) -> None:
    async with standing_in(policy, tmp_path, 2) as (backend, servers):
        answered = (await ask(backend, "r1")).json()["id"]
        home = [server.name for server in servers].index(answered)
        broken, other = servers[home], servers[1 - home]
        broken.breaks = 1
        assert (await ask(backend, "r1")).json()["id"] == other.name
        assert len(broken.bodies) == 2, "it was asked, and broke off"
        await backend.update_weights(1)
        assert broken.version == "0"
        broken.version, broken.dead = "default", False  # the user has started it again
        async with asyncio.timeout(60.0):
            while len(await backend.fleet.serving()) < 2:
                await asyncio.sleep(0.05)
        assert broken.version == "1"
        assert (await ask(backend, "r2")).json()["weights"] == "1"


async def test_calls_wait_while_no_server_is_there(policy: Policy, tmp_path: Path) -> None:
    async with standing_in(policy, tmp_path, 1) as (backend, (server,)):
        server.breaks = 1
        waiting = asyncio.create_task(ask(backend))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        server.dead = False
        assert (await waiting).json()["id"] == server.name


async def test_calls_fail_and_the_run_ends_when_no_server_comes_back(policy: Policy, tmp_path: Path) -> None:
    async with standing_in(policy, tmp_path, 1, limit=0.5) as (backend, (server,)):
        server.breaks = 1
        refused = await ask(backend)
        assert refused.status_code == 503 and "no vLLM answers" in refused.json()["error"]["message"]
        with pytest.raises(BackendError, match="no vLLM answers"):
            backend.check()


async def test_a_rollout_stays_with_its_server_and_new_ones_go_where_least_is_to_do(
    policy: Policy, tmp_path: Path
) -> None:
    async with standing_in(policy, tmp_path, 2) as (backend, servers):
        for server in servers:
            server.hold.clear()
        calls = [asyncio.create_task(ask(backend, f"r{number}")) for number in range(8)]
        async with asyncio.timeout(60.0):
            while sum(len(server.bodies) for server in servers) < 8:
                await asyncio.sleep(0.01)
        assert [len(server.bodies) for server in servers] == [4, 4]
        for server in servers:
            server.hold.set()
        first = [answer.json()["id"] for answer in await asyncio.gather(*calls)]
        again = [(await ask(backend, f"r{number}")).json()["id"] for number in reversed(range(8))]
        assert again[::-1] == first


async def test_a_stream_is_passed_on_with_its_version_at_the_beginning(policy: Policy, tmp_path: Path) -> None:
    async with standing_in(policy, tmp_path, 1) as (backend, (server,)):
        answer = await ask(backend, stream=True, stream_options={"include_usage": True})
        lines = [line for line in answer.text.splitlines() if line]
        assert [json.loads(line[6:]) for line in lines[:-1]] == [
            {"weight_version": 0, "id": "0"},
            {"id": "1"},
            {"id": "2"},
        ]
        assert lines[-1] == "data: [DONE]"
        (body,) = server.bodies
        assert body["stream_options"] == {"include_usage": True}
        assert body["stream"] and body["logprobs"] and body["return_token_ids"] and body["include_reasoning"]


async def test_vllm_is_asked_only_what_the_trainer_can_follow(policy: Policy, tmp_path: Path) -> None:
    async with standing_in(policy, tmp_path, 1) as (backend, (server,)):
        wish: Mapping[str, Any] = {"include_reasoning": False, "response_format": {"type": "json_object"}, "min_p": 0}
        await ask(backend, model="policy", tool_choice="required", tools=[{"function": {"name": "f"}}], **wish)
        (body,) = server.bodies
        assert {"response_format", "tool_choice", "min_p"}.isdisjoint(body)
        assert body["include_reasoning"] is True and body["model"] == "model"
        assert "f" in body["messages"][0]["content"], "the template knows no tools, so they stand in the text"
        for wrong in ({"min_p": 0.1}, {"frequency_penalty": 1}, {"model": "gpt"}, {"tool_choice": "required"}):
            assert (await ask(backend, **wrong)).status_code in (400, 404)
        assert len(server.bodies) == 1

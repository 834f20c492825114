"""The backend ``vllm`` on a real vLLM: ``nox -s vllm``. One server is shared by most tests; two are started by agl."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import agl
from agl.chat import ChatRequest
from agl.protocols import Token
from agl_trainer import Trainer, canary
from agl_trainer.backends.vllm.backend import VllmBackend
from agl_trainer.backends.vllm.fleet import Fleet
from agl_trainer.chat import ChatFormat
from agl_trainer.config import TrainConfig
from agl_trainer.policy import Policy
from agl_trainer.testing import tiny_model

pytestmark = pytest.mark.timeout(600)  # a start takes half a minute on an idle machine, and minutes on a busy one

CALL = ("<tool_call>", '{"name": "add", ', '"arguments": ', '{"a": 1, ', '"b": 2}}', "</tool_call>")
"""Words of the model that make a tool call."""
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}},
}
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
KEY = "the key of the test's server"
SMALL = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**27,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
ROUNDING = 1e-4
"""In float32."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with heads as wide as vLLM's CPU kernels want them."""
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=128, words=CALL)


@pytest.fixture(scope="session")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as a user runs it, by ``agl vllm``, which can also serve adapters."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "agl", "vllm", str(folder), "--port", str(port), "--", "--dtype", "float32"]
    line += ["--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", str(2**27)]
    line += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    line += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as out, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGL_VLLM_KEY", KEY)
        process = subprocess.Popen(line, stdout=out, stderr=out, start_new_session=True)
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 500
        while not _healthy(address):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield address
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=5.0, trust_env=False).is_success
    except httpx2.TransportError:
        return False


@asynccontextmanager
async def serving(folder: Path, url: str, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Policy, VllmBackend]]:
    """A policy, and the backend that serves it by the shared server."""
    config = TrainConfig.of(model=str(folder), max_length=512, **settings)
    policy = Policy(config, tmp_path)
    backend = VllmBackend(policy, config, urls=[url])
    await backend.start()
    try:
        yield policy, backend
    finally:
        await backend.close()


async def distance(policy: Policy, backend: VllmBackend, agent: str = "") -> float:
    """Mean difference of logprobs between vLLM and the trainer."""
    prompt = policy.tokenizer.encode(canary.TEXT, add_special_tokens=False)
    tokens = await backend.probe(prompt, 16, agent)
    assert {token.version for token in tokens} == {policy.version}
    return canary.difference(policy, agent, prompt, tokens)


def disturb(policy: Policy, seed: int) -> None:
    """Change every trained weight a good deal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


async def chat(backend: VllmBackend, body: Mapping[str, Any], **headers: str) -> Any:
    """A whole answer."""
    async with httpx2.AsyncClient(timeout=120.0, trust_env=False) as http:
        answer = await http.post(f"{backend.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks(backend: VllmBackend, body: Mapping[str, Any]) -> list[Any]:
    """The events of a streamed answer."""
    async with (
        httpx2.AsyncClient(timeout=120.0, trust_env=False) as http,
        http.stream("POST", f"{backend.url}/v1/chat/completions", json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4}], ids=["full", "merged"])
async def test_logprobs_are_the_trainers_at_the_start_and_after_each_update(
    settings: dict[str, Any], folder: Path, url: str, tmp_path: Path
) -> None:
    async with serving(folder, url, tmp_path, **settings) as (policy, backend):
        assert await distance(policy, backend) < ROUNDING
        for seed in range(3):
            disturb(policy, seed)
            assert await distance(policy, backend) > 100 * ROUNDING, "the old weights are told from the new ones"
            policy.version += 1
            await backend.update_weights(policy.version)
            assert await distance(policy, backend) < ROUNDING
        kept = sorted(path.name for path in (tmp_path / "vllm" / "weights").iterdir())
        assert kept == ["v3"], "older versions are removed"
    assert not (tmp_path / "vllm" / "weights").exists()


async def test_each_agent_is_answered_by_its_own_adapter_and_the_frozen_model_by_the_base(
    folder: Path, url: str, tmp_path: Path
) -> None:
    settings = {"lora_rank": 4, "adapters": "agent", "optimize": ["writer", "Judge!"], "unselected": "frozen"}
    async with serving(folder, url, tmp_path, **settings) as (policy, backend):
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12, "logprobs": True}
        base = await chat(backend, {**body, "model": "frozen"})
        disturb(policy, 1)
        policy.version += 1
        await backend.update_weights(policy.version)
        assert await distance(policy, backend, "writer") < ROUNDING
        assert await distance(policy, backend, "Judge!") < ROUNDING
        assert await distance(policy, backend, "somebody else") < ROUNDING  # who has no adapter: the base
        again = await chat(backend, {**body, "model": "frozen"})
        writer = await chat(backend, {**body, "model": "policy"}, **{"x-agl-agent": "writer"})
        judge = await chat(backend, {**body, "model": "policy"}, **{"x-agl-agent": "Judge%21"})
        first = [answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in (base, again, writer, judge)]
        assert abs(first[0] - first[1]) < ROUNDING
        apart = [abs(one - other) for place, one in enumerate(first[1:]) for other in first[1:][:place]]
        assert len(apart) == 3 and min(apart) > 10 * ROUNDING


async def test_calls_under_way_live_across_an_update_and_tell_the_version_they_began_with(
    folder: Path, url: str, tmp_path: Path
) -> None:
    async with serving(folder, url, tmp_path) as (policy, backend):
        body = {"messages": QUESTION, "max_tokens": 450, "n": 16}
        running = [asyncio.create_task(chat(backend, body)) for _ in range(2)]
        streamed = asyncio.create_task(chunks(backend, body))
        while sum(replica.calls for replica in backend.fleet.replicas) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        disturb(policy, 2)
        policy.version = 7
        await backend.update_weights(7)
        assert not any(task.done() for task in running), "they were too short to tell anything"
        answers = await asyncio.gather(*running)
        assert [answer["weight_version"] for answer in answers] == [0, 0]
        assert (await streamed)[0]["weight_version"] == 0
        assert (await chat(backend, {**body, "max_tokens": 4}))["weight_version"] == 7
        # With old keys and values left in the cache, the same prompt would now be answered under both weights.
        asked = {**body, "n": 1, "max_tokens": 8, "return_token_ids": True, "logprobs": True}
        answer = await chat(backend, asked)
        choice = answer["choices"][0]
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        tokens = [
            Token(id=token, logprob=logprob, version=7)
            for token, logprob in zip(choice["token_ids"], told, strict=True)
        ]
        assert canary.difference(policy, "", answer["prompt_token_ids"], tokens) < ROUNDING


# ------------------------------------------------------------------------------------------------------- answers


def teach_to_call(policy: Policy) -> None:
    """Imitate one answer until it is certain: a call of the tool ``add``."""
    prompt = ChatFormat(policy.tokenizer).render(QUESTION, [TOOL])
    answer = [*policy.tokenizer.encode("".join(CALL), add_special_tokens=False), policy.tokenizer.eos_token_id]
    assert len(answer) == len(CALL) + 1
    ids = torch.tensor([prompt + answer])
    optimizer = torch.optim.Adam(policy.parameters, lr=3e-3)
    for _ in range(300):
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            return
    raise AssertionError(f"it did not learn: {loss.item()}")


async def test_a_streamed_tool_call_has_the_tokens_of_the_whole_answer(folder: Path, url: str, tmp_path: Path) -> None:
    async with serving(folder, url, tmp_path) as (policy, backend):
        teach_to_call(policy)
        policy.version += 1
        await backend.update_weights(policy.version)
        body = {"messages": QUESTION, "tools": [TOOL], "temperature": 0}
        whole = await chat(backend, body)
        choice = whole["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
        assert choice["finish_reason"] == "tool_calls"
        events = await chunks(backend, {**body, "stream_options": {"include_usage": True}})
        parts = [part for event in events for part in event["choices"]]
        ids = [token for part in parts for token in part.get("token_ids") or ()]
        entries = [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]]
        assert ids == choice["token_ids"]
        assert len(ids) == len(entries) == whole["usage"]["completion_tokens"]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        assert usage == {name: whole["usage"][name] for name in usage}
        calls = [call["function"] for part in parts for call in part["delta"].get("tool_calls") or ()]
        assert "".join(call.get("name") or "" for call in calls) == "add"
        assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"a": 1, "b": 2}


async def test_prompts_are_those_of_the_embedded_backend(folder: Path, url: str, tmp_path: Path) -> None:
    async with serving(folder, url, tmp_path) as (_, backend):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        chats: list[tuple[list[dict[str, Any]], Any]] = [
            ([{"role": "developer", "content": "Be brief."}, *QUESTION], None),
            (QUESTION, [TOOL]),
            (
                [
                    *QUESTION,
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "3"},
                ],
                [TOOL],
            ),
            ([{"role": "user", "content": [{"type": "text", "text": "Gr\u00fc\u00dfe \u2603"}]}], None),
        ]
        for messages, tools in chats:
            request = ChatRequest.model_validate({"messages": messages})
            rendered = backend.chat.render([message.rendered() for message in request.messages], tools)
            answer = await chat(backend, {"messages": messages, "tools": tools, "max_tokens": 1})
            assert answer["prompt_token_ids"] == rendered


async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    folder: Path, url: str, tmp_path: Path
) -> None:
    async with serving(folder, url, tmp_path) as (policy, backend):
        answer = await chat(backend, {"messages": QUESTION, "temperature": 0.5, "max_tokens": 12})
        choice = answer["choices"][0]
        ids = torch.tensor([answer["prompt_token_ids"] + choice["token_ids"]])
        count = len(choice["token_ids"])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, -count - 1 : -1] / 0.5
        wanted = torch.log_softmax(logits, -1).gather(-1, ids[0, -count:, None])[:, 0]
        told = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert float((told - wanted).abs().max()) < 10 * ROUNDING


async def test_vllm_stops_to_sample_when_the_client_leaves(folder: Path, url: str, tmp_path: Path) -> None:
    async with serving(folder, url, tmp_path) as (_, backend), httpx2.AsyncClient(trust_env=False) as http:
        body = {"messages": QUESTION, "max_tokens": 450, "n": 8}
        for stream in (True, False):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    async with http.stream(
                        "POST", f"{backend.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60.0
                    ) as response:
                        async for _part in response.aiter_raw():
                            pass
            async with asyncio.timeout(5.0):
                while await _running(http, url):
                    await asyncio.sleep(0.05)
            assert [replica.calls for replica in backend.fleet.replicas] == [0]


async def _running(http: httpx2.AsyncClient, url: str) -> float:
    metrics = (await http.get(f"{url}/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
    return float(line.split()[-1])


@pytest.mark.parametrize("wrong", [{"repetition_penalty": 1.3}, {"model": "nobody"}, {"messages": []}])
async def test_what_the_trainer_cannot_follow_is_refused(
    wrong: dict[str, Any], folder: Path, url: str, tmp_path: Path
) -> None:
    async with serving(folder, url, tmp_path) as (_, backend), httpx2.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{backend.url}/v1/chat/completions", json={"messages": QUESTION, **wrong})
        assert answer.status_code in (400, 404)
        assert next(iter(wrong)) in answer.json()["error"]["message"] + answer.json()["error"]["param"]


def test_a_server_serves_only_who_has_its_key_and_only_the_routes_that_are_used(url: str) -> None:
    with httpx2.Client(base_url=url, trust_env=False, timeout=30.0) as http:
        assert http.get("/v1/models").status_code == 401
        assert http.post("/v1/completions", headers={"authorization": "Bearer no"}).status_code == 401
        ours = {"authorization": f"Bearer {KEY}"}
        assert http.get("/v1/models", headers=ours).status_code == 200
        for path in ("/collective_rpc", "/server_info", "/sleep", "/v1/responses"):
            assert http.post(path, headers=ours, json={}).status_code == 404


# ------------------------------------------------------------------------------------------------------ training

TASKS = [{"id": name, "question": f"Say {name}"} for name in "abcd"]


async def lower_case(task: Mapping[str, Any], llm: agl.LLM) -> float:
    async with llm.async_client() as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
    text = answer.choices[0].message.content or ""
    return sum(character.islower() for character in text) / 4


def train(agent: Any, folder: Path, tmp_path: Path, **settings: Any) -> list[dict[str, Any]]:
    """Metrics of the steps of a run; the canary has watched over each of them."""
    small = {"tasks_per_step": 4, "group_size": 4, "max_length": 256, "checkpoint_every": 0, "stall_timeout": 120}
    trainer = Trainer(agent, TASKS, model=str(folder), output_dir=str(tmp_path / "runs"), **small, **settings)
    trainer.fit()
    return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]


def test_a_few_steps_raise_the_reward(folder: Path, url: str, tmp_path: Path) -> None:
    backend = {"name": "vllm", "urls": [url]}
    steps = train(lower_case, folder, tmp_path, steps=8, learning_rate=4e-3, backend=backend)
    assert [step["version"] for step in steps] == list(range(1, 9))
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-3, "the weights that sampled are those that learn"
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1
    assert all(step["unscored"] == 0 for step in steps)


def test_lora_trains_by_merged_weights(folder: Path, url: str, tmp_path: Path) -> None:
    backend = {"name": "vllm", "urls": [url]}
    steps = train(lower_case, folder, tmp_path, steps=2, learning_rate=4e-3, backend=backend, lora_rank=4)
    assert [step["version"] for step in steps] == [1, 2]
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-3


def test_rollouts_go_on_during_updates_and_keep_to_the_cap(folder: Path, url: str, tmp_path: Path) -> None:
    backend = {"name": "vllm", "urls": [url]}
    steps = train(lower_case, folder, tmp_path, steps=5, learning_rate=4e-3, backend=backend, mode="async")
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5]
    assert max(step["staleness/max"] for step in steps) == 2


def test_an_engine_that_is_killed_in_mid_step_comes_back_with_the_present_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets: list[Fleet] = []
    starting = Fleet.open
    killed = threading.Event()
    calls = 0

    async def remember(self: Fleet, weights: Any) -> None:
        fleets.append(self)
        await starting(self, weights)

    async def agent(task: Mapping[str, Any], llm: agl.LLM) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 * 16 + 8:  # in the middle of the third step
            killed.set()
            server = fleets[0].replicas[0].server
            assert server is not None and server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        return await lower_case(task, llm)

    monkeypatch.setattr(Fleet, "open", remember)
    backend = {"name": "vllm", "arguments": SMALL, "devices": ["nobind"]}
    steps = train(agent, folder, tmp_path, steps=4, learning_rate=4e-3, backend=backend)
    assert killed.is_set() and fleets[0].restarts == 1
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-3, "the weights that sampled are those that learn"
    assert all(step["unscored"] == 0 and step["rollouts"] == 16 for step in steps)
    (log,) = tmp_path.glob("runs/*/vllm/server-0.log")
    assert log.read_text().count("agl: ") == 2
    server = fleets[0].replicas[0].server
    assert server is not None and server.exit_code is not None
    assert not alive_in_group(server.pid), "children of a server that was killed are ended, too"


def alive_in_group(group: int | None) -> list[list[str]]:
    """Processes of a group that are more than a line in the kernel's table."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return [stat for stat in stats if stat[2] == str(group) and stat[0] != "Z"]

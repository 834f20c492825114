"""Any program in any language: the base URL and the key alone make it trainable, call for call and token for token."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

import agl
from agl.testing import ModelServer, ScriptedEngine, tool_call
from agl.testing.contract import Lightning, Played, play, start_lightning
from agl.transitions import build_rows

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lightning]:
    yield from start_lightning(tmp_path_factory.mktemp("lightning"))


@pytest.fixture
def server() -> Generator[ModelServer]:
    with ModelServer() as server:
        yield server


def solves(prompt: str, labels: Mapping[str, str]) -> str:
    if labels["agent"] != "main":
        return f"said by the {labels['agent']}"
    return "42" if "<|im_start|>tool\n" in prompt else tool_call("multiply", a=6, b=7)


async def run_program(llm: agl.LLM, *command: str) -> str:
    """What a program prints, in a process of its own that knows the environment and nothing else of us."""
    environment = {"PATH": os.environ["PATH"], **llm.environment()}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_an_agent_in_node(lightning: Lightning, server: ModelServer):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine")
    server.engine = ScriptedEngine(solves)

    async def agent(task: Any, llm: agl.LLM) -> float:
        told = json.loads(await run_program(llm, node, str(PROGRAMS / "agent.mjs"), f"{task['number']}: 6 x 7?"))
        assert told == {"answer": "42", "verdict": "said by the judge", "spoken": "said by the speaker"}
        return float(told["answer"] == "42")

    for played in await play(agent, lightning, server, rollouts=2):
        played.expect("main", "main", "judge", "speaker")
        assert played.rollout.returned is not None and played.rollout.returned.total == 1.0
        first = [row for row in build_rows(played.transitions) if row.agent == "main"]
        assert len(first) == 1, "the call after the tool extends the first"
        assert not played.rollout.steps


async def test_plain_http_from_a_process_of_its_own(lightning: Lightning, server: ModelServer):
    program = """
import json, os, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""

    async def agent(task: Any, llm: agl.LLM) -> float:
        return float(await run_program(llm, sys.executable, "-c", program) == "ok\n")

    (played,) = await play(agent, lightning, server)
    played.expect("main")


async def test_plain_http_in_the_same_process(lightning: Lightning, server: ModelServer):
    def agent(task: Any, llm: agl.LLM) -> float:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "agl_agent": "writer"}).encode()
        headers = {"authorization": f"Bearer {llm.key}", "content-type": "application/json"}
        request = urllib.request.Request(f"{llm.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return float(json.load(response)["choices"][0]["message"]["content"] == "ok")

    (played,) = await play(agent, lightning, server)
    played.expect("writer")


async def test_the_raw_client_with_agents_that_are_named_in_the_code(lightning: Lightning, server: ModelServer):
    async def agent(task: Any, llm: agl.LLM) -> None:
        async with llm.async_client() as client:
            for name in ("solver", "judge"):
                with agl.agent(name):
                    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": name}])
            await client.responses.create(model=llm.model, input="hi")

    (played,) = await play(agent, lightning, server, optimize=("solver", "main"))
    assert sorted(one.agent for one in played.transitions) == ["judge", "main", "solver"]


async def test_a_client_that_was_built_long_ago_is_rerouted_each_rollout_to_its_own(
    lightning: Lightning, server: ModelServer
):
    with ModelServer(lambda prompt, labels: "from elsewhere") as own:
        async with openai.AsyncOpenAI(api_key="sk-own", base_url=f"{own.url}/v1") as client:

            async def program(question: str) -> str:
                """It knows nothing of rollouts."""
                said = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": question}]
                )
                return said.choices[0].message.content or ""

            async def agent(task: Any, llm: agl.LLM) -> None:
                with llm.reroute():
                    assert await program(f"task {task['number']}") == "ok"
                    with agl.agent("judge"):
                        assert await program("right?") == "from elsewhere"

            batch: list[Played] = await play(agent, lightning, server, rollouts=8, optimize=("main",))
        assert len(own.exchanges) == 8 and {e.headers["authorization"] for e in own.exchanges} == {"Bearer sk-own"}
    for played in batch:
        played.expect("main")
        assert f"task {played.rollout.task.data['number']}" in str(played.exchanges[0].body)

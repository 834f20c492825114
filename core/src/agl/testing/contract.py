"""The adapter contract: inherit `AdapterContract`, override ``run``, and every promise about capture is tested.

```python
class TestMyFramework(AdapterContract):
    impossible = {"cache_hit": "the framework has no cache"}

    def run(self, situation: str, llm: agl.LLM) -> Any:
        if situation == "plain_call":
            return Agent("writer", llm.client()).ask("hello")
        ...
```

Each test's docstring says what ``run`` must build for the situation of that name; it may be asynchronous. The agent is
run by the real runner, against a real gateway (``agl serve``, so agl-server must be installed) and a scripted model
server. What the transitions hold is compared, token by token, with what the model server sampled.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agl import plugins
from agl.client import LightningClient
from agl.errors import RunError
from agl.llm import LLM
from agl.protocols import AgentFunction
from agl.records import Call, Rollout, Step, Task, Transition
from agl.runner import run_attempt
from agl.testing.engine import Reply, ScriptedEngine, tool_call
from agl.testing.server import Exchange, Fault, ModelServer
from agl.transitions import build_rows, causes
from agl.wire import PolicyState


@dataclass(frozen=True, slots=True)
class Lightning:
    """A Lightning server that runs."""

    url: str
    key: str


def start_lightning(home: Path) -> Generator[Lightning]:
    """Run ``agl serve`` in a process of its own until the generator is closed."""
    key = uuid.uuid4().hex
    environment = {**os.environ, "AGL_KEY": key}
    with open(home / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agl", "serve", "--home", str(home)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Lightning(_wait_for_url(home, process), key)
    finally:
        process.terminate()
        process.wait(15)


def _wait_for_url(home: Path, process: subprocess.Popen[bytes]) -> str:
    import json

    end = time.monotonic() + 30
    while not (home / "server.json").exists():
        if process.poll() is not None or time.monotonic() > end:
            raise RunError(f"`agl serve` did not start: {(home / 'output').read_text()!r}; is agl-server installed?")
        time.sleep(0.02)
    return json.loads((home / "server.json").read_text())["url"]


@dataclass(frozen=True, slots=True)
class Played:
    """One rollout after its end, and the truth about it."""

    rollout: Rollout
    transitions: Sequence[Transition]
    exchanges: Sequence[Exchange]

    def expect(self, *agents: str) -> None:
        """Check that these agents made the calls that count, no others did, and that every token is right."""
        assert Counter(one.agent for one in self.transitions) == Counter(agents), self.rollout
        truth = {exchange.headers["x-request-id"]: exchange for exchange in self.exchanges}
        choices = Counter(one.call for one in self.transitions)
        for call, count in choices.items():
            assert count == len(truth[call].choices)
        for call in choices:
            captured = [one for one in self.transitions if one.call == call]
            for transition, choice in zip(captured, truth[call].choices, strict=True):
                assert transition.prompt_ids == truth[call].prompt_ids
                assert transition.response_ids == choice.response_ids
                assert transition.logprobs == choice.logprobs

    def steps(self, *kinds: str) -> list[Step]:
        """The steps of these kinds."""
        return [step for step in self.rollout.steps if step.kind in kinds]

    def signals(self) -> list[dict[str, float]]:
        """For each transition the signals that it caused and that are not 0; no signal is without a cause."""
        found: list[dict[str, float]] = [{} for _ in self.transitions]
        judged = plugins.signal_rewards(self.rollout.steps)
        for values, cause in zip(judged, causes(self.rollout, self.transitions), strict=True):
            for name, value in values.items():
                if value:
                    assert cause is not None, (name, self.rollout.steps)
                    found[cause][name] = found[cause].get(name, 0.0) + value
        return found

    def calls(self, state: str) -> list[Call]:
        """The calls that ended so."""
        return [call for call in self.rollout.calls if call.state == state]


async def play(
    agent: AgentFunction,
    lightning: Lightning,
    server: ModelServer,
    *,
    rollouts: int = 1,
    optimize: tuple[str, ...] | None = None,
    unselected: Any = "policy",
    expect: str | None = "ok",
) -> list[Played]:
    """Run an agent for so many rollouts at once, as a runner does, and read back what was recorded.

    Args:
        agent: ``agent(task, llm)``; ``task["number"]`` counts the rollouts.
        lightning: the gateway.
        server: what the gateway asks.
        optimize: the agents to train; None selects all.
        unselected: who answers the others; see `agl.wire.PolicyState`.
        expect: the outcome that every rollout must have; None allows any.
    """
    batch = uuid.uuid4().hex
    queued = [
        Rollout(
            id=f"{batch}-{number}",
            task=Task(id=str(number), data={"number": number}),
            batch=batch,
            optimize=optimize,
            max_attempts=1,
        )
        for number in range(rollouts)
    ]
    stop = plugins.instrument()
    try:
        async with LightningClient(lightning.url, lightning.key, patience=5) as client:
            await client.set_policy(PolicyState(upstream=server.url, unselected=unselected))
            await client.enqueue(queued)
            leases = await client.lease("contract", rollouts, 60, wait=5)
            await asyncio.gather(*(run_attempt(agent, client, lease, 20) for lease in leases))
            await asyncio.to_thread(server.wait)
            ended = [await client.rollout(rollout.id) for rollout in queued]
    finally:
        stop()
    for rollout in ended:
        assert expect is None or rollout.outcome == expect, rollout.error
    return [_played(rollout, server) for rollout in ended]


def _played(rollout: Rollout, server: ModelServer) -> Played:
    mine = [one for one in server.exchanges if one.headers.get("x-agl-rollout") == rollout.id]
    return Played(rollout, plugins.build_transitions(rollout), mine)


def use_tool_once(name: str, agent: str, **arguments: Any) -> Reply:
    """A script: this agent calls a tool first and answers when it has the result; the others answer at once."""

    def reply(prompt: str, labels: Mapping[str, str]) -> str:
        if labels.get("agent") == agent and "<|im_start|>tool\n" not in prompt:
            return tool_call(name, **arguments)
        return f"{labels.get('agent')} is done"

    return reply


class AdapterContract:
    """Every promise about capture, for one framework's adapter."""

    impossible: ClassVar[Mapping[str, str]] = {}
    """Situations that the framework does not have, each with the reason; they are skipped, and the reason is shown."""

    def run(self, situation: str, llm: LLM) -> Any:
        """Build the agents of a situation in the framework and run them; may be asynchronous."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def lightning(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[Lightning]:
        """The gateway, one for all situations."""
        yield from start_lightning(tmp_path_factory.mktemp("lightning"))

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Generator[ModelServer]:
        """The model server, with another script for each situation."""
        with ModelServer() as server:
            yield server

    @pytest.fixture
    def stage(self, lightning: Lightning, server: ModelServer) -> Callable[..., list[Played]]:
        """Plays a situation."""

        def play_situation(
            situation: str,
            reply: Reply | Iterable[str] | None = None,
            *,
            faults: Iterable[Fault] = (),
            token_delay: float = 0.0,
            **options: Any,
        ) -> list[Played]:
            if reason := self.impossible.get(situation):
                pytest.skip(f"{situation} is impossible: {reason}")

            def agent(task: Mapping[str, Any], llm: LLM) -> Any:
                return self.run(situation, llm)

            server.engine = ScriptedEngine(reply or say, token_delay=token_delay)
            server.faults.extend(faults)
            return asyncio.run(play(agent, lightning, server, **options))

        return play_situation

    def test_plain_call(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once."""
        (played,) = stage("plain_call")
        played.expect("writer")

    def test_stream(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once, streaming, and reads to the end."""
        (played,) = stage("stream")
        played.expect("writer")

    def test_two_agents(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model, then agent ``critic`` does."""
        (played,) = stage("two_agents")
        played.expect("writer", "critic")

    def test_parent(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once, inside whatever the framework puts around an agent."""
        (played,) = stage("parent")
        played.expect("writer")
        (start,) = played.steps("model_start")
        assert start.parent is not None
        assert played.rollout.calls[0].parent == start.parent

    def test_tool_results(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` has the tool ``add(a: int, b: int)``; it calls it, reads the result and answers."""
        (played,) = stage("tool_results", use_tool_once("add", "writer", a=2, b=3))
        played.expect("writer", "writer")
        assert [step.name for step in played.steps("tool_start")] == ["add"]
        assert [step.name for step in played.steps("tool_end")] == ["add"]
        assert len(build_rows(played.transitions)) == 1, "the second call must extend the first"

    def test_tool_error(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` has the tool ``fail()``, which raises; it reads of the error and answers."""
        (played,) = stage("tool_error", use_tool_once("fail", "writer"))
        played.expect("writer", "writer")
        told = [*played.steps("tool_error"), *(s for s in played.steps("tool_end") if s.data.get("status") == "error")]
        assert [step.name for step in told] == ["fail"]

    def test_model_error(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model, which refuses with status 400; the error may leave ``run`` or not."""
        (played,) = stage("model_error", faults=[Fault(status=400)], expect=None)
        played.expect()
        assert len(played.calls("error")) == 1
        assert not played.steps("model_end")

    def test_http_retry(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once; the client library tries a status of 500 again."""
        (played,) = stage("http_retry", faults=[Fault(status=500)])
        played.expect("writer")
        assert [call.retry for call in played.rollout.calls] == [0, 1]
        assert len({call.call_id for call in played.rollout.calls}) == 1

    def test_timeout_then_retry(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once; its client gives up after 0.5 s and tries again once."""
        (played,) = stage("timeout_then_retry", faults=[Fault(delay=1.5)])
        played.expect("writer")
        (counted,) = [call for call in played.rollout.calls if call.id == played.transitions[0].call]
        assert counted.retry == 1

    def test_cancel(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model, is cancelled after 0.5 s, and asks again."""
        (played,) = stage("cancel", faults=[Fault(delay=1.5)])
        played.expect("writer")
        assert len(played.exchanges) == 2

    def test_abandoned_stream(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model, streaming, and leaves after the first piece."""
        (played,) = stage("abandoned_stream", ["x" * 200], token_delay=0.01)
        played.expect()
        assert len(played.exchanges) == 1

    def test_cache_hit(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model the same twice; the framework's cache answers the second time."""
        (played,) = stage("cache_hit")
        played.expect("writer")
        assert len(played.rollout.calls) == 1

    def test_parallel_same_prompt(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model the same five times at once."""
        (played,) = stage("parallel_same_prompt", [f"answer {number}" for number in range(5)])
        played.expect(*["writer"] * 5)
        assert len({one.response_ids for one in played.transitions}) == 5
        ids = [call.call_id for call in played.rollout.calls if call.call_id is not None]
        assert len(ids) == len(set(ids))

    def test_choices(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once for two answers (``n=2``)."""
        (played,) = stage("choices", ["one", "another"])
        played.expect("writer", "writer")
        assert len(played.rollout.calls) == 1

    def test_nested_agents(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``manager`` has the tool ``ask_solver(question: str)``, which runs agent ``solver``."""
        (played,) = stage("nested_agents", use_tool_once("ask_solver", "manager", question="6 x 7"))
        played.expect("manager", "solver", "manager")
        assert [step.agent for step in played.steps("tool_start")] == ["manager"]

    def test_threads(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model once in each of two threads, which are started through `agl.wrap`."""
        (played,) = stage("threads")
        played.expect("writer", "writer")

    def test_rollouts(self, stage: Callable[..., list[Played]]) -> None:
        """Agent ``writer`` asks the model, then agent ``critic`` does; 32 of these run at once."""
        for played in stage("rollouts", rollouts=32, token_delay=0.001):
            played.expect("writer", "critic")
            assert len(played.exchanges) == 2


def say(prompt: str, labels: Mapping[str, str]) -> str:
    """The script of most situations."""
    return f"a word of {labels.get('agent')}"

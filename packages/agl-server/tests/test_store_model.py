"""Whatever happens in whatever order, the store says what a few lines of Python with dictionaries say."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agl.errors import StaleAttempt
from agl.records import Outcome
from agl_server.store.sqlite import SqliteStore

from .conftest import Clock, new_call, new_rollout

LEASE = 60.0


@dataclass
class Entry:
    """What the model knows of one rollout."""

    max_attempts: int
    state: str = "waiting"
    attempt: int = 0
    expires: float = 0.0
    outcome: str | None = None
    ends: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[str]] = field(default_factory=dict)


class StoreAgainstModel(RuleBasedStateMachine):
    """Random operations on the store and on the model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.clock = Clock()
        self.path = Path(self.folder.name) / "store.sqlite"
        self.store = SqliteStore(self.path, self.clock)
        self.entries: dict[str, Entry] = {}
        self.order: list[str] = []
        self.count = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()
        self.folder.cleanup()

    def ask(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def expect(self, work: Any, allowed: bool) -> None:
        try:
            self.ask(work)
        except StaleAttempt:
            assert not allowed
        else:
            assert allowed

    def end(self, name: str, outcome: str) -> None:
        entry = self.entries[name]
        entry.ends[entry.attempt] = outcome
        if outcome in ("ok", "truncated") or entry.attempt >= entry.max_attempts:
            entry.state, entry.outcome = "ended", outcome
            self.order.append(name)
        else:
            entry.state = "waiting"

    @rule(attempts=st.integers(1, 3))
    def enqueue(self, attempts: int) -> None:
        name = f"r{len(self.entries)}"
        self.ask(self.store.enqueue([new_rollout(name, max_attempts=attempts)]))
        self.entries[name] = Entry(attempts)

    @rule(limit=st.integers(1, 3))
    def lease(self, limit: int) -> None:
        given = self.ask(self.store.lease("w", limit, LEASE))
        waiting = [name for name, entry in self.entries.items() if entry.state == "waiting"][:limit]
        assert [rollout.id for rollout, _ in given] == waiting
        for rollout, attempt in given:
            entry = self.entries[rollout.id]
            entry.state, entry.attempt, entry.expires = "running", entry.attempt + 1, self.clock.now + LEASE
            assert attempt == entry.attempt

    @rule(seconds=st.sampled_from([1.0, 35.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def release(self) -> None:
        released = {one.rollout for one in self.ask(self.store.release_expired())}
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].expires):
            if entry.state == "running" and entry.expires < self.clock.now:
                self.end(name, "infra_error")
                assert name in released
                released.remove(name)
        assert not released

    def some(self, data: st.DataObject) -> tuple[str, int, Entry, bool]:
        leased = [name for name, entry in self.entries.items() if entry.attempt]
        name = data.draw(st.sampled_from(leased))
        entry = self.entries[name]
        attempt = data.draw(st.integers(1, entry.attempt))
        return name, attempt, entry, entry.state == "running" and attempt == entry.attempt

    def any_leased(self) -> bool:
        return any(entry.attempt for entry in self.entries.values())

    @precondition(any_leased)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        name, attempt, entry, runs = self.some(data)
        self.count += 1
        call = new_call(f"c{self.count}", name, attempt, prompt_ids=tuple(range(self.count % 5)))
        self.expect(self.store.add_call(call), runs)
        if runs:
            entry.calls.setdefault(attempt, []).append(call.id)

    @precondition(any_leased)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        name, attempt, entry, runs = self.some(data)
        self.expect(self.store.heartbeat(name, attempt, LEASE), runs)
        if runs:
            entry.expires = self.clock.now + LEASE

    @precondition(any_leased)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "agent_error", "timeout", "truncated"]))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        name, attempt, entry, runs = self.some(data)
        self.expect(self.store.finish(name, attempt, outcome, None, None), runs or entry.ends.get(attempt) == outcome)
        if runs:
            self.end(name, outcome)

    @rule(prefix=st.sampled_from(["", "bat", "other"]))
    def withdraw(self, prefix: str) -> None:
        self.ask(self.store.withdraw(prefix))
        for entry in self.entries.values():
            if prefix != "other" and entry.state in ("waiting", "running"):
                entry.max_attempts += entry.state == "running"
                if entry.state == "running":
                    entry.ends[entry.attempt] = "withdrawn"
                entry.state = "withdrawn"

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def enqueue_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.entries)))
        self.ask(self.store.enqueue([new_rollout(name, max_attempts=1)]))
        if self.entries[name].state == "withdrawn":
            self.entries[name].state = "waiting"

    @rule()
    def restart(self) -> None:
        self.ask(self.store.close())
        self.store = SqliteStore(self.path, self.clock)
        for entry in self.entries.values():
            if entry.state == "running":
                entry.expires = self.clock.now + LEASE

    @invariant()
    def finished_are_the_models(self) -> None:
        cursor, rollouts = self.ask(self.store.finished("batch", 0, 100))
        assert cursor == len(self.order) and sorted(r.id for r in rollouts) == sorted(self.order)
        for rollout in rollouts:
            entry = self.entries[rollout.id]
            kept = [call.id for call in rollout.calls]
            assert (rollout.outcome, rollout.attempt) == (entry.outcome, entry.attempt)
            assert kept == entry.calls.get(entry.attempt, [])


StoreAgainstModel.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_store_behaves_as_its_model = StoreAgainstModel.TestCase

"""The store keeps what it acknowledged, refuses what is stale, and counts each rollout once."""

import asyncio
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ServerError, StaleAttempt, UsageError
from agl.records import Choice, Reward, Step
from agl_server.store import sqlite
from agl_server.store.packing import pack_ids, shared_bytes
from agl_server.store.sqlite import SqliteStore

from .conftest import Clock, new_call, new_rollout


async def enqueue(store: SqliteStore, *names: str, **fields: Any) -> None:
    await store.enqueue([new_rollout(name, **fields) for name in names])


async def finish(store: SqliteStore, name: str, attempt: int = 1, outcome: Any = "ok", **fields: Any) -> None:
    await store.finish(name, attempt, outcome, fields.get("returned"), fields.get("error"))


# -------------------------------------------------------------------------------------------------------- leases


async def test_rollouts_are_leased_in_the_order_they_were_enqueued(store: SqliteStore):
    await enqueue(store, "a", "b", "c")
    assert [(r.id, attempt) for r, attempt in await store.lease("w", 2, 60)] == [("a", 1), ("b", 1)]
    assert [r.id for r, _ in await store.lease("w", 2, 60)] == ["c"]
    assert await store.lease("w", 2, 60) == []


async def test_a_lease_carries_everything_that_was_enqueued(store: SqliteStore):
    rollout = new_rollout("a", optimize=("re*",), sampling={"temperature": 0.7}, max_attempts=3, mode="eval")
    await store.enqueue([rollout])
    ((leased, attempt),) = await store.lease("w", 1, 60)
    assert (leased.task, leased.optimize, leased.sampling) == (rollout.task, rollout.optimize, rollout.sampling)
    assert (leased.mode, leased.max_attempts, leased.attempt, attempt) == ("eval", 3, 1, 1)


async def test_enqueueing_a_known_id_again_changes_nothing(store: SqliteStore):
    await enqueue(store, "a", batch="first")
    await enqueue(store, "a", batch="second")
    ((rollout, _),) = await store.lease("w", 9, 60)
    assert rollout.batch == "first"


async def test_racing_workers_never_get_the_same_rollout(store: SqliteStore):
    await enqueue(store, *(f"r{i}" for i in range(60)))
    given = await asyncio.gather(*(store.lease(f"w{i}", 4, 60) for i in range(20)))
    names = [rollout.id for leases in given for rollout, _ in leases]
    assert len(names) == len(set(names)) == 60


async def test_a_lease_request_asked_again_gives_the_same_leases(store: SqliteStore):
    await enqueue(store, "a", "b", "c")
    first = await store.lease("w", 2, 60, "request-1")
    assert await store.lease("w", 2, 60, "request-1") == first
    assert [r.id for r, _ in await store.lease("w", 2, 60, "request-2")] == ["c"]


async def test_a_lease_that_runs_out_goes_to_the_next_attempt(store: SqliteStore, clock: Clock):
    await enqueue(store, "a")
    await store.lease("w", 1, 60)
    clock.now += 59
    assert await store.release_expired() == []
    clock.now += 2
    (released,) = await store.release_expired()
    assert (released.rollout, released.attempt, released.ended) == ("a", 1, False)
    ((rollout, attempt),) = await store.lease("v", 1, 60)
    assert (rollout.id, attempt) == ("a", 2)


async def test_a_heartbeat_keeps_a_lease(store: SqliteStore, clock: Clock):
    await enqueue(store, "a")
    await store.lease("w", 1, 60)
    clock.now += 50
    await store.heartbeat("a", 1, 60)
    clock.now += 50
    assert await store.release_expired() == []


async def test_the_last_lease_that_runs_out_ends_the_rollout_as_an_infrastructure_error(
    store: SqliteStore, clock: Clock
):
    await enqueue(store, "a", max_attempts=2)
    for attempt in (1, 2):
        ((_, given),) = await store.lease("w7", 1, 60)
        assert given == attempt
        clock.now += 61
        (released,) = await store.release_expired()
    assert released.ended
    _, (rollout,) = await store.finished("batch", 0, 9)
    assert (rollout.outcome, rollout.attempt, rollout.returned) == ("infra_error", 2, None)
    assert rollout.error is not None and "'w7'" in rollout.error and "60 s" in rollout.error


async def test_leases_start_again_when_the_server_was_down(tmp_path: Path, clock: Clock):
    path = tmp_path / "x.sqlite"
    store = SqliteStore(path, clock)
    await enqueue(store, "a")
    await store.lease("w", 1, 60)
    await store.close()
    clock.now += 500
    again = SqliteStore(path, clock)
    assert await again.release_expired() == []
    await again.heartbeat("a", 1, 60)
    await again.close()


# ------------------------------------------------------------------------------------------------------- fencing


async def test_a_stale_attempt_can_write_nothing(store: SqliteStore, clock: Clock):
    await enqueue(store, "r")
    await store.lease("slow", 1, 60)
    clock.now += 61
    await store.release_expired()
    for _ in range(2):  # first while it waits for another worker, then while that one runs it
        for write in (
            store.heartbeat("r", 1, 60),
            store.add_call(new_call(attempt=1)),
            store.add_steps("r", 1, [Step(id="s", kind="model_end", call_id="c")]),
            store.finish("r", 1, "ok", Reward.of(1.0), None),
        ):
            with pytest.raises(StaleAttempt, match="attempt 1 of rollout 'r'"):
                await write
        await store.lease("fast", 1, 60)
    await store.add_call(new_call("good", attempt=2))
    await finish(store, "r", 2)
    _, (rollout,) = await store.finished("batch", 0, 9)
    assert ([call.id for call in rollout.calls], rollout.steps, rollout.returned) == (["good"], (), None)


async def test_an_ended_attempt_takes_no_more_calls(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    await finish(store, "r")
    with pytest.raises(StaleAttempt, match="has ended"):
        await store.add_call(new_call())


async def test_unknown_rollouts_and_attempts_to_come_are_not_found(store: SqliteStore):
    await enqueue(store, "r")
    for name, attempt in (("nobody", 1), ("r", 1)):
        with pytest.raises(ServerError) as refusal:
            await store.heartbeat(name, attempt, 60)
        assert refusal.value.status == 404


# --------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("outcome", ["ok", "truncated"])
async def test_an_answer_good_or_cut_ends_the_rollout_at_once(store: SqliteStore, outcome: str):
    await enqueue(store, "a", max_attempts=3)
    await store.lease("w", 1, 60)
    await finish(store, "a", 1, outcome)
    _, (rollout,) = await store.finished("batch", 0, 9)
    assert (rollout.outcome, rollout.attempt) == (outcome, 1)


@pytest.mark.parametrize("outcome", ["infra_error", "timeout", "agent_error"])
async def test_a_failure_is_tried_again_until_the_attempts_are_used_up(store: SqliteStore, outcome: str):
    await enqueue(store, "a", max_attempts=3)
    for attempt in (1, 2, 3):
        assert (await store.finished("batch", 0, 9))[1] == []
        ((_, given),) = await store.lease("w", 1, 60)
        assert given == attempt
        await finish(store, "a", attempt, outcome, error=f"try {attempt}")
    _, (rollout,) = await store.finished("batch", 0, 9)
    assert (rollout.outcome, rollout.error, rollout.attempt) == (outcome, "try 3", 3)
    assert await store.lease("w", 1, 60) == []


async def test_the_same_finish_again_is_accepted_and_changes_nothing(store: SqliteStore):
    await enqueue(store, "a", "b")
    await store.lease("w", 2, 60)
    reward = Reward(parts={"x": 0.1}, agents={"writer": {"y": 2.0}})
    for _ in range(2):
        await store.finish("a", 1, "ok", reward, None)
        await store.finish("b", 1, "timeout", None, "late")  # b waits for its second attempt meanwhile
    cursor, (rollout,) = await store.finished("batch", 0, 9)
    assert (cursor, rollout.returned) == (1, reward)


async def test_another_finish_after_the_end_is_refused(store: SqliteStore):
    await enqueue(store, "a")
    await store.lease("w", 1, 60)
    await store.finish("a", 1, "ok", Reward.of(1.0), None)
    for outcome, reward in (("ok", Reward.of(2.0)), ("ok", None), ("truncated", Reward.of(1.0))):
        with pytest.raises(StaleAttempt):
            await store.finish("a", 1, outcome, reward, None)


async def test_finished_rollouts_are_read_once_each_in_the_order_they_ended(store: SqliteStore):
    await enqueue(store, *"abcde")
    await enqueue(store, "z", batch="other")
    await store.lease("w", 9, 60)
    for name in "dbz":
        await finish(store, name)
    cursor, first = await store.finished("batch", 0, 9)
    assert [r.id for r in first] == ["d", "b"]
    for name in "aec":
        await finish(store, name)
    cursor, second = await store.finished("batch", cursor, 2)
    cursor, third = await store.finished("batch", cursor, 2)
    assert [r.id for r in [*second, *third]] == ["a", "e", "c"]
    assert await store.finished("batch", cursor, 2) == (cursor, [])


async def test_an_answer_is_bounded_in_tokens_and_the_cursor_goes_on(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sqlite, "LARGEST_ANSWER", 250)
    await enqueue(store, *"abcde")
    await store.lease("w", 9, 60)
    for name in "abcde":
        await store.add_call(new_call(name, name, prompt_ids=(1,) * 100))
        await finish(store, name)
    cursor, first = await store.finished("batch", 0, 9)
    cursor, second = await store.finished("batch", cursor, 9)
    assert ([r.id for r in first], [r.id for r in second], cursor) == (["a", "b", "c"], ["d", "e"], 5)


async def test_everything_is_there_after_a_restart(tmp_path: Path):
    path = tmp_path / "x.sqlite"
    store = SqliteStore(path)
    await enqueue(store, "a", "b")
    await store.lease("w", 1, 60)
    call = new_call(rollout="a", prompt_ids=(1, 2), choices=(Choice(response_ids=(3,), logprobs=(-0.5,)),))
    await store.add_call(call)
    await store.finish("a", 1, "ok", Reward.of(1.0), None)
    await store.set_setting("secret", b"kept")
    await store.close()
    again = SqliteStore(path)
    cursor, (rollout,) = await again.finished("batch", 0, 9)
    assert (cursor, rollout.calls, rollout.returned) == (1, (call,), Reward.of(1.0))
    assert [r.id for r, _ in await again.lease("w", 9, 60)] == ["b"]
    assert await again.setting("secret") == b"kept"
    await finish(again, "b")
    assert (await again.finished("batch", cursor, 9))[0] == 2
    await again.close()


# ---------------------------------------------------------------------------------------------------------- calls


async def test_calls_come_back_to_the_last_bit(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    calls = (
        new_call(
            "first",
            call_id="run-1",
            agent="schreiber ü",
            parent="root",
            retry=2,
            model="policy",
            temperature=0.1 + 0.2,
            policy_version=7,
            context="extended",
            prompt_ids=(5, 0, 2**31 - 1),
            choices=(
                Choice(response_ids=(1, 2), logprobs=(-1e-300, -0.1), finish_reason="stop"),
                Choice(response_ids=(), logprobs=(), finish_reason="length"),
                Choice(response_ids=(9,), logprobs=(-3.3333333333333335,)),
            ),
            started=1.5,
            ended=2.5,
        ),
        new_call("second", state="error", error="HTTP 500", model="frozen"),
        new_call("third", state="client_gone", prompt_ids=(5,)),
    )
    for call in calls:
        await store.add_call(call)
    rollout = await store.rollout("r")
    assert rollout is not None and rollout.calls == calls


async def test_a_prompt_that_repeats_the_call_before_is_stored_as_its_suffix(store: SqliteStore, tmp_path: Path):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    conversation = tuple(range(1000))
    calls = []
    for turn in range(50):  # each turn repeats all that was said; one agent in between has its own prompt
        sampled = Choice(response_ids=(turn, turn), logprobs=(-0.1, -0.2))
        calls.append(new_call(f"c{turn}", agent="writer", prompt_ids=conversation, choices=(sampled,)))
        calls.append(new_call(f"o{turn}", agent="other", prompt_ids=(7, turn)))
        conversation += (*sampled.response_ids, 3, 4)
    broken = (*conversation[:500], 99, *conversation[500:])  # a template that rewrites history
    calls.append(new_call("broken", agent="writer", prompt_ids=broken))
    for call in calls:
        await store.add_call(call)
    rollout = await store.rollout("r")
    assert rollout is not None and rollout.calls == tuple(calls)
    with sqlite3.connect(tmp_path / "store.sqlite") as reader:
        stored, repeats = reader.execute("SELECT sum(length(prompt)), count(base) FROM calls").fetchone()
    reader.close()
    assert repeats == 99
    assert stored < 4 * (1000 + 50 * 4 + 50 * 2 + 800)


@pytest.mark.parametrize(
    ("one", "other", "ids"), [((), (), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 2), 2), ((256,), (1,), 0)]
)
def test_shared_prefixes_are_counted_in_whole_tokens(one: tuple[int, ...], other: tuple[int, ...], ids: int):
    assert shared_bytes(pack_ids(one), pack_ids(other)) == 4 * ids


async def test_a_step_is_kept_once_however_often_it_is_sent(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    steps = [Step(id=f"s{i}", kind="tool_end", call_id="c", data={"n": i}, time=1.5) for i in range(3)]
    await store.add_steps("r", 1, steps[:2])
    await store.add_steps("r", 1, [Step(id="s0", kind="model_end", call_id="other"), *steps[1:]])
    rollout = await store.rollout("r")
    assert rollout is not None and rollout.steps == tuple(steps)


# ------------------------------------------------------------------------------------------------------- the file


async def test_writes_that_wait_together_share_one_commit(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    before = store.writer.commits
    await asyncio.gather(*(store.add_call(new_call(f"c{i}")) for i in range(300)))
    assert store.writer.commits - before < 30
    rollout = await store.rollout("r")
    assert rollout is not None and len(rollout.calls) == 300


async def test_a_write_that_fails_takes_no_other_with_it(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM rollouts")
        connection.execute("INSERT INTO no_such_table VALUES (1)")

    writes = [store.add_call(new_call(f"c{i}", prompt_ids=tuple(range(i)))) for i in range(9)]
    writes.insert(4, store.writer.run(broken))
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [ServerError]
    rollout = await store.rollout("r")
    assert rollout is not None and [len(call.prompt_ids) for call in rollout.calls] == list(range(9))


async def test_a_full_disk_is_told_and_recovered_from(store: SqliteStore):
    await enqueue(store, "r")
    await store.lease("w", 1, 60)

    def limit(pages: int):
        return store.writer.run(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchone())

    await limit(1)
    large = new_call("large", prompt_ids=tuple(range(100_000)))
    with pytest.raises(ServerError, match="full") as refusal:
        await store.add_call(large)
    assert refusal.value.status == 507
    assert store.trouble is not None and "full" in store.trouble
    await limit(2**30)
    await store.add_call(large)
    assert store.trouble is None
    rollout = await store.rollout("r")
    assert rollout is not None and rollout.calls == (large,)


async def test_only_the_owner_can_read_the_store(store: SqliteStore, tmp_path: Path):
    await enqueue(store, "r")
    for path in tmp_path.glob("store.sqlite*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_a_file_of_the_first_schema_is_taken_along(tmp_path: Path):
    path = tmp_path / "x.sqlite"
    await SqliteStore(path).close()
    connection = sqlite3.connect(path)
    connection.executescript("ALTER TABLE calls DROP COLUMN context; PRAGMA user_version = 1")
    connection.close()
    store = SqliteStore(path)
    await enqueue(store, "r")
    await store.lease("w", 1, 60)
    await store.add_call(new_call("first", context="rendered"))
    rollout = await store.rollout("r")
    assert rollout is not None and [call.context for call in rollout.calls] == ["rendered"]
    await store.close()


async def test_a_file_of_a_newer_agl_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "x.sqlite"
    await SqliteStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="schema 99"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    path = tmp_path / "x.sqlite"
    path.write_text("these are my notes, not a database; please keep them" * 20)
    with pytest.raises(UsageError, match="not a database"):
        SqliteStore(path)
    assert "my notes" in path.read_text()


async def test_commits_wait_for_the_disk(store: SqliteStore):
    def modes(connection: sqlite3.Connection) -> tuple[str, int]:
        return (
            connection.execute("PRAGMA journal_mode").fetchone()[0],
            connection.execute("PRAGMA synchronous").fetchone()[0],
        )

    assert (await store.writer.run(modes)) == ("wal", 2)


async def test_what_is_withdrawn_waits_for_its_trainer_and_costs_no_attempt(store: SqliteStore):
    await enqueue(store, "mine", "ended", batch="run1.batch", max_attempts=1)
    await enqueue(store, "other", batch="run2.batch")
    await store.lease("w", 2, 60)
    await finish(store, "ended")
    assert await store.withdraw("run1.") == [("mine", 1)]
    for write in (store.finish("mine", 1, "ok", None, None), store.heartbeat("mine", 1, 60)):
        with pytest.raises(StaleAttempt, match=r"attempt 1 of rollout 'mine' has ended; the rollout is withdrawn"):
            await write
    assert [rollout.id for rollout, _ in await store.lease("w", 9, 60)] == ["other"]
    await enqueue(store, "mine", "ended", batch="run1.batch")
    assert [(rollout.id, attempt) for rollout, attempt in await store.lease("w", 9, 60)] == [("mine", 2)]
    await finish(store, "mine", 2, "agent_error")
    _, rollouts = await store.finished("run1.batch", 0, 9)
    assert [(rollout.id, rollout.outcome) for rollout in rollouts] == [("ended", "ok"), ("mine", "agent_error")]

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.errors import RewardError
from text_to_sql.database import Result
from text_to_sql.reward import execution_match, same_result, score

GOLD = "SELECT name, city FROM shop"


@pytest.mark.needs_data
def test_every_verdict_equals_the_official_one(spider: Path) -> None:
    lines = [json.loads(line) for line in (spider / "exec_match_oracle.jsonl").read_text().splitlines()]
    assert len(lines) == 3_231
    wrong = [
        (line["pred"], line["gold"])
        for line in lines
        for key, keep_distinct in (("exec_match", False), ("exec_match_keep_distinct", True))
        if execution_match(
            line["pred"], line["gold"], spider / "database" / f"{line['db_id']}.sqlite", keep_distinct=keep_distinct
        )
        # The official program crashes on an empty prediction: null, for us 0.
        != bool(line[key])
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("prediction", "gold", "match"),
    [
        ("SELECT city, name FROM shop", GOLD, True),
        ("SELECT name, city FROM shop ORDER BY id DESC", GOLD, True),
        ("SELECT name, city FROM shop ORDER BY id DESC", f"{GOLD} ORDER BY id", False),
        ("SELECT name, name FROM shop", GOLD, False),
        ("SELECT name, city, id FROM shop", GOLD, False),
        ("SELECT name, city FROM shop LIMIT 3", GOLD, False),
        ("SELECT name, city FROM shop UNION ALL SELECT 'x', 'y'", GOLD, False),
        ("SELECT city FROM shop", "SELECT DISTINCT city FROM shop", True),
        ("SELECT count(*) + 0.0 FROM shop", "SELECT count(*) FROM shop", True),
        ("SELECT '4'", "SELECT count(*) FROM shop", False),
        ("SELECT NULL", "SELECT name FROM shop WHERE id = 4", True),
        ("SELECT name FROM shop WHERE id > = 4", "SELECT name FROM shop WHERE id = 4", True),
        ("SELECT YEAR(CURDATE()) - 2019", "SELECT 1", True),
        ("SELECT 'caf'", "SELECT text FROM note", True),
        ("SELECT 1 FROM shop WHERE 0", "SELECT name, city FROM shop WHERE id > 9", True),
        (f"{GOLD}; SELECT 1", GOLD, True),
        (f"```sql\n{GOLD}\n```", GOLD, False),
        ("SELECT nme FROM shop", GOLD, False),
        ("DELETE FROM shop", GOLD, False),
    ],
)
def test_the_rule_in_small_cases(prediction: str, gold: str, match: bool, shop: Path) -> None:
    assert execution_match(prediction, gold, shop) is match


@pytest.mark.parametrize("prediction", ["", "  \n", ";", "-- nothing", "/* nothing */", "DELETE FROM shop", "BEGIN"])
def test_what_is_no_query_earns_nothing_even_when_the_gold_result_is_empty(prediction: str, shop: Path) -> None:
    assert score(prediction, "SELECT name FROM shop WHERE 0", shop) == {"match": 0, "executable": 0}


def test_running_earns_a_little_and_matching_earns_more(shop: Path) -> None:
    assert score("SELECT city, name FROM shop", GOLD, shop) == {"match": 1.0, "executable": 0.1}
    assert score("SELECT id FROM sale", GOLD, shop) == {"match": 0.0, "executable": 0.1}
    assert score("SELECT nme FROM shop", GOLD, shop) == {"match": 0.0, "executable": 0.0}


def test_a_query_that_reads_no_table_earns_nothing_for_running(shop: Path) -> None:
    assert score("SELECT 1", GOLD, shop) == {"match": 0.0, "executable": 0.0}


def test_a_gold_query_that_fails_is_no_fault_of_the_agent(shop: Path) -> None:
    with pytest.raises(RewardError, match="no such table: nowhere"):
        execution_match("SELECT 1", "SELECT * FROM nowhere", shop)


values = st.sampled_from([None, 0, 1, 2, "a", "b"])
table = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[values] * width), min_size=1, max_size=5))


@settings(max_examples=300)
@given(table, st.randoms(use_true_random=False), st.booleans())
def test_columns_and_rows_may_come_in_any_order(rows: list[tuple], random, ordered: bool) -> None:
    order = random.sample(range(len(rows[0])), len(rows[0]))
    moved = [tuple(row[index] for index in order) for row in rows]
    if not ordered:
        random.shuffle(moved)
    assert same_result(Result(rows=tuple(rows)), Result(rows=tuple(moved)), ordered=ordered)


@settings(max_examples=300)
@given(table, table, st.booleans())
def test_the_verdict_is_that_of_trying_every_order_of_columns(
    rows: list[tuple], other: list[tuple], ordered: bool
) -> None:
    width = len(rows[0])
    orders = itertools.permutations(range(width)) if width == len(other[0]) else ()
    moved = ([tuple(row[index] for index in order) for row in other] for order in orders)
    expected = any(rows == one if ordered else Counter(rows) == Counter(one) for one in moved)
    assert same_result(Result(rows=tuple(rows)), Result(rows=tuple(other)), ordered=ordered) is expected

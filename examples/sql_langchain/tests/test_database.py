import hashlib
import time
from pathlib import Path

import pytest

from agl.errors import UsageError
from text_to_sql.database import execute


def doubling(table: str) -> str:
    """A query on the last of 25 WITH tables, each written after the template."""
    tables = ", ".join(table.format(n=n, m=n - 1) for n in range(1, 25))
    return f"WITH c0 AS (SELECT 1 AS x), {tables} SELECT * FROM c24"


REFUSED = [
    # Writes.
    "INSERT INTO shop VALUES (9, 'x', 'y')",
    "INSERT INTO shop DEFAULT VALUES",
    "INSERT INTO shop SELECT * FROM shop",
    "INSERT OR REPLACE INTO shop VALUES (1, 'x', 'y')",
    "REPLACE INTO shop VALUES (1, 'x', 'y')",
    "INSERT INTO shop VALUES (1, 'x', 'y') ON CONFLICT(id) DO UPDATE SET name = 'z'",
    "INSERT INTO shop VALUES (9, 'x', 'y') RETURNING *",
    "UPDATE shop SET name = 'x'",
    "UPDATE shop SET name = 'x' WHERE 0",
    "UPDATE shop SET name = 'x' RETURNING name",
    "DELETE FROM shop",
    "DELETE FROM shop WHERE 0",
    "DELETE FROM shop RETURNING *",
    "WITH gone AS (SELECT 1) DELETE FROM shop",
    "WITH gone AS (SELECT 1) UPDATE shop SET name = 'x'",
    "WITH gone AS (SELECT 1) INSERT INTO shop SELECT 9, 'x', 'y' FROM gone",
    "WITH gone AS (DELETE FROM shop RETURNING *) SELECT * FROM gone",
    "DELETE FROM sqlite_master",
    "UPDATE sqlite_master SET sql = ''",
    "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 2, 'CREATE TABLE x(y)')",
    "UPDATE sqlite_sequence SET seq = 0",
    # Definitions.
    "CREATE TABLE t(x)",
    "CREATE TABLE t AS SELECT * FROM shop",
    "CREATE TEMP TABLE t(x)",
    "CREATE TEMP TABLE t AS SELECT * FROM shop",
    "CREATE TABLE IF NOT EXISTS shop(x)",
    "CREATE VIEW v AS SELECT * FROM shop",
    "CREATE TEMP VIEW v AS SELECT * FROM shop",
    "CREATE INDEX i ON shop(name)",
    "CREATE UNIQUE INDEX i ON shop(name)",
    "CREATE TRIGGER t AFTER INSERT ON shop BEGIN DELETE FROM sale; END",
    "CREATE TEMP TRIGGER t AFTER INSERT ON shop BEGIN DELETE FROM sale; END",
    "CREATE VIRTUAL TABLE t USING fts5(x)",
    "CREATE VIRTUAL TABLE t USING rtree(a, b, c)",
    "CREATE VIRTUAL TABLE temp.t USING dbstat",
    "ALTER TABLE shop RENAME TO shops",
    "ALTER TABLE shop ADD COLUMN extra",
    "ALTER TABLE shop DROP COLUMN city",
    "ALTER TABLE shop RENAME COLUMN city TO town",
    "DROP TABLE shop",
    "DROP TABLE IF EXISTS shop",
    "DROP TABLE sqlite_master",
    "DROP INDEX IF EXISTS sqlite_autoindex_shop_1",
    "ANALYZE",
    "ANALYZE shop",
    "REINDEX",
    "VACUUM",
    "VACUUM INTO '/tmp/agl-hostile-copy.sqlite'",
    # Other files.
    "ATTACH DATABASE '/tmp/agl-hostile.sqlite' AS other",
    "ATTACH ':memory:' AS other",
    "ATTACH 'file:/etc/passwd?mode=ro' AS other",
    "ATTACH DATABASE '' AS other",
    "ATTACH (SELECT name FROM shop LIMIT 1) AS other",
    "DETACH DATABASE main",
    "SELECT load_extension('/tmp/evil.so')",
    "SELECT load_extension('libc.so.6', 'system')",
    "SELECT readfile('/etc/passwd')",
    "SELECT writefile('/tmp/agl-hostile', 'x')",
    "SELECT edit('x')",
    "SELECT * FROM fsdir('/')",
    "SELECT * FROM other.shop",
    # Settings.
    "PRAGMA journal_mode = DELETE",
    "PRAGMA journal_mode",
    "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA user_version = 7",
    "PRAGMA temp_store_directory = '/tmp'",
    "PRAGMA hard_heap_limit = 1",
    "PRAGMA mmap_size = 1000000000000",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA optimize",
    "PRAGMA integrity_check",
    "PRAGMA database_list",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('shop')",
    "SELECT * FROM pragma_integrity_check",
    "SELECT * FROM pragma_function_list",
    # Transactions.
    "BEGIN",
    "BEGIN EXCLUSIVE",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT s",
    "RELEASE s",
    # Several statements, and none that could be prepared.
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE shop",
    "SELECT 1; PRAGMA user_version = 7",
    "SELECT 1;;SELECT 2",
    "SELECT 1 -- \n; DELETE FROM shop",
    "SELECT 1 /* ; */; DELETE FROM shop",
    "SELECT name FROM shop WHERE name = ''; DELETE FROM shop; --'",
    "SELECT 1\0; DROP TABLE shop",
    "SELECT '\0'",
    "\0",
    "SELECT '\ud800'",
    "SELECT ?",
    "SELECT :name",
    "SELECT 'open",
    "SELECT (((",
    "hello",
    "",
    ";",
    "-- nothing",
    "EXPLAIN DELETE FROM shop",
    # Big values.
    "SELECT randomblob(1000000000)",
    "SELECT zeroblob(1000000000)",
    "SELECT hex(zeroblob(100000000))",
    "SELECT length(zeroblob(2147483647))",
    "SELECT printf('%1000000000d', 1)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT format('%2000000000s', 'x')",
    "SELECT trim('x', 'y')",
    "SELECT replace(replace(replace('aaaaaaaaaa', 'a', 'bbbbbbbbbb'), 'b', 'cccccccccc'), 'c', '" + "d" * 99 + "')",
    "WITH t(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM t) SELECT max(length(x)) FROM t",
    "WITH t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t LIMIT 50000) SELECT group_concat(x) FROM t",
    "SELECT char(1, 2, 3)",
    "SELECT json_group_array(name) FROM shop",
    "SELECT json('[' || printf('%5000s', '[') || ']')",
    "SELECT quote(zeroblob(1000000))",
    # Tables that double at each step while SQLite prepares the query, however the name is written.
    doubling("c{n} AS (SELECT p.x FROM c{m} p, c{m} q)"),
    doubling("c{n} AS (SELECT x FROM c{m} UNION ALL SELECT x FROM C{m})"),
    doubling("c{n}(x) AS MATERIALIZED (SELECT p.x FROM c{m} p, c{m} q)"),
    doubling('[c{n}] AS NOT MATERIALIZED (SELECT p.x FROM "C{m}" p, `c{m}` q)'),
    doubling("'c{n}' /* as */ AS -- (\n (SELECT p.x FROM c{m} p, c{m} q)"),
    # Big statements.
    "SELECT " + "1+" * 20_000 + "1",
    "SELECT " + "(" * 4_000 + "1" + ")" * 4_000,
    "SELECT " + "NOT " * 2_000 + "1",
    "SELECT " + "-" * 1 + " -" * 3_000 + "1",
    "SELECT " + ", ".join("1" for _ in range(2_000)),
    " UNION ALL ".join("SELECT 1" for _ in range(400)),
    "SELECT 1 FROM " + ", ".join(f"shop s{i}" for i in range(80)),
    "SELECT '" + "x" * 100_000 + "'",
    "SELECT name LIKE '" + "%a" * 500 + "' FROM shop",
    # Random functions that tell about the machine.
    "SELECT sqlite_compileoption_get(0)",
    "SELECT sqlite_version()",
    "SELECT last_insert_rowid(), changes()",
    "SELECT fts3_tokenizer('simple')",
]

LONG = "replace(replace('" + "a" * 20 + "', 'a', '" + "b" * 100 + "'), 'bb', '" + "a" * 18 + "')"
"""An expression that makes a text of 18,000 letters."""
COUNTING = "WITH t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t)"
"""A table that never ends."""
SALES = ", ".join(f"sale s{i}" for i in range(40))

BOMBS = {
    "endless recursion": f"{COUNTING} SELECT count(*) FROM t",
    "endless recursion without repeats": "WITH t(x) AS (SELECT 1 UNION SELECT x + 1 FROM t) SELECT max(x) FROM t",
    "recursion that sorts": "WITH t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t ORDER BY 1 DESC) "
    "SELECT sum(x) FROM t",
    "recursion of long texts": f"{COUNTING} SELECT count(DISTINCT {LONG} || x) FROM t",
    "growing text": "WITH t(x) AS (SELECT 'ab' UNION ALL SELECT substr(x || x, 1, 9000) FROM t) "
    "SELECT sum(length(x)) FROM t",
    "cartesian product": f"SELECT count(*) FROM {SALES}",
    "cartesian product that sorts": f"SELECT s1.price FROM {SALES} ORDER BY random()",
    "cartesian product that groups": f"SELECT s0.id + s1.id * s2.id, count(*) FROM {SALES} GROUP BY 1",
    "no row ever": f"SELECT 1 FROM {SALES} WHERE s0.price + s39.price < 0",
    "subqueries per row": "SELECT (SELECT count(*) FROM sale a, sale b, sale c, sale d, sale e, sale f, sale g, "
    f"sale h, sale i, sale j WHERE a.id < s0.id + j.id) FROM {SALES}",
    "replace on long texts": f"{COUNTING} "
    f"SELECT sum(length(replace({LONG} || x, substr({LONG}, 1, 9000) || 'b', ''))) FROM t",
    "search in long texts": f"{COUNTING} SELECT sum(instr({LONG} || x, substr({LONG}, 1, 9000) || 'b')) FROM t",
    "wildcards on long texts": f"{COUNTING} SELECT sum({LONG} || x LIKE '{'%a_' * 60}b') FROM t",
    "globs on long texts": f"{COUNTING} SELECT sum({LONG} || x GLOB '{'*a?[a-z]' * 20}b') FROM t",
    "windows over everything": f"{COUNTING}, n AS (SELECT x FROM t LIMIT 1000000) SELECT sum(x) OVER (ORDER BY x "
    "ROWS BETWEEN 900 PRECEDING AND 900 FOLLOWING), rank() OVER (ORDER BY -x) FROM n",
}


@pytest.fixture
def unharmed(shop: Path):
    """The database, whose file and folder must be the same afterwards."""
    before = hashlib.sha256(shop.read_bytes()).digest(), sorted(shop.parent.iterdir())
    yield shop
    assert (hashlib.sha256(shop.read_bytes()).digest(), sorted(shop.parent.iterdir())) == before


@pytest.mark.parametrize("sql", REFUSED, ids=lambda sql: repr(sql[:60]))
def test_a_statement_that_is_no_plain_bounded_select_is_refused_at_once(sql: str, unharmed: Path) -> None:
    started = time.monotonic()
    result = execute(unharmed, sql)
    assert result.error and not result.rows
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("sql", BOMBS.values(), ids=BOMBS)
def test_a_query_that_would_never_end_is_stopped(sql: str, unharmed: Path) -> None:
    started = time.monotonic()
    result = execute(unharmed, sql, seconds=0.3)
    assert result.error == "stopped after 0.3 s; write a cheaper query"
    assert 0.3 <= time.monotonic() - started < 0.8


def test_the_usual_limit_is_two_seconds(unharmed: Path) -> None:
    started = time.monotonic()
    assert "2 s" in str(execute(unharmed, BOMBS["cartesian product"]).error)
    assert 2 <= time.monotonic() - started < 2.5


def test_a_select_gives_its_columns_rows_and_tables(shop: Path) -> None:
    result = execute(shop, "SELECT city, count(*) n FROM Shop JOIN sale ON shop_id = shop.id GROUP BY city ORDER BY n")
    assert result.error is None and not result.truncated
    assert (result.columns, result.rows) == (("city", "n"), (("Oslo", 1), ("Rome", 3)))
    assert result.tables == {"shop", "sale"}


def test_a_constant_reads_no_table(shop: Path) -> None:
    assert execute(shop, "SELECT 1").tables == frozenset()
    assert execute(shop, "SELECT name FROM sqlite_master").tables == frozenset()
    assert execute(shop, "SELECT count(*) FROM sale").tables == {"sale"}


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name FROM shop WHERE city LIKE 'r%' AND id BETWEEN 1 AND 3",
        "SELECT max(price), min(price), avg(price), sum(price), round(total(price), 1) FROM sale",
        "SELECT city FROM shop EXCEPT SELECT city FROM shop WHERE name = 'Berry'",
        "SELECT name FROM shop WHERE id IN (SELECT shop_id FROM sale GROUP BY shop_id HAVING count(*) > 1)",
        "WITH rich AS (SELECT shop_id FROM sale WHERE price > 3) SELECT name FROM shop, rich WHERE id = shop_id",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5) SELECT x FROM n",
        "SELECT id, rank() OVER (ORDER BY price DESC) FROM sale",
        "SELECT CASE WHEN city = 'Rome' THEN upper(name) ELSE coalesce(name, '?') END FROM shop",
        "SELECT strftime('%Y', '2020-01-01'), substr(name, 1, 2), length(name) FROM shop",
        "SELECT DISTINCT city FROM shop;",
        "VALUES (1, 2)",
    ],
)
def test_ordinary_queries_run(sql: str, shop: Path) -> None:
    result = execute(shop, sql)
    assert result.error is None and result.rows


def test_an_error_tells_its_author_what_to_mend(shop: Path) -> None:
    assert execute(shop, "SELECT nme FROM shop").describe() == "Error: no such column: nme"
    assert execute(shop, "SELECT * FROM shops").describe() == "Error: no such table: shops"
    assert execute(shop, "DROP TABLE shop").describe() == (
        "Error: only a SELECT on the tables of this database is allowed"
    )
    assert execute(shop, "SELECT randomblob(9)").describe() == "Error: the function randomblob is not available here"


def test_rows_are_capped_by_number_and_by_size(shop: Path) -> None:
    many = f"WITH n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x, '{'x' * 1_000}' FROM n"
    by_number = execute(shop, many, max_rows=10)
    assert (len(by_number.rows), by_number.truncated, by_number.error) == (10, True, None)
    by_size = execute(shop, many, max_characters=50_000)
    assert (len(by_size.rows), by_size.truncated) == (50, True)
    exact = execute(shop, "SELECT id FROM shop", max_rows=4)
    assert (len(exact.rows), exact.truncated) == (4, False)


def test_a_result_is_described_in_a_few_words(shop: Path) -> None:
    two = execute(shop, "SELECT name, city FROM shop").describe(rows=2)
    assert two == "4 rows (name, city)\nApple | Rome\nBerry | Oslo"
    assert execute(shop, "SELECT name FROM shop", max_rows=2).describe(rows=1) == "2+ rows (name)\nApple"
    assert execute(shop, "SELECT name FROM shop WHERE 0").describe() == "no rows"
    assert len(execute(shop, f"SELECT '{'x' * 5_000}'").describe()) == 240


def test_bytes_that_are_not_utf8_are_left_out(shop: Path) -> None:
    assert execute(shop, "SELECT text FROM note").rows == (("caf",),)


def test_a_missing_database_is_the_users_error_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.sqlite"):
        execute(tmp_path / "none.sqlite", "SELECT 1")
    assert not list(tmp_path.iterdir())

import pytest

from text_to_sql.sqltext import expansions, find_query, first_statement, tidy, tokens, without_distinct


@pytest.mark.parametrize(
    ("answer", "query"),
    [
        ("SELECT a FROM t", "SELECT a FROM t"),
        ("  SELECT a FROM t ; \n", "SELECT a FROM t"),
        ("```sql\nSELECT a\nFROM t;\n```\nThis counts.", "SELECT a\nFROM t"),
        ("Sure! Here it is:\n```\nselect 1 from t\n```", "select 1 from t"),
        ("```sqlite\nSELECT a FROM t", "SELECT a FROM t"),
        ("SQL: SELECT a FROM t; SELECT b FROM t", "SELECT a FROM t"),
        ("SELECT a FROM t\n\nThe query selects a.", "SELECT a FROM t"),
        ("SELECT a FROM t WHERE b = ';' AND c = 1; done", "SELECT a FROM t WHERE b = ';' AND c = 1"),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "WITH x AS (SELECT 1) SELECT * FROM x"),
        ("I do not know.", ""),
        ("selecting things", ""),
        ("", ""),
    ],
)
def test_the_query_is_found_in_an_answer(answer: str, query: str) -> None:
    assert find_query(answer) == query


def test_only_the_first_statement_and_no_distinct_outside_quotes_is_kept() -> None:
    assert first_statement("SELECT ';' -- ;\n, 1; SELECT 2") == "SELECT ';' -- ;\n, 1;"
    assert without_distinct("SELECT DISTINCT a, count(distinct b), 'distinct', \"distinct\" FROM distinction") == (
        "SELECT  a, count( b), 'distinct', \"distinct\" FROM distinction"
    )


@pytest.mark.parametrize(
    "text", ["SELECT 'it''s', \"a\"\"b\", [c d], `e` /* f */ -- g\nFROM t;", "'open", "/* open", "é→$\0"]
)
def test_tokens_joined_give_the_text_back(text: str) -> None:
    assert "".join(token for _, token in tokens(text)) == text


@pytest.mark.parametrize(
    ("query", "tidied"),
    [
        ("select count ( * )  from  t ;", "SELECT count(*) FROM t"),
        ("SELECT a ,  b FROM t WHERE a  >  = 3.5", "SELECT a, b FROM t WHERE a > = 3.5"),
        ("SELECT a FROM t WHERE a > = 3", "SELECT a FROM t WHERE a >= 3"),
        ('SELECT T1.a FROM t AS T1 WHERE b = "x  ,  y"', 'SELECT T1.a FROM t AS T1 WHERE b = "x  ,  y"'),
        ("SELECT MAX(a) FROM t WHERE a IN (SELECT b FROM u)", "SELECT max(a) FROM t WHERE a IN (SELECT b FROM u)"),
    ],
)
def test_a_query_is_tidied_into_one_style(query: str, tidied: str) -> None:
    assert tidy(query) == tidied


def test_copies_of_with_tables_are_bounded_however_names_are_quoted() -> None:
    assert expansions("SELECT a FROM t") == 1
    assert expansions("WITH x AS (SELECT 1) SELECT * FROM x") == 1
    assert expansions("WITH x AS (SELECT 1), y(a) AS (SELECT * FROM x, X) SELECT * FROM y, [y], 'y'") == 6

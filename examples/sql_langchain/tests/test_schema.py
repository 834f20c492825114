import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from text_to_sql.schema import schema_text

WHOLE = "shop(id, name, city)\nsale(id, shop_id, price)\nnote(text)\nsale.shop_id = shop.id"


def test_a_database_that_fits_is_described_whole(shop: Path) -> None:
    assert schema_text(shop, "anything") == WHOLE


@pytest.mark.parametrize(
    ("question", "tables"),
    [
        ("How many notes are there?", ["note"]),
        ("What is the average price of a sale?", ["sale"]),
        ("In which city is the shop named Apple?", ["shop"]),
    ],
)
def test_a_database_that_does_not_fit_is_trimmed_to_what_the_question_names(
    question: str, tables: list[str], shop: Path
) -> None:
    text = schema_text(shop, question, characters=28)
    assert [line.split("(")[0] for line in text.splitlines()] == tables


@pytest.mark.parametrize("characters", [30, 60, len(WHOLE), 200])
def test_the_budget_is_kept(characters: int, shop: Path) -> None:
    assert len(schema_text(shop, "Which sale?", characters=characters)) <= characters


def test_a_table_wider_than_the_budget_keeps_its_first_columns(tmp_path: Path) -> None:
    path = tmp_path / "wide.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE wide(" + ", ".join(f"column_{i}" for i in range(100)) + ")")
    assert schema_text(path, "", characters=30) == "wide(column_0, column_1)"

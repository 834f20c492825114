import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agl.errors import UsageError
from agl_trainer import Played
from text_to_sql.data import curriculum, database_path, load
from text_to_sql.demonstrate import MISTAKES, demonstrate, is_mistake, mistake
from text_to_sql.reward import execution_match
from text_to_sql.sqltext import tidy


@pytest.fixture
def official(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like the official Spider release, with one database."""
    folder = tmp_path / "spider"
    (folder / "database" / "shop").mkdir(parents=True)
    (folder / "database" / "shop" / "shop.sqlite").write_bytes(shop.read_bytes())
    questions = [
        {"db_id": "shop", "question": f"Shops with an id above {i}?", "query": f"SELECT name FROM shop WHERE id > {i}"}
        for i in range(400)
    ]
    (folder / "train_spider.json").write_text(json.dumps(questions))
    (folder / "dev.json").write_text(json.dumps(questions[:3]))
    monkeypatch.setenv("AGL_SPIDER_DIR", str(folder))
    return folder


@pytest.mark.needs_data
def test_the_prepared_splits_are_whole_and_share_no_database(spider: Path) -> None:
    train, small, val = load("train"), load("train_small"), load("val")
    assert (len(train), len(small), len(val)) == (6_087, 320, 402)
    assert not {task["db_id"] for task in train} & {task["db_id"] for task in val}
    assert {task["id"] for task in small} <= {task["id"] for task in train}
    assert all(database_path(task["db_id"]).is_file() for task in train + val)


def test_an_official_folder_is_read_as_it_is(official: Path) -> None:
    assert load("val")[1] == {
        "id": "spider-dev-1",
        "db_id": "shop",
        "question": "Shops with an id above 1?",
        "query": "SELECT name FROM shop WHERE id > 1",
    }
    assert len(load("train")) == 400
    small = load("train_small")
    assert len({task["id"] for task in small}) == 320 and small == load("train_small")
    assert database_path("shop").parent == official / "database" / "shop"


def test_questions_missing_in_the_folder_come_from_the_hub(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (official / "dev.json").unlink()
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, *, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        return [{"db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM shop", "query_toks": "..."}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load("val") == [
        {"id": "spider-dev-0", "db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM shop"}
    ]
    assert asked == [("xlangai/spider", "validation")]


def test_without_the_datasets_library_the_error_tells_what_to_do(
    official: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (official / "dev.json").unlink()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install datasets, or put dev\.json into AGL_SPIDER_DIR"):
        load("val")


@pytest.mark.parametrize("variable", ["AGL_SPIDER_DIR", "AGL_DATA"])
def test_without_data_the_error_tells_both_ways(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_SPIDER_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(UsageError, match=r"AGL_DATA .* AGL_SPIDER_DIR") as problem:
        load("train")
    assert "xlangai/spider" in str(problem.value)


def test_a_database_that_is_missing_is_named(official: Path) -> None:
    with pytest.raises(UsageError, match="no database 'nowhere'"):
        database_path("nowhere")


def test_a_misspelt_split_is_refused() -> None:
    with pytest.raises(UsageError, match="'train', 'train_small' or 'val'"):
        load("vall")  # type: ignore[arg-type]


def test_the_curriculum_keeps_plain_queries_on_small_databases(official: Path) -> None:
    def task(query: str) -> dict[str, str]:
        return {"id": query, "db_id": "shop", "question": "?", "query": query}

    plain, joined = task("SELECT 'join select'"), task("SELECT 1 FROM shop JOIN sale ON shop.id = shop_id")
    nested = task("SELECT 1 FROM shop WHERE id IN (SELECT shop_id FROM sale)")
    assert curriculum([plain, joined, nested]) == [plain]
    assert curriculum([plain, joined, nested], joins=1) == [plain, joined]
    assert curriculum([plain, joined, nested], schema_characters=50) == []


@pytest.mark.needs_data
def test_the_teacher_is_right_where_it_means_to_be(spider: Path) -> None:
    tasks = load("train_small")
    for task in tasks:
        database = database_path(task["db_id"])
        assert execution_match(demonstrate(task, "rewriter", ""), task["query"], database)
        shown = demonstrate(task, "writer", "")
        assert isinstance(shown, Played) is is_mistake(task)  # mistakes are played, never learned
        assert execution_match(shown, task["query"], database) is not is_mistake(task)
        assert shown == demonstrate(task, "writer", "another prompt")
    assert abs(sum(map(is_mistake, tasks)) / len(tasks) - MISTAKES) < 0.05


def test_the_checker_is_taught_the_truth_about_the_query_in_its_prompt(official: Path) -> None:
    task = load("val")[1]
    prompt = "...\n\nQuestion: ?\n\nQuery: {}\nResult: 1 row\n\nDoes the query ..."
    assert demonstrate(task, "checker", prompt.format(task["query"])) == "CORRECT"
    assert demonstrate(task, "checker", prompt.format("SELECT name\nFROM shop WHERE id = 1")) == "WRONG"
    assert demonstrate(task, "checker", prompt.format(mistake(task))) == "WRONG"
    with pytest.raises(UsageError, match="holds no query"):
        demonstrate(task, "checker", "Is it?")
    with pytest.raises(UsageError, match="'judge'"):
        demonstrate(task, "judge", "")


@pytest.mark.needs_data
def test_tidying_changes_no_gold_result(spider: Path) -> None:
    tasks = [*load("train")[::5], *load("val")]
    assert not [
        task["query"]
        for task in tasks
        if not execution_match(tidy(task["query"]), task["query"], database_path(task["db_id"]), keep_distinct=True)
    ]

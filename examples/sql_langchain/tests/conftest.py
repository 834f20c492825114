"""Fixtures: the example on the import path, a small database, the shared Spider data."""

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture
def spider(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepared Spider folder, which the example reads in this test."""
    monkeypatch.delenv("AGL_SPIDER_DIR", raising=False)
    monkeypatch.setenv("AGL_DATA", str(data_dir))
    return data_dir / "sql"


@pytest.fixture(scope="session")
def built_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of three tables, with text that is not UTF-8 in it."""
    path = tmp_path_factory.mktemp("shop") / "shop & co.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("""
            CREATE TABLE shop(id INTEGER PRIMARY KEY, name TEXT, city TEXT);
            CREATE TABLE sale(id INTEGER PRIMARY KEY, shop_id INTEGER REFERENCES shop(id), price REAL);
            INSERT INTO shop VALUES (1, 'Apple', 'Rome'), (2, 'Berry', 'Oslo'), (3, 'Cherry', 'Rome'), (4, NULL, 'Bo');
            INSERT INTO sale VALUES (1, 1, 3.5), (2, 1, 1.0), (3, 2, 2.0), (4, 3, 2.0);
            CREATE TABLE note(text TEXT);
            INSERT INTO note VALUES (CAST(x'636166e9' AS TEXT));
        """)
    return path


@pytest.fixture
def shop(built_shop: Path, tmp_path: Path) -> Path:
    """A copy of its own for each test."""
    return Path(shutil.copy(built_shop, tmp_path))

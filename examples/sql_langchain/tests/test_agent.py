import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import agl
from agl.scope import RolloutScope, rollout
from agl.selection import Selection
from agl.testing import ModelServer
from text_to_sql import demonstrate as teacher
from text_to_sql.agent import answer
from text_to_sql.demonstrate import demonstrate

RIGHT = "SELECT name FROM shop WHERE city = 'Rome'"
WRONG = "SELECT name FROM shop WHERE city = 'Oslo'"
BROKEN = "SELECT nme FROM shop"
TASK = {"id": "one", "db_id": "shop", "question": "Which shops are in Rome?", "query": RIGHT}
MATCH, RUNS, NOTHING = (
    {"match": 1.0, "executable": 0.1},
    {"match": 0.0, "executable": 0.1},
    {"match": 0.0, "executable": 0.0},
)

Teacher = Callable[[str, str], str]
Play = Callable[[Teacher | Mapping[str, str]], tuple[dict[str, float], list[str], dict[str, str]]]


@pytest.fixture
def play(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Run the agent against answers by agent; gives its score, who was asked in which order, and each prompt."""
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    shutil.copy(shop, folder / "shop.sqlite")
    monkeypatch.setenv("AGL_SPIDER_DIR", str(tmp_path / "spider"))

    def run(answers: Teacher | Mapping[str, str]) -> tuple[dict[str, float], list[str], dict[str, str]]:
        prompts: dict[str, str] = {}

        def reply(prompt: str, labels: Mapping[str, str]) -> str:
            prompts[labels["agent"]] = prompt
            return answers(labels["agent"], prompt) if callable(answers) else answers[labels["agent"]]

        with ModelServer(reply) as server:
            llm = agl.LLM(f"{server.url}/v1", key="any")
            try:
                with rollout(RolloutScope("one", 1, Selection(None))):
                    score = answer(TASK, llm)
            finally:
                asyncio.run(llm.close())
            return score, [exchange.headers["x-agl-agent"] for exchange in server.exchanges], prompts

    yield run


def test_a_right_query_that_the_checker_accepts_is_the_answer(play: Play) -> None:
    score, asked, _ = play({"writer": f"```sql\n{RIGHT};\n```", "checker": "CORRECT"})
    assert (score, asked) == (MATCH, ["writer", "checker"])


def test_a_query_that_fails_goes_to_the_rewriter_without_a_check(play: Play) -> None:
    score, asked, prompts = play({"writer": BROKEN, "rewriter": RIGHT})
    assert (score, asked) == (MATCH, ["writer", "rewriter"])
    assert f"Query: {BROKEN}\nResult: Error: no such column: nme\n" in prompts["rewriter"]


def test_a_query_that_the_checker_finds_wrong_goes_to_the_rewriter(play: Play) -> None:
    score, asked, prompts = play({"writer": WRONG, "checker": "wrong.", "rewriter": RIGHT})
    assert (score, asked) == (MATCH, ["writer", "checker", "rewriter"])
    assert f"Query: {WRONG}\nResult: 1 row (name)\nBerry\n" in prompts["checker"]


def test_a_query_is_rewritten_once_and_then_stands(play: Play) -> None:
    assert play({"writer": BROKEN, "rewriter": BROKEN})[:2] == (NOTHING, ["writer", "rewriter"])
    assert play({"writer": WRONG, "checker": "WRONG", "rewriter": WRONG})[:2] == (
        RUNS,
        ["writer", "checker", "rewriter"],
    )


def test_a_checker_that_talks_lets_the_query_pass(play: Play) -> None:
    assert play({"writer": WRONG, "checker": "Well, I"})[:2] == (RUNS, ["writer", "checker"])


def test_an_answer_without_sql_goes_to_the_rewriter(play: Play) -> None:
    score, asked, prompts = play({"writer": "I cannot say.", "rewriter": RIGHT})
    assert (score, asked) == (MATCH, ["writer", "rewriter"])
    assert "Query: \nResult: Error: this is no query; write a SELECT" in prompts["rewriter"]


def test_the_prompts_share_everything_up_to_the_question(play: Play) -> None:
    _, _, prompts = play({"writer": WRONG, "checker": "WRONG", "rewriter": RIGHT})
    shared = (
        "shop(id, name, city)\nsale(id, shop_id, price)\nnote(text)\nsale.shop_id = shop.id\n\nQuestion: Which shops"
    )
    beginnings = {prompt[: prompt.index(shared) + len(shared)] for prompt in prompts.values()}
    assert len(prompts) == 3 and len(beginnings) == 1


def test_the_agent_cannot_change_its_database(play: Play) -> None:
    destroy = "WITH gone AS (SELECT 1) DELETE FROM shop"
    score, _, prompts = play({"writer": destroy, "rewriter": destroy})
    assert score == NOTHING
    assert "Error: only a SELECT on the tables of this database is allowed" in prompts["rewriter"]
    assert play({"writer": RIGHT, "checker": "CORRECT"})[0] == MATCH


def test_with_the_teacher_the_agent_answers_right(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def teach(agent: str, prompt: str) -> str:
        return demonstrate(TASK, agent, prompt)

    monkeypatch.setattr(teacher, "MISTAKES", 0.0)
    assert play(teach)[:2] == (MATCH, ["writer", "checker"])
    # A mistake of the writer's is found, by its error or by the checker, and mended by the rewriter.
    monkeypatch.setattr(teacher, "MISTAKES", 1.0)
    score, asked, _ = play(teach)
    assert score == MATCH and asked[-1] == "rewriter"

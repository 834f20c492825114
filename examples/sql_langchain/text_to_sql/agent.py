"""The agent: writer, checker and rewriter, three roles on one model, as a LangGraph graph around a database.

```
writer ─► execute ─► checker ── CORRECT ─► end
           │   ▲        │
     error │   │        │ WRONG
           ▼   │        ▼
           rewriter ◄───┘            (one rewrite at most; after it the answer stands)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from agl_langchain import AglCallbackHandler
from text_to_sql.data import database_path
from text_to_sql.database import execute
from text_to_sql.reward import score
from text_to_sql.schema import schema_text
from text_to_sql.sqltext import find_query

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    import agl

SQL_TOKENS = 96
"""Longest answer of writer and rewriter; nine of ten gold queries of Spider have at most 69 tokens of SmolLM2."""
VERDICT_TOKENS = 8
"""Longest answer of the checker, whose CORRECT and WRONG are two tokens each."""
MAX_REWRITES = 1
"""How often a query is rewritten before the agent answers with what it has."""

SYSTEM = "You answer questions about a database with SQLite."
# All three begin alike, so that a backend which shares prefixes reads schema and question once.
TASK = "{schema}\n\nQuestion: {question}\n\n"
TRIED = "Query: {sql}\nResult: {result}\n\n"
WRITER = TASK + "Write one SQLite query."
CHECKER = TASK + TRIED + "Does the query answer the question? Say CORRECT or WRONG."
REWRITER = TASK + TRIED + "The query is wrong. Write a better one."


class State(TypedDict):
    """What the nodes hand on."""

    question: str
    schema: str
    sql: str
    """The latest query; the agent's answer in the end."""
    result: str
    """What it returned, or its error, in a few words."""
    failed: bool
    """Whether it ended in an error."""
    wrong: bool
    """What the checker said."""
    rewrites: int


def build_graph(
    writer: BaseChatModel, checker: BaseChatModel, rewriter: BaseChatModel, database: Path
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent for one database. Each role has its own chat model; they may all be the same one."""

    def role(prompt: str, chat: BaseChatModel) -> Any:
        return ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", prompt)]) | chat | StrOutputParser()

    write, check, rewrite = role(WRITER, writer), role(CHECKER, checker), role(REWRITER, rewriter)

    def write_query(state: State) -> dict[str, Any]:
        return {"sql": find_query(write.invoke(state)), "rewrites": 0}

    def run_query(state: State) -> dict[str, Any]:
        result = execute(database, state["sql"])
        return {"result": result.describe(), "failed": result.error is not None}

    def check_query(state: State) -> dict[str, Any]:
        return {"wrong": "WRONG" in check.invoke(state).upper()}

    def rewrite_query(state: State) -> dict[str, Any]:
        return {"sql": find_query(rewrite.invoke(state)), "rewrites": state["rewrites"] + 1}

    def after_execute(state: State) -> str:
        if state["rewrites"] == MAX_REWRITES:
            return END
        return "rewriter" if state["failed"] else "checker"

    def after_checker(state: State) -> str:
        return "rewriter" if state["wrong"] else END

    graph = StateGraph(State)
    graph.add_node("writer", write_query)
    graph.add_node("execute", run_query)
    graph.add_node("checker", check_query)
    graph.add_node("rewriter", rewrite_query)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "execute")
    graph.add_conditional_edges("execute", after_execute, ["checker", "rewriter", END])
    graph.add_conditional_edges("checker", after_checker, ["rewriter", END])
    graph.add_edge("rewriter", "execute")
    return graph.compile()


def answer(task: Mapping[str, Any], llm: agl.LLM) -> dict[str, float]:
    """Answer one question and score the answer: the function that agl trains and evaluates."""
    database = database_path(task["db_id"])
    model = llm.openai()
    graph = build_graph(
        writer=ChatOpenAI(**model, max_completion_tokens=SQL_TOKENS),
        checker=ChatOpenAI(**model, max_completion_tokens=VERDICT_TOKENS),
        rewriter=ChatOpenAI(**model, max_completion_tokens=SQL_TOKENS),
        database=database,
    )
    state = graph.invoke(
        {"question": task["question"], "schema": schema_text(database, task["question"])},
        config={"callbacks": [AglCallbackHandler()]},
    )
    return score(state["sql"], task["query"], database)

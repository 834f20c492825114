"""The demo's agent, in LangGraph's ordinary style: writer, execute, checker, rewriter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from agl import LLM
from agl_demo.world import SCHEMA, matches, run_query

ANSWER_TOKENS = 40
VERDICT_TOKENS = 4


Messages = list[tuple[str, str]]


def writer_messages(question: str) -> Messages:
    """What the writer is asked."""
    return [("system", f"Write SQL. {SCHEMA}"), ("user", question)]


def checker_messages(question: str, query: str) -> Messages:
    """What the checker is asked."""
    return [("system", "Is the SQL right? CORRECT or WRONG"), ("user", f"{question} {query}")]


def rewriter_messages(question: str, query: str, result: str) -> Messages:
    """What the rewriter is asked."""
    return [("system", f"Repair SQL. {SCHEMA}"), ("user", f"{question} {query} {result}")]


class State(TypedDict):
    """What the nodes pass on."""

    question: str
    query: str
    result: str
    failed: bool
    verdict: str
    rewritten: bool


def build_graph(llm: LLM, database: Path) -> Any:
    """Writer and rewriter answer with SQL; the checker says CORRECT or WRONG."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    model = llm.openai()
    chat = ChatOpenAI(**model, max_completion_tokens=ANSWER_TOKENS)
    judge = ChatOpenAI(**model, max_completion_tokens=VERDICT_TOKENS)

    async def writer(state: State) -> dict[str, Any]:
        answer = await chat.ainvoke(writer_messages(state["question"]))
        return {"query": str(answer.content)}

    def execute(state: State) -> dict[str, Any]:
        rows, error = run_query(database, state["query"])
        return {"result": error if rows is None else str(rows[:2]), "failed": rows is None}

    async def checker(state: State) -> dict[str, Any]:
        answer = await judge.ainvoke(checker_messages(state["question"], state["query"]))
        return {"verdict": str(answer.content)}

    async def rewriter(state: State) -> dict[str, Any]:
        answer = await chat.ainvoke(rewriter_messages(state["question"], state["query"], state["result"]))
        return {"query": str(answer.content), "rewritten": True}

    def after_execute(state: State) -> str:
        if state.get("rewritten"):
            return END
        return "rewriter" if state["failed"] else "checker"

    graph = StateGraph(State)
    for node in (writer, execute, checker, rewriter):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "execute")
    graph.add_conditional_edges("execute", after_execute, ["checker", "rewriter", END])
    graph.add_conditional_edges(
        "checker", lambda state: "rewriter" if state["verdict"].strip().upper().startswith("WRONG") else END
    )
    graph.add_edge("rewriter", "execute")
    return graph.compile()


async def answer(task: dict[str, Any], llm: LLM) -> float:
    """The agent: 1 when its final query returns what the right one returns from ``task["database"]``, else 0."""
    from agl_langchain import AglCallbackHandler

    database = Path(task["database"])
    graph = build_graph(llm, database)
    out = await graph.ainvoke({"question": task["question"]}, config={"callbacks": [AglCallbackHandler()]})
    return float(matches(database, out["query"], task["query"]))

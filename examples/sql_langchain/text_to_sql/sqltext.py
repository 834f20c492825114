"""SQL as text: find the query in a model's answer, take it apart into tokens, tidy it."""

from __future__ import annotations

import re
from collections.abc import Iterator

TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))
  | (?P<quoted>'[^']*(?:''[^']*)*'|"[^"]*(?:""[^"]*)*"|`[^`]*`|\[[^\]]*\])
  | (?P<word>\w+)
  | (?P<operator>[<>=!|]+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
"""Every text is a sequence of these; joined again they give the text back."""

KEYWORDS = """
    select distinct from where group by having order limit offset join left right inner outer cross natural on using
    as and or not in is null like between exists asc desc union all intersect except case when then else end with
"""
FUNCTIONS = "count avg sum min max abs round length lower upper substr cast"
STYLE = {word: word.upper() for word in KEYWORDS.split()} | {word: word for word in FUNCTIONS.split()}
"""How `tidy` writes words: keywords in capitals, functions not; any other word stays as it is."""

FENCE = re.compile(r"```[ \t]*(?:sqlite|sql)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
QUERY = re.compile(r"\b(?:select|with)\b", re.IGNORECASE)


def tokens(sql: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each token of ``sql``, in order."""
    for match in TOKEN.finditer(sql):
        yield match.lastgroup or "other", match.group()


def first_statement(sql: str) -> str:
    """Everything up to the first semicolon that stands outside quotes and comments, the semicolon included."""
    text = ""
    for kind, token in tokens(sql):
        text += token
        if kind == "other" and token == ";":
            break
    return text


def without_distinct(sql: str) -> str:
    """``sql`` without the word DISTINCT; inside quotes and comments it stays."""
    return "".join(text for kind, text in tokens(sql) if not (kind == "word" and text.lower() == "distinct"))


def expansions(sql: str) -> int:
    """An upper bound for how many copies of its WITH tables SQLite makes when it prepares ``sql``.

    Every mention of such a table is a copy of its query, so tables that mention the one before twice double at
    each step: one line of text can ask for a billion. The bound is the product of the numbers of mentions.
    """
    if "with" not in sql.lower():
        return 1
    words = [unquote(text) for kind, text in tokens(sql) if kind not in ("space", "comment")]
    copies = 1
    for index, word in enumerate(words):
        if word == "as" and "(" in words[index + 1 : index + 4]:
            name = words[index - 1]
            if name == ")":  # name(columns) AS (
                name = words[max(last_index(words[:index], "(") - 1, 0)]
            copies *= max(words.count(name) - 1, 1)
    return copies


def unquote(token: str) -> str:
    """A name without its quotes, in lower case."""
    if len(token) > 1 and token[0] in "'\"`[":
        token = token[1:-1].replace(token[0] * 2, token[0])
    return token.lower()


def last_index(words: list[str], word: str) -> int:
    """Where ``word`` stands last; 0 when it does not."""
    return len(words) - 1 - words[::-1].index(word) if word in words else 0


def join_operators(sql: str) -> str:
    """``> =``, ``< =`` and ``! =`` without their space, as Spider's older queries write them."""
    return sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")


def find_query(answer: str) -> str:
    """The SQL query in a model's answer, or the empty string.

    Looks into the first fenced block if there is one, begins at the first SELECT or WITH, and ends at the first
    semicolon or empty line: small models go on talking after the query.
    """
    fenced = FENCE.search(answer)
    text = fenced.group(1) if fenced else answer
    start = QUERY.search(text)
    if start is None:
        return ""
    query = first_statement(text[start.start() :])
    return re.split(r"\n\s*\n", query, maxsplit=1)[0].strip().rstrip(";").rstrip()


def tidy(sql: str) -> str:
    """``sql`` in one fixed style: single spaces, keywords in capitals, ``count(*)``, no final semicolon."""
    text, previous = "", ""
    for kind, token in tokens(join_operators(sql).strip().rstrip(";")):
        if kind in ("space", "comment"):
            continue
        token = STYLE.get(token.lower(), token)
        tight = token in ",);." or previous in ("", "(", ".") or (token == "(" and previous in FUNCTIONS.split())
        text += token if tight else f" {token}"
        previous = token
    return text

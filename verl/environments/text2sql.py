"""Questions that a query on a SQLite database answers: look with <sql>, answer with <solution>.

    <think>...</think> <sql>SELECT ...</sql>            the result comes back in <observation>
    <think>...</think> <solution>SELECT ...</solution>  ends the episode

Reward, at the end: 1 where the solution gives the rows of the right query (each as often; in its order where
that query orders its result), 0 where it does not, -1 where the form is broken. The form is SkyRL's: one
<solution>, with none of the other tags in it, a thought somewhere, and each turn after an observation begins
with <think>. Only what the policy wrote counts.

Row: `db_id`, `reward_spec.ground_truth` (the right query), and `data` (synsql, spider or bird) where the
databases lie as in one of these collections. `env_config`: {"db_path": the folder with the databases,
"seconds": 5, of computing for each query}. A database is DB_PATH[/folder of `data`]/DB_ID/DB_ID.sqlite.

Queries run in processes that can be killed. A connection only reads: the file is opened with mode=ro,
`query_only` is set, and an authorizer refuses all else (ATTACH, PRAGMA, load_extension, writing). SQLite is
asked to stop after `seconds` of processor time; the kernel ends the process a little later where a single
operation does not listen. Both limit the memory.
"""

import os
import re
import resource
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, gold_answer, row_max_turns
from verl.verifiers.base import CouldNotVerify
from verl.verifiers.workers import CheckFailed, shared_workers

FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
# that the policy is shown
MAX_ROWS = 50
MAX_CHARACTERS = 9_000
MEMORY_BYTES = 256 << 20
MAX_COMPARED_ROWS = 1_000_000

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_OBSERVED = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)


class SQLEnv(BaseTextEnv):
    """One question. Errors of a query are observations; a right query that fails is CouldNotVerify."""

    stop = ("</sql>", "</solution>")
    observation_end = "</reminder></observation>\n\n"
    counts_turns = True
    max_turns = 5

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        row = extras or {}
        self.gold = str(gold_answer(row))
        self.actions = list[str]()
        self.max_turns = row_max_turns(row) or type(self).max_turns
        self.seconds = float(config.get("seconds") or 5)
        first = ("look", ":memory:", "SELECT 1", self.seconds)
        most = 2 * self.seconds + 1  # a call may be of two queries
        self.workers = shared_workers("verl.environments.text2sql:answer", most, first)
        if not config.get("db_path") or not row.get("db_id"):
            raise ValueError(
                f"Found db_path={config.get('db_path')!r} and a row with db_id={row.get('db_id')!r}; set "
                "environment.env_config.text2sql.db_path to the databases' folder, and each row's db_id."
            )
        if row.get("data") and row["data"] not in FOLDERS:
            raise ValueError(f"Found data={row['data']!r} in a row; expected one of {', '.join(FOLDERS)}.")
        folder = Path(config["db_path"], FOLDERS.get(row.get("data") or "", ""))
        self.file = os.path.abspath(folder / row["db_id"] / f"{row['db_id']}.sqlite")
        if not os.path.isfile(self.file):
            raise FileNotFoundError(f"There is no database {self.file}; expected it in text2sql's db_path.")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.actions.append(action)
        left = self.max_turns - len(self.actions)
        if left <= 0 or ("<solution>" in action and "</solution>" in action):
            return {"observations": [], "reward": self._reward(), "done": True, "metadata": {}}
        text = "There is no query to run. Think in <think>, then write one query as <sql>QUERY</sql>."
        if (match := _SQL.search(action)) is not None:
            try:
                text = self.workers.ask("look", self.file, match[1], self.seconds)
            except CheckFailed as error:
                text = f"Error: {error}"
        content = f"\n\n<observation>{text}\n<reminder>Turns left: {left}.</reminder></observation>\n\n"
        observations = [{"role": "user", "content": content}]
        return {"observations": observations, "reward": 0.0, "done": False, "metadata": {}}

    def _reward(self) -> float:
        solution = read_solution(self.actions)
        if solution is None:
            return -1.0
        ordered = is_ordered(self.gold)
        for sql, worth in ((solution, 1.0), (self.gold, 0.0)):  # the second says which of the two has failed
            try:
                return worth * self.workers.ask("is_equal", self.file, sql, self.gold, self.seconds, ordered)
            except CheckFailed as error:
                problem = error
        raise CouldNotVerify(f"text2sql: the right query {self.gold!r} on {self.file}: {problem}")


def read_solution(actions: Sequence[str]) -> str | None:
    """The query in <solution>; None: the form is broken. Between two actions stood an observation."""
    text = "\n</observation>\n".join(actions)
    before, _, tail = text.partition("<solution>")
    solution, _, _ = tail.partition("</solution>")
    well_formed = (
        text.count("<solution>") == 1
        and tail.count("</solution>") == 1
        and not _OTHER_TAG.search(solution)
        and _THOUGHT.search(text)
        and not _OBSERVED.search(before)
    )
    return solution.strip() if well_formed else None


@lru_cache(maxsize=10_000)
def is_ordered(sql: str) -> bool:
    """Whether the query orders its result: ORDER BY at its outermost level."""
    import sqlglot  # here: it takes a while, and only this environment needs it

    try:
        return sqlglot.parse_one(sql, read="sqlite").args.get("order") is not None
    except sqlglot.errors.SqlglotError:
        return "order by" in " ".join(sql.lower().split())


# -------------------------------------------------------------------------------- in the processes
def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's question for each thing that a statement would do; `second` is a function's name."""
    calls = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if calls or action in _READS else sqlite3.SQLITE_DENY


def query(file: str, sql: str, seconds: float, most_rows: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns and at most `most_rows` rows, in the order in which the database gives them.
    sqlite3.Error, ValueError: the query is wrong or refused. TimeoutError, MemoryError: it takes too much.
    """
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES * 4), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    # "immutable" needs no lock and leaves no files beside the database; it misses changes in a log.
    immutable = "" if os.path.exists(file + "-wal") else "&immutable=1"
    connection = sqlite3.connect(f"file:{quote(file)}?mode=ro{immutable}", uri=True, isolation_level=None)
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        for pragma in ("query_only = ON", "temp_store = MEMORY", f"hard_heap_limit = {MEMORY_BYTES}"):
            connection.execute(f"PRAGMA {pragma}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MEMORY_BYTES // 8)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize)
        end = time.process_time() + seconds
        connection.set_progress_handler(lambda: time.process_time() > end, 10_000)
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(most_rows)
        return [column[0] for column in cursor.description or ()], rows
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            raise TimeoutError(f"stopped after {seconds:g} s of computing") from None
        raise
    finally:
        connection.close()


def look(file: str, sql: str, seconds: float) -> str:
    """The result as the policy reads it: the columns' names, then the rows, with | between cells."""

    def cell(value: Any) -> str:
        if value is None:
            value = "NULL"
        elif isinstance(value, bytes):
            value = f"x'{value[:100].hex()}'"
        return " ".join(str(value)[:MAX_CHARACTERS].splitlines())  # a row is a line

    names, rows = query(file, sql, seconds, MAX_ROWS + 1)
    text = "\n".join([" | ".join(names), *(" | ".join(map(cell, row)) for row in rows[:MAX_ROWS])])
    if not rows:
        text += "\n(no rows)"
    if len(text) > MAX_CHARACTERS:
        return text[:MAX_CHARACTERS] + "\n(the rest is left out: too long)"
    return text + (f"\n(the first {MAX_ROWS} rows; there are more)" if len(rows) > MAX_ROWS else "")


def is_equal(file: str, sql: str, gold: str, seconds: float, ordered: bool) -> bool:
    """Whether a query gives the rows of the right one, each as often; in the same order, if `ordered`. The
    number of columns counts too: a statement without a result is not equal to an empty one. Raises as `query`
    where the right query fails; MemoryError: either takes too much.
    """
    gold_names, gold_rows = query(file, gold, seconds, MAX_COMPARED_ROWS)
    try:
        names, rows = query(file, sql, seconds, len(gold_rows) + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, TimeoutError):
        return False
    same = rows == gold_rows if ordered else Counter(rows) == Counter(gold_rows)
    return same and len(names) == len(gold_names)


def answer(kind: str, *arguments: Any) -> Any:
    """What a process is asked: "look" or "is_equal"."""
    return (look if kind == "look" else is_equal)(*arguments)

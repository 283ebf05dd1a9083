"""Questions that a query on a SQLite database answers: look with <sql>, answer with <solution>.

    <think>...</think> <sql>SELECT ...</sql>            the result comes back in <observation>
    <think>...</think> <solution>SELECT ...</solution>  ends the episode

The reward comes at the end. It is 1 if the solution returns the rows of the right query, each as often, and
in the same order if that query orders its result. It is 0 if the rows differ, and -1 if the form is broken.
The form is SkyRL's: there is one <solution> with none of the other tags in it, there is a thought somewhere,
and each turn after an observation begins with <think>. Only the text that the policy wrote counts.

A row has `db_id`, `reward_spec.ground_truth` (the right query), and `data` (synsql, spider or bird) if the
databases lie as in one of these collections. `env_config`: {"db_path": the folder with the databases,
"seconds": 5, of computing for each query}. A database is DB_PATH[/folder of `data`]/DB_ID/DB_ID.sqlite.

Queries run in processes that can be killed. A connection only reads: the file is opened with mode=ro,
`query_only` is set, and an authorizer refuses everything else (ATTACH, PRAGMA, load_extension, writing).
SQLite is asked to stop after `seconds` of processor time. If a single operation does not listen, such as one
call of printf that makes a gigabyte, the kernel ends the process half a second later. Both SQLite and the
kernel limit the memory.
"""

import os
import re
import resource
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, gold_text
from verl.utils.errors import CouldNotVerify
from verl.utils.rows import row_max_turns
from verl.verifiers.workers import CheckFailed, LimitExceeded, shared_workers

FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
MAX_ROWS = 50  # the most rows of a result that the policy is shown
MAX_CHARACTERS = 9_000  # the most characters of a result that the policy is shown
MEMORY_BYTES = 256 << 20
MAX_COMPARED_ROWS = 1_000_000
GRACE_SECONDS = 0.5  # of computing, until a query that does not stop by itself is stopped

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_OBSERVED = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)


class SQLEnv(BaseTextEnv):
    """One question that a query on a database answers.

    An error of the policy's query is an observation. `step` raises CouldNotVerify if the right query fails.
    """

    needs = ("sqlglot",)
    stop = ("</sql>", "</solution>")
    observation_end = "</reminder></observation>\n\n"
    counts_turns = True
    max_turns = 5

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        row = extras or {}
        self.gold = gold_text(row)
        self.actions = list[str]()
        self.max_turns = row_max_turns(row) or type(self).max_turns
        self.seconds = float(config.get("seconds") or 5)
        first_call = ("query_as_text", ":memory:", "SELECT 1", self.seconds)
        cpu_seconds = 2 * self.seconds + 1  # a call may run two queries
        self.workers = shared_workers("verl.environments.text2sql:handle_request", cpu_seconds, first_call)
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
        num_left = self.max_turns - len(self.actions)
        if num_left <= 0 or ("<solution>" in action and "</solution>" in action):
            return {"observations": [], "reward": self._reward(), "done": True, "metadata": {}}
        text = "There is no query to run. Think in <think>, then write one query as <sql>QUERY</sql>."
        if (match := _SQL.search(action)) is not None:
            try:
                text = self.workers.call_in_any("query_as_text", self.file, match[1], self.seconds)
            except CheckFailed as error:
                text = f"Error: {self._problem(error)}"
        content = f"\n\n<observation>{text}\n<reminder>Turns left: {num_left}.</reminder></observation>\n\n"
        observations = [{"role": "user", "content": content}]
        return {"observations": observations, "reward": 0.0, "done": False, "metadata": {}}

    def _problem(self, error: CheckFailed) -> str:
        """Return what is told of a query that failed."""
        if isinstance(error, LimitExceeded) and str(error).startswith("more than"):  # the process's clock
            return f"stopped after {self.seconds:g} s of computing"
        return str(error)

    def _reward(self) -> float:
        solution = read_solution(self.actions)
        if solution is None:
            return -1.0
        ordered = is_ordered(self.gold)
        # If the first comparison fails, the second one shows which of the two queries is to blame.
        for sql, worth in ((solution, 1.0), (self.gold, 0.0)):
            try:
                return worth * self.workers.call_in_any(
                    "is_equal", self.file, sql, self.gold, self.seconds, ordered
                )
            except CheckFailed as error:
                problem = self._problem(error)
        raise CouldNotVerify(f"text2sql: the right query {self.gold!r} on {self.file}: {problem}")


def read_solution(actions: Sequence[str]) -> str | None:
    """Return the query in <solution>, or None if the form is broken.

    Args:
        actions: The texts of the policy's turns. There was an observation between any two of them.
    """
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
    """Return whether the query orders its result, with an ORDER BY at its outermost level."""
    import sqlglot  # imported here because it takes a while, and only this environment needs it

    try:
        return sqlglot.parse_one(sql, read="sqlite").args.get("order") is not None
    except sqlglot.errors.SqlglotError:
        return "order by" in " ".join(sql.lower().split())


# -------------------------------------------------------------------------------- in the processes
def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Answer SQLite's question whether a statement may do one thing.

    `second` is the name if that thing is the call of a function.
    """
    is_allowed_call = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if is_allowed_call or action in _READS else sqlite3.SQLITE_DENY


def query(file: str, sql: str, seconds: float, most_rows: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run a query, and return the names of the columns and at most `most_rows` rows.

    The rows are in the order in which the database returns them.

    Raises:
        sqlite3.Error, ValueError: If the query is wrong or refused.
        TimeoutError: If the query takes too much time.
        MemoryError: If the query takes too much memory.
    """
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES * 4), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    # "immutable" needs no lock and leaves no files beside the database. It misses changes in a log, so it is
    # not used where there is one.
    immutable = "" if os.path.exists(file + "-wal") else "&immutable=1"
    is_clocked = signal.getitimer(signal.ITIMER_PROF)[0] > 0  # in a process that the clock may end
    if is_clocked:
        signal.setitimer(signal.ITIMER_PROF, seconds + GRACE_SECONDS)
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
        if is_clocked:  # what follows, a comparison, has a time of its own
            signal.setitimer(signal.ITIMER_PROF, seconds + GRACE_SECONDS)


def query_as_text(file: str, sql: str, seconds: float) -> str:
    """Return the result of a query as the policy reads it.

    The names of the columns come first, and then the rows, with | between cells.
    """

    def cell(value: Any) -> str:
        if value is None:
            value = "NULL"
        elif isinstance(value, bytes):
            value = f"x'{value[:100].hex()}'"
        return " ".join(str(value)[:MAX_CHARACTERS].splitlines())  # each row is one line

    names, rows = query(file, sql, seconds, MAX_ROWS + 1)
    text = "\n".join([" | ".join(names), *(" | ".join(map(cell, row)) for row in rows[:MAX_ROWS])])
    if not rows:
        text += "\n(no rows)"
    if len(text) > MAX_CHARACTERS:
        return text[:MAX_CHARACTERS] + "\n(the rest is left out: too long)"
    return text + (f"\n(the first {MAX_ROWS} rows; there are more)" if len(rows) > MAX_ROWS else "")


def is_equal(file: str, sql: str, gold: str, seconds: float, ordered: bool) -> bool:
    """Return whether a query gives the rows of the right query, each as often.

    The number of columns counts, too: a statement without a result does not equal an empty result.

    Args:
        file: The path of the database.
        sql: The query to judge.
        gold: The right query.
        seconds: The processor time that each query may take.
        ordered: Whether the rows must be in the same order.

    Raises:
        sqlite3.Error, ValueError, TimeoutError: If the right query fails, as in `query`.
        MemoryError: If either query takes too much memory.
    """
    gold_names, gold_rows = query(file, gold, seconds, MAX_COMPARED_ROWS)
    try:
        names, rows = query(file, sql, seconds, len(gold_rows) + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, TimeoutError):
        return False
    same = rows == gold_rows if ordered else Counter(rows) == Counter(gold_rows)
    return same and len(names) == len(gold_names)


def handle_request(kind: str, *arguments: Any) -> Any:
    """Do what a process is asked for, which is "look" or "is_equal"."""
    return (query_as_text if kind == "query_as_text" else is_equal)(*arguments)

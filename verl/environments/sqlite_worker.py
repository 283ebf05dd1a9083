"""Queries that nobody trusts on SQLite files: `look` and `is_equal` run in the processes of `CheckWorkers`.

Three walls. The connection reads only: the file is opened with mode=ro, `query_only` is set, and an
authorizer refuses all but reading (no ATTACH, no PRAGMA, no load_extension, no write). SQLite is asked to
stop after some CPU seconds, and the kernel ends the process a little later where a single operation does not
listen. Memory is limited by SQLite's own limit and, above it, by the process's address space.
"""

from __future__ import annotations

import os
import resource
import sqlite3
import time
from collections import Counter
from typing import Any

MAX_ROWS, MAX_CHARACTERS = 50, 9_000  # that the policy is shown
MEMORY_BYTES = 256 << 20
MAX_COMPARED_ROWS = 1_000_000

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's question for each thing that a statement would do; `second` is a function's name."""
    allowed = action in _READS or (
        action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _REFUSED_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def query(file: str, sql: str, seconds: float, most_rows: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns and at most `most_rows` rows, in the order in which the database gives them.

    Raises:
        sqlite3.Error, ValueError: the query is wrong, or is refused. TimeoutError, MemoryError: it takes too
            much.
    """
    for limit, value in ((resource.RLIMIT_AS, MEMORY_BYTES * 4), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    # "immutable" needs no lock and leaves no files beside the database; it misses changes in a log.
    immutable = "" if os.path.exists(file + "-wal") else "&immutable=1"
    path = file.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(f"file:{path}?mode=ro{immutable}", uri=True, isolation_level=None)
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit = {MEMORY_BYTES}")
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


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value[:100].hex()}'" if isinstance(value, bytes) else str(value)
    return " ".join(text[:MAX_CHARACTERS].splitlines())  # a row is a line


def look(file: str, sql: str, seconds: float) -> str:
    """The result as the policy reads it: the columns' names, then the rows, with | between cells."""
    names, rows = query(file, sql, seconds, MAX_ROWS + 1)
    text = "\n".join([" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows[:MAX_ROWS])])
    if not rows:
        text += "\n(no rows)"
    if len(text) > MAX_CHARACTERS:
        return text[:MAX_CHARACTERS] + "\n(the rest is left out: too long)"
    return text + (f"\n(the first {MAX_ROWS} rows; there are more)" if len(rows) > MAX_ROWS else "")


def is_equal(file: str, sql: str, gold: str, seconds: float, ordered: bool) -> bool:
    """Whether a query gives the rows of the right one, each as often; in the same order, if `ordered`. The
    number of columns counts too: a statement without a result is not equal to an empty one.

    Raises:
        As `query`, where the right query fails. MemoryError: either takes too much.
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

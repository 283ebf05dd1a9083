"""Runs queries that nobody trusts on SQLite files, in a process of its own. Standard library only.

    text2sql.py  --one JSON line: a request-->  python -I -S sqlite_worker.py  --one JSON line: the reply-->

    {"kind": "look", "file", "sql", "seconds"}                 {"text": the result as a table}
    {"kind": "keep", "file", "sql", "seconds"}                 {}: its rows are kept for the next request
    {"kind": "compare", "file", "sql", "seconds", "ordered"}   {"equal": are its rows the kept ones?}

Each may be answered by {"failed": why} instead.

Three walls. The connection reads only: the file is opened with mode=ro, `query_only` is set, and an
authorizer refuses all but reading (no ATTACH, no PRAGMA, no load_extension, no write). Time is counted in CPU
seconds, so that a busy machine takes none from a query: SQLite is asked to stop after `seconds`, and the
kernel ends the process (SIGXCPU) a second later where a single operation does not listen. Memory is limited
by SQLite's own limit and, above it, by the process's address space.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
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
        sqlite3.Error, MemoryError: the query is wrong, is refused, or takes too much.
    """
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
    finally:
        connection.close()


def _cell(value: Any) -> str:
    text = "NULL" if value is None else f"x'{value[:100].hex()}'" if isinstance(value, bytes) else str(value)
    return " ".join(text[:MAX_CHARACTERS].splitlines())  # a row is a line


def look(request: dict[str, Any]) -> dict[str, Any]:
    """The result as the policy reads it: the columns' names, then the rows, with | between cells."""
    names, rows = query(request["file"], request["sql"], request["seconds"], MAX_ROWS + 1)
    text = "\n".join([" | ".join(names), *(" | ".join(map(_cell, row)) for row in rows[:MAX_ROWS])])
    if not rows:
        text += "\n(no rows)"
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + "\n(the rest is left out: too long)"
    elif len(rows) > MAX_ROWS:
        text += f"\n(the first {MAX_ROWS} rows; there are more)"
    return {"text": text}


_kept: tuple[list[str], list[tuple[Any, ...]]] = ([], [])


def keep(request: dict[str, Any]) -> dict[str, Any]:
    """Keeps the rows of the right query for `compare`."""
    global _kept
    _kept = query(request["file"], request["sql"], request["seconds"], MAX_COMPARED_ROWS)
    return {}


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Whether the query gives the kept rows, each as often; in the same order, if `ordered`. The number of
    columns counts too: a statement without a result is not equal to an empty one.
    """
    names, rows = query(request["file"], request["sql"], request["seconds"], len(_kept[1]) + 1)
    same = rows == _kept[1] if request["ordered"] else Counter(rows) == Counter(_kept[1])
    return {"equal": same and len(names) == len(_kept[0])}


def main() -> None:
    """Answers requests until its input ends."""
    address_space = MEMORY_BYTES * 4
    for limit, value in (("AS", address_space), ("CORE", 0), ("FSIZE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "look": look,
        "keep": keep,
        "compare": compare,
    }
    for line in sys.stdin:
        request = json.loads(line)
        seconds = request["seconds"]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard))
        try:
            reply = kinds[request["kind"]](request)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            stopped = str(error) == "interrupted"
            reply = {"failed": f"stopped after {seconds:g} s of computing" if stopped else str(error)}
        except MemoryError:
            reply = {"failed": "it takes too much memory"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

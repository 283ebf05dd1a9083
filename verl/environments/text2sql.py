"""Questions that a query on a SQLite database answers: look with <sql>, answer with <solution>.

    <think>...</think> <sql>SELECT ...</sql>            the result comes back in <observation>
    <think>...</think> <solution>SELECT ...</solution>  ends the episode

Reward, at the end: 1 where the solution gives the rows of the right query (each as often; in its order where
that query orders its result), 0 where it does not, -1 where the form is broken. The form is SkyRL's: one
<solution>, with none of the other tags in it, a thought somewhere, and each turn after an observation begins
with <think>. Only what the policy wrote counts.

Row: `db_id`, `reward_spec.ground_truth` (the right query), and `data` (synsql, spider or bird) where the
databases lie in the folders of one of these collections. `env_config`: {"db_path": the folder with the
databases, "seconds": 5, of computing for each query}. A database is
DB_PATH[/folder of the collection]/DB_ID/DB_ID.sqlite.

Queries run in processes of `sqlite_worker.py`, as many as there are cores.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, gold_answer
from verl.verifiers.base import CouldNotVerify

FOLDERS = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
SECONDS = 5.0

_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_OBSERVED = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)


class SQLEnv(BaseTextEnv):
    """One question. Errors of a query are observations; a right query that fails is CouldNotVerify."""

    stop = ("</sql>", "</solution>")
    observation_end = "</reminder></observation>\n\n"
    counts_turns = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config, row = env_config or {}, extras or {}
        self.gold = str(gold_answer(row))
        self.seconds = float(config.get("seconds") or SECONDS)
        self.max_turns = int(row.get("max_turns") or (row.get("extra_info") or {}).get("max_turns") or 5)
        self.actions: list[str] = []
        if not config.get("db_path") or not row.get("db_id"):
            raise ValueError(
                f"Found db_path={config.get('db_path')!r} and a row with db_id={row.get('db_id')!r}; set "
                "environment.env_config.text2sql.db_path to the folder with the databases, and give each row "
                "its db_id."
            )
        if row.get("data") and row["data"] not in FOLDERS:
            raise ValueError(f"Found data={row['data']!r} in a row; expected one of {', '.join(FOLDERS)}.")
        folder = Path(config["db_path"], FOLDERS.get(row.get("data") or "", ""))
        self.file = (folder / row["db_id"] / f"{row['db_id']}.sqlite").absolute()
        if not self.file.is_file():
            raise FileNotFoundError(
                f"There is no database {self.file}; text2sql's db_path is not its folder."
            )

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.actions.append(action)
        left = self.max_turns - self.turns
        if left <= 0 or ("<solution>" in action and "</solution>" in action):
            return {"observations": [], "reward": self._reward(), "done": True, "metadata": {}}
        match = _SQL.search(action)
        if match is None:
            text = "There is no query to run. Think in <think>, then write one query as <sql>QUERY</sql>."
        else:
            with borrowed_worker() as worker:
                reply = worker.ask("look", self.file, match.group(1), self.seconds)
            text = reply["text"] if "text" in reply else f"Error: {reply['failed']}"
        content = f"\n\n<observation>{text}\n<reminder>Turns left: {left}.</reminder></observation>\n\n"
        observations = [{"role": "user", "content": content}]
        return {"observations": observations, "reward": 0.0, "done": False, "metadata": {}}

    def _reward(self) -> float:
        solution = read_solution(self.actions)
        if solution is None:
            return -1.0
        with borrowed_worker() as worker:
            kept = worker.ask("keep", self.file, self.gold, self.seconds)
            if "failed" not in kept:
                reply = worker.ask(
                    "compare", self.file, solution, self.seconds, ordered=is_ordered(self.gold)
                )
                return float(reply.get("equal", False))
        raise CouldNotVerify(f"text2sql: the right query {self.gold!r} on {self.file}: {kept['failed']}")


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


class SQLiteWorker:
    """A process of `sqlite_worker.py`; one thread asks it at a time."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("sqlite_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the run; the worker ends with its input
        )

    def ask(self, kind: str, file: Path, sql: str, seconds: float, **more: Any) -> dict[str, Any]:
        """The reply; {"failed": why} too where the query ended the process.

        Raises:
            CouldNotVerify: the process was killed by someone else, or stalls without computing.
        """
        request = {"kind": kind, "file": str(file), "sql": sql, "seconds": seconds, **more}
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        reply, deadline = b"", time.monotonic() + 30 + 8 * seconds
        poll = select.poll()
        poll.register(stdout, select.POLLIN | select.POLLHUP)
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            while not reply.endswith(b"\n"):
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise CouldNotVerify(f"A process for SQLite did not answer about {file}.")
                chunk = os.read(stdout.fileno(), 1 << 16)
                if not chunk:
                    raise BrokenPipeError
                reply += chunk
            return json.loads(reply)
        except BrokenPipeError:
            code = self.process.wait()
            if -code in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
                return {"failed": f"it took too much and was ended ({signal.Signals(-code).name})"}
            raise CouldNotVerify(f"A process for SQLite ended with code {code}.") from None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


_idle: list[SQLiteWorker] = []
_places = threading.BoundedSemaphore(os.cpu_count() or 1)


@contextmanager
def borrowed_worker() -> Iterator[SQLiteWorker]:
    """A worker for one thread, started where none is idle; waits while as many as the cores are at work."""
    with _places:
        try:
            worker = _idle.pop()
        except IndexError:
            worker = SQLiteWorker()
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        if worker.process.poll() is None:
            _idle.append(worker)
        else:
            worker.close()


os.register_at_fork(after_in_child=_idle.clear)  # its parent's workers are not its own

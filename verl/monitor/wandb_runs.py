"""Runs as they stand on wandb: their metrics, and the rollouts of the tables that a run logs there."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from verl.monitor.runs import Run
from verl.monitor.tags import ROLLOUTS_TABLE

LOOK_SECONDS = 30.0  # all metrics of a run are asked for at each look


class WandbRun(Run):
    """All runs of one name in a project: one that was resumed is several there, whose steps are joined."""

    def __init__(self, name: str, parts: list[Any]) -> None:
        """parts: of `wandb.Api().runs`."""
        self.folder = Path(name)
        self.parts = sorted(parts, key=lambda part: part.created_at)
        self._history: list[tuple[Any, dict[str, Any]]] = []  # (its part, row), by steps
        for part in self.parts:
            rows = [row | {"step": int(row["_step"])} for row in part.scan_history()]
            if rows:  # it goes on from a checkpoint: what the part before made after it is made again
                first = rows[0]["step"]
                self._history = [(other, row) for other, row in self._history if row["step"] < first]
            self._history += [(part, row) for row in rows]
        self.rows = [row for _, row in self._history]
        states = {"running": "running", "pending": "running", "finished": "finished"}
        self.state = states.get(self.parts[-1].state, "stopped")

    @property
    def age(self) -> float:
        return time.time() - max((row.get("_timestamp", 0.0) for row in self.rows), default=0.0)

    def records(self) -> Iterator[dict[str, Any]]:
        """Rows of the tables (`table_row`), the newest first."""
        for part, logged in reversed(self._history):
            if not isinstance(logged.get(ROLLOUTS_TABLE), dict):
                continue
            path = logged[ROLLOUTS_TABLE]["path"]
            with tempfile.TemporaryDirectory() as folder:
                with told(f"the table of step {logged['step']} of {self.folder}"):
                    part.file(path).download(root=folder).close()
                table = json.loads((Path(folder) / path).read_text(encoding="utf-8"))
            for cells in reversed(table["data"]):
                row = dict(zip(table["columns"], cells, strict=True))
                yield row | {"tags": [tag for tag in row["tags"].split(", ") if tag]}


@contextmanager
def told(what: str) -> Iterator[None]:
    """ValueError in place of wandb's errors."""
    try:
        yield
    except Exception as error:  # of many kinds: no key, no project, no network
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"wandb does not give {what}: {type(error).__name__}: {text}") from None


def opener(project: str, entity: str | None) -> tuple[Callable[[Path], WandbRun], Callable[[int], list[Run]]]:
    """(a run by its name or its wandb id; the newest so many runs) of a project. ValueError: they can't be
    had. entity: None: that of the key.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    with told(f"project {project}"):
        api = import_module("wandb").Api()
        place = f"{entity or api.default_entity}/{project}"

    known: dict[str, tuple[float, WandbRun]] = {}  # and when it was asked for

    def named(run: Path) -> WandbRun:
        name = str(run)
        if name in known and time.monotonic() - known[name][0] < LOOK_SECONDS:
            return known[name][1]
        try:
            with told(f"run {name} of {place}"):
                api.flush()  # else it answers with what it was told first
                parts = list(api.runs(place, filters={"group": name})) or [api.run(f"{place}/{name}")]
                found = WandbRun(name, parts)
        except ValueError:
            if name not in known:
                raise
            found = known[name][1]  # until it answers again
        known[name] = time.monotonic(), found
        return found

    def newest(count: int) -> list[Run]:
        names: dict[str, None] = {}
        with told(f"project {place}"):
            api.flush()
            for run in api.runs(place, order="-created_at"):
                names[run.group or run.id] = None
                if len(names) == count:
                    break
        return [named(Path(name)) for name in names]

    return named, newest

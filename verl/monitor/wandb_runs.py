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
from verl.records.tags import ROLLOUTS_TABLE
from verl.utils.file_sums import stays_inside
from verl.utils.tracking import wandb_problem

LOOK_SECONDS = 30.0  # time for which a run is reused, because reading it asks wandb for all its metrics


class WandbRun(Run):
    """All runs of one name in a project.

    A run that was resumed is several runs on wandb, whose steps are joined here.
    """

    def __init__(self, name: str, parts: list[Any]) -> None:
        """Read a run.

        Args:
            name: The name of the run.
            parts: The runs of this name that `wandb.Api().runs` returned.
        """
        self.folder = Path(name)
        self.parts = sorted(parts, key=lambda part: part.created_at)
        self._history: list[tuple[Any, dict[str, Any]]] = []  # (part, row), by steps
        for part in self.parts:
            rows = [row | {"step": int(row["_step"])} for row in part.scan_history()]
            # A part goes on from a checkpoint. Steps that earlier parts made after it are made again.
            if rows:
                first_step = rows[0]["step"]
                self._history = [(other, row) for other, row in self._history if row["step"] < first_step]
            self._history += [(part, row) for row in rows]
        self.rows = [row for _, row in self._history]
        states = {"running": "running", "pending": "running", "finished": "finished"}
        self.state = states.get(self.parts[-1].state, "stopped")

    @property
    def age(self) -> float:
        return time.time() - max((row.get("_timestamp", 0.0) for row in self.rows), default=0.0)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the tables (`table_row`), the newest first."""
        for part, logged in reversed(self._history):
            if not isinstance(logged.get(ROLLOUTS_TABLE), dict):
                continue
            path = logged[ROLLOUTS_TABLE]["path"]
            with tempfile.TemporaryDirectory() as folder:
                with readable_errors(f"the table of step {logged['step']} of {self.folder}"):
                    file = part.file(path)
                    if not stays_inside(path) or file.name != path:
                        raise ValueError(
                            f"found the name {file.name!r} for {path!r}; expected a file of the run"
                        )
                    file.download(root=folder).close()
                table = json.loads((Path(folder) / path).read_text(encoding="utf-8"))
            for cells in reversed(table["data"]):
                row = dict(zip(table["columns"], cells, strict=True))
                yield row | {"tags": [tag for tag in row["tags"].split(", ") if tag]}


@contextmanager
def readable_errors(subject: str) -> Iterator[None]:
    """Raise ValueError in place of wandb's errors."""
    try:
        yield
    except Exception as error:  # there are many kinds, such as no key, no project or no network
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"wandb does not give {subject}: {type(error).__name__}: {text}") from None


def run_openers(
    project: str, entity: str | None
) -> tuple[Callable[[Path], WandbRun], Callable[[int], list[Run]]]:
    """Return functions that open the runs of a project.

    Args:
        project: The name of the project.
        entity: The owner of the project. None means the entity of the API key.

    Returns:
        A function that returns a run by its name or wandb id, and a function that returns a given number of
        the newest runs.

    Raises:
        ValueError: If wandb does not give the project or a run.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    problem = wandb_problem()
    if problem is not None:
        raise ValueError(f"wandb does not give project {project}: {problem}")
    with readable_errors(f"project {project}"):
        api = import_module("wandb").Api()
        project_path = f"{entity or api.default_entity}/{project}"

    runs: dict[str, tuple[float, WandbRun]] = {}  # name -> (time of the request, run)

    def named(run: Path) -> WandbRun:
        name = str(run)
        if name in runs and time.monotonic() - runs[name][0] < LOOK_SECONDS:
            return runs[name][1]
        try:
            with readable_errors(f"run {name} of {project_path}"):
                api.flush()  # otherwise it repeats its first answer
                parts = list(api.runs(project_path, filters={"group": name})) or [
                    api.run(f"{project_path}/{name}")
                ]
                wandb_run = WandbRun(name, parts)
        except ValueError:
            if name not in runs:
                raise
            wandb_run = runs[name][1]  # the last one is used until wandb answers again
        runs[name] = time.monotonic(), wandb_run
        return wandb_run

    def newest(count: int) -> list[Run]:
        names: dict[str, None] = {}
        with readable_errors(f"project {project_path}"):
            api.flush()
            for run in api.runs(project_path, order="-created_at"):
                names[run.group or run.id] = None
                if len(names) == count:
                    break
        return [named(Path(name)) for name in names]

    return named, newest

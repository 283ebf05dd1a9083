"""Reports of each step's metrics to the services of a run: wandb, tensorboard, mlflow (`trainer.logger`).

    Tracking.log({"actor/lr": 1e-6, ...}, step) -> each backend

A run's console is a display of its own (`verl/records/console.py`), and `metrics.jsonl` is always written
(`verl/utils/json_files.py`). Neither needs a service.
"""

from __future__ import annotations

import functools
import importlib
import netrc
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import httpx

from verl.utils import outside
from verl.utils.extras import missing_package
from verl.utils.text import printable

INIT_SECONDS = 30.0  # of wandb's own 90, for a server that answered a moment ago
FINISH_SECONDS = 300.0  # wandb's own is forever


class Backend(NamedTuple):
    """A place that metrics are reported to.

    Attributes:
        log: takes the metrics of a step, and the step.
        finish: writes out what is pending.
        log_table: takes a name, rows with the same columns, and the step, where tables can be shown.
    """

    log: Callable[[Mapping[str, float], int], object]
    finish: Callable[[int], object]
    log_table: Callable[[str, Sequence[Mapping[str, Any]], int], object] = lambda *_: None


class Tracking:
    """All backends of a run.

    Args:
        project_name: the project, as the backends show it.
        experiment_name: the run, as the backends show it.
        default_backend: names of backends, or one name.
        config: the configuration as plain dictionaries.
        run_dir: folder of the run.
        first_step: the step that is logged first. On resume, later steps of an earlier attempt are dropped if
            the backend can do so.

    Raises:
        ValueError: a backend is unknown, or its package is not installed.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
        run_dir: str | Path = ".",
        first_step: int = 0,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else default_backend
        makers: dict[str, Callable[[], Backend]] = {
            "console": lambda: Backend(_console, lambda _: None),
            "wandb": lambda: _wandb(project_name, experiment_name, Path(run_dir), config or {}),
            "tensorboard": lambda: _tensorboard(Path(run_dir), first_step),
            "mlflow": lambda: _mlflow(project_name, experiment_name, config or {}),
        }
        unknown = [name for name in names if name not in makers]
        if unknown:
            raise ValueError(
                f"Found {', '.join(unknown)} in trainer.logger; expected any of {', '.join(makers)}."
            )
        self.backends = {name: makers[name]() for name in names}

    def log(self, data: Mapping[str, float], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Report the metrics of one step to all backends, or to those that `backend` names.

        Raises ValueError if a name is not one of this run's backends.
        """
        names = [backend] if isinstance(backend, str) else backend
        unknown = [name for name in names or () if name not in self.backends]
        if unknown:
            raise ValueError(
                f"backend: found {', '.join(unknown)}; expected any of {', '.join(self.backends)}."
            )
        for name in self.backends if names is None else names:
            self.backends[name].log(data, step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Report a table (of trajectories), where the backend can show one, as wandb can.

        `rows` must not be empty.
        """
        for backend in self.backends.values():
            backend.log_table(name, rows, step)

    def finish(self, exit_code: int = 0) -> None:
        """Close all backends; it is safe to call this twice.

        Args:
            exit_code: the status that wandb shows for the run.
        """
        while self.backends:
            _, backend = self.backends.popitem()
            backend.finish(exit_code)


def _console(metrics: Mapping[str, float], step: int) -> None:
    """Print one line a step, as verl does; a run of this project has a display of its own instead."""
    line = " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in metrics.items())])
    print(printable(line))  # names hold those of data sources


def _wandb(project_name: str, experiment_name: str, run_dir: Path, config: Mapping[str, Any]) -> Backend:
    """Open Weights & Biases. If it takes no runs now (`wandb_problem`), the run is kept offline on disk.

    A line then says what uploads it. Once begun, a run logs from a process of wandb's own, which goes on
    trying. At its end a run waits for WANDB_FINISH_TIMEOUT seconds, and then leaves the rest on disk, too.
    """
    wandb = _import("wandb")
    run_dir.mkdir(parents=True, exist_ok=True)

    def begin(mode: str | None) -> Any:
        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_SECONDS)),
            finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)),
            finish_timeout_raises=True,
        )
        return wandb.init(
            project=project_name,
            name=experiment_name,
            group=experiment_name,  # a resumed run is a second one in the same group
            dir=str(run_dir),
            config=dict(config),
            mode=mode,
            settings=settings,
        )

    mode = os.environ.get("WANDB_MODE")
    problem = wandb_problem() if mode in (None, "online") else None
    run = None
    if problem is None:
        try:
            run = begin(mode)
        except wandb.errors.Error as error:
            problem = " ".join(str(error).split())[:200]
    if run is None:
        run = begin("offline")
        line = f"wandb: {problem}: the run is kept on disk; to upload it later: {_sync_command(run)}"
        print(printable(line), flush=True)

    def log_table(name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        cells = [list(row.values()) for row in rows]
        run.log({name: wandb.Table(list(rows[0]), cells, allow_mixed_types=True)}, step=step)

    def finish(exit_code: int) -> None:
        try:
            run.finish(exit_code=exit_code)
        except TimeoutError:
            line = f"wandb: it takes too long to upload the rest; to upload it later: {_sync_command(run)}"
            print(printable(line), flush=True)

    return Backend(lambda metrics, step: run.log(dict(metrics), step=step), finish, log_table)


def _sync_command(run: Any) -> str:
    return f"wandb sync {shlex.quote(str(run.settings.sync_dir))}"


def _tensorboard(run_dir: Path, first_step: int) -> Backend:
    """Open event files in the folder TENSORBOARD_DIR, as verl does, or in `<run_dir>/tensorboard`."""
    _import("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = os.environ.get("TENSORBOARD_DIR") or str(run_dir / "tensorboard")
    writer = SummaryWriter(log_dir=folder, purge_step=first_step)

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Backend(log, lambda _: writer.close())


def _mlflow(project_name: str, experiment_name: str, config: Mapping[str, Any]) -> Backend:
    """Open MLflow, at the address in MLFLOW_TRACKING_URI or in ./mlruns; its names take no "@"."""
    mlflow = _import("mlflow")
    mlflow.set_experiment(project_name)
    mlflow.start_run(run_name=experiment_name)
    mlflow.log_dict(dict(config), "config.json")

    def log(metrics: Mapping[str, float], step: int) -> None:
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    return Backend(log, lambda _: mlflow.end_run())


def wandb_key() -> str | None:
    """Return the API key that wandb would use: WANDB_API_KEY, or that of `wandb login` in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return os.environ["WANDB_API_KEY"]
    host = urlparse(_wandb_address()).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        entry = netrc.netrc(str(path)).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return None if entry is None else entry[2]


def wandb_problem() -> str | None:
    """Return why wandb takes no runs now, or None if it does. A process asks each address once."""
    key = wandb_key()
    return "no API key" if key is None else _problem_at(_wandb_address(), key)


@functools.cache
def _problem_at(address: str, key: str) -> str | None:
    """Return why wandb's server does not answer a request like its client's first, or None if it does."""

    def ask() -> int:
        query = {"query": "query Viewer { viewer { id } }"}
        url = f"{address.rstrip('/')}/graphql"
        return httpx.post(url, json=query, auth=("api", key), timeout=outside.ANSWER_SECONDS).status_code

    status = outside.status_of(address, ask)
    if isinstance(status, str):
        return status
    if status == 401:
        return f"{address} does not know the API key"
    return f"{address} answers {status}" if status >= 400 else None


def _wandb_address() -> str:
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_package(f"{name!r} in trainer.logger", name) from error

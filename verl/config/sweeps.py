"""Sweeps: `--multirun trainer.seed=1,2` runs a program once for each combination of values.

    command line -> Hydra's sweeper (which combinations) -> Hydra's launcher (where) -> a process for each job

Hydra's own sweeper and launcher do the work, and others can be chosen: `hydra/launcher=submitit_slurm`
submits the jobs to SLURM. A job is a process of its own, because Ray, torch.distributed, signal handlers and
environment variables of one run would stay for the next one in the same process.

A job's folder is <trainer.default_local_dir>/<its values>, and its name in the loggers is
<trainer.experiment_name>-<its values>. `hydra.sweep.dir` and `hydra.sweep.subdir` name other folders.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl.config.composing import ReadingLoader, one_line
from verl.config.keys import Key, keys_of, to_dict
from verl.config.loading import PROGRAMS, check_names
from verl.config.overrides import parse, split
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.config.command_line import CommandLine

FOLDER = "trainer.default_local_dir"
NAME = "trainer.experiment_name"
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1 asks a run to write a checkpoint and stop


class JobFailed(Exception):
    """The error of a job that ended with a status other than 0.

    Args:
        folder: the job's folder.
        status: its exit status.
    """

    def __init__(self, folder: str, status: int) -> None:
        super().__init__(folder, status)
        self.folder = folder
        self.status = status

    def __str__(self) -> str:
        return f"the job in {self.folder} ended with status {self.status}"


def run_sweep(command: CommandLine, module: str) -> int:
    """Run a program for each combination of values.

    Args:
        command: the arguments.
        module: the program, `python -m MODULE`.

    Returns:
        0 if all jobs have ended well, else the status of the first one that has not.

    Raises:
        ValueError: the arguments can't be read.
    """
    plain, swept, of_hydra = _apart(command.rest)
    check_names(swept, PROGRAMS[command.program])
    config = command.load(plain).config

    def read(name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        return to_dict(config) if name == command.config_name else content

    loader = ReadingLoader(command.folders, read)
    hydra = Hydra(module.rpartition(".")[2], loader)
    keys = keys_of(PROGRAMS[command.program].schema)
    overrides = [
        override if loader.is_group(split(override).name) else _setting(override, keys) for override in swept
    ]
    overrides += _settings_of_hydra(of_hydra, config.trainer.default_local_dir)
    job = [sys.executable, "-m", module, *command.options, *plain]
    swept_names = {split(override).name for override in swept}
    task = partial(_run_job, job, swept_names, config.trainer.experiment_name)
    try:
        hydra.multirun(command.config_name, task, overrides)
    except JobFailed as error:
        print(f"error: {printable(error)}; the other jobs of the sweep have run", file=sys.stderr)
        return error.status
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(one_line(error)) from None
    return 0


def combinations(command: CommandLine) -> list[list[str]]:
    """Return the arguments of each job, as Hydra's own sweeper combines the values.

    Raises ValueError if there are not several values.
    """
    plain, swept, _ = _apart(command.rest)
    check_names(swept, PROGRAMS[command.program])
    parsed = OverridesParser.create().parse_overrides(swept)
    (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [[*plain, *values] for values in jobs]


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Separate the overrides with several values, and those of Hydra's configuration, from the others.

    Returns:
        The other arguments (files of keys too), the overrides with several values, those of Hydra.

    Raises:
        ValueError: no override has several values.
    """
    plain: list[str] = []
    swept: list[str] = []
    of_hydra: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "@" and pending:
            argument += pending.pop(0)
        if _is_swept(argument):
            swept.append(argument)
        elif argument.lstrip("+~").startswith(("hydra.", "hydra/")):
            of_hydra.append(argument)
        else:
            plain.append(argument)
    if not swept:
        raise ValueError("Found --multirun without several values; expected for example trainer.seed=1,2.")
    return plain, swept, of_hydra


def _is_swept(argument: str) -> bool:
    """Return whether an argument has several values."""
    if argument.startswith(("@", "-")) or "=" not in argument:
        return False
    parsed = parse(split(argument).text or "")
    return parsed is not None and parsed.is_sweep_override()


def _setting(override: str, keys: Mapping[str, Key]) -> str:
    """Return an override as Hydra takes it: a key that is no key of the schema has to be added."""
    argument = split(override)
    mark = "" if argument.name in keys else "++"
    return f"{mark}{argument.name}={argument.text}"


def _settings_of_hydra(given: Sequence[str], folder: str) -> list[str]:
    """Return the overrides of Hydra's configuration, with our defaults where the user sets none."""
    settings = {
        "hydra.sweep.dir": QuotedString(folder, Quote.single).with_quotes(),
        "hydra.sweep.subdir": "${hydra.job.override_dirname}",
        "hydra.output_subdir": "null",
        "hydra.job.chdir": "false",
        "hydra/job_logging": "none",
    }
    names = {split(override).name for override in given}
    return [*given, *(f"{name}={value}" for name, value in settings.items() if name not in names)]


def _run_job(job: Sequence[str], swept: set[str], experiment_name: str, _: object) -> None:
    """Run a job in a process of its own; Hydra's launcher calls this, perhaps on another machine.

    Raises JobFailed if it does not end well.
    """
    hydra = HydraConfig.get()
    folder = str(hydra.runtime.output_dir)
    label = str(hydra.sweep.subdir).replace("/", "_")
    job_settings = {FOLDER: folder, NAME: f"{experiment_name}-{label}"}
    overrides = list(hydra.overrides.task)
    for key, text in job_settings.items():
        if key not in swept:
            overrides.append(f"{key}={QuotedString(text, Quote.single).with_quotes()}")
    status = _status_of([*job, *overrides])
    if status != 0:
        raise JobFailed(folder, status)


def _status_of(command: Sequence[str]) -> int:
    """Run a command to its end and return its exit status; signals are passed on to it."""
    process = subprocess.Popen(command)
    earlier = {}
    if threading.current_thread() is threading.main_thread():
        for number in PASSED_ON:
            earlier[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()  # it was interrupted too, and ends its step first
        raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

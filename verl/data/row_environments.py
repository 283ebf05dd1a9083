"""The environments that the rows of a run name, read from its files before anything starts."""

import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config import Config
from verl.config.keys import as_list
from verl.config.mixture import OWN, evals_of, sources_of
from verl.environments.registry import SEARCH, check_usable, load_class

SEARCHING = (SEARCH, "searchcode")  # environments that ask the retrieval server


def row_files(config: Config) -> list[tuple[Path, str]]:
    """Return the files of all rows of a run, each with the environment of its rows that name none."""
    data = config.data
    default = config.environment.env_class
    keys = ["train_files"] * (data.mixture is None) + ["val_files", "extra_val_files"]
    files = [(Path(file), default) for key in keys for file in as_list(data[key]) if file is not None]
    files += [(file, source.env_class or default) for source in sources_of(config) for file in source.files]
    for held_out in evals_of(config, with_data=False):
        if not held_out.of_validation:
            files += [(Path(file), default) for file in as_list(held_out.files)]
    return list(dict.fromkeys(files))


def environments_of(config: Config) -> set[str]:
    """Return the names of the environments of all rows; files that do not exist have none."""
    named = set[str]()
    for path, default in row_files(config):
        named |= environments_in(path, default)
    return named or {config.environment.env_class}


def environments_in(path: Path, default: str) -> set[str]:
    """Return the environments of the rows of a file; an empty set if there is no file.

    Rows that name no environment have the `default`.
    """
    path = path.expanduser()
    if not path.is_file():
        return set()
    return {name or default for name in _named_in(path, path.stat().st_mtime_ns)}


def check_controlled(retriever: str, environments: set[str], where: str) -> None:
    """Raise ValueError if rows whose searches are to find something else (`trainer.evals`) don't search.

    Args:
        retriever: the retriever of the set of rows.
        environments: the environments of its rows.
        where: where the rows are, for the message.
    """
    others = environments - {SEARCH}
    if retriever != OWN and others:
        names = ", ".join(sorted(others))
        raise ValueError(
            f"Found retriever: {retriever} for {where}, of the environment {names}; expected rows that "
            f"search, as it changes what a search finds and nothing else. Use retriever: {OWN}, or others."
        )


@cache
def _named_in(path: Path, mtime: int) -> frozenset[str]:
    """Return the environments that the rows of a file name.

    The name is "" for rows that name none, and for a file that can't be read, because other checks report
    why. The file is read once, whoever asks. Its mtime is an argument so that a changed file is read again.
    """
    names = set[str]()
    seen = set[tuple[bytes, ...]]()
    with suppress(ValueError, OSError, RecursionError, pa.ArrowException):
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                for line in lines:  # a line is parsed only if it may name a new environment
                    texts = tuple(re.findall(rb'"env_class"\s*:\s*(?:"[^"]*")?', line))
                    if texts in seen:
                        continue
                    seen.add(texts)
                    record = json.loads(line) if texts else {}
                    if isinstance(record, dict):
                        name = record.get("env_class")
                        names.add(name if isinstance(name, str) else "")
        elif "env_class" in pq.read_schema(path).names:
            column = pq.read_table(path, columns=["env_class"])[0]
            names.update(name if isinstance(name, str) else "" for name in column.unique().to_pylist())
    return frozenset(names or {""})


def searches(config: Config) -> bool:
    """Return whether the run asks the retrieval server."""
    return config.do_search and not environments_of(config).isdisjoint(SEARCHING)


def check_environments(config: Config) -> None:
    """Raise ValueError if the environments of a run can't be used.

    This is the case if there is no environment of a name in the configuration or in a row, if one that is
    asked lacks a package or has wrong settings, or if a set of `trainer.evals` changes what searches find and
    has rows that don't search.
    """
    settings = config.environment.env_config
    if SEARCH in settings:
        raise ValueError(
            f"Found environment.env_config.{SEARCH}={settings[SEARCH]}; expected a search's settings in "
            "retriever.url, retriever.topk and max_turns."
        )
    for held_out in evals_of(config, with_data=False):  # a plan may be made before the data exist
        files = [] if held_out.of_validation else as_list(held_out.files)
        for file in files:
            environments = environments_in(Path(file), config.environment.env_class)
            check_controlled(held_out.retriever, environments, f"the rows of {file} (trainer.evals)")
    asked = environments_of(config)
    for name in sorted(asked - {SEARCH}):  # the search is always there, and its module loads torch
        check_usable(name, settings.get(name, {}))
    for name in sorted({config.environment.env_class, *settings} - asked - {SEARCH}):
        load_class(name)

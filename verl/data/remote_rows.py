"""Rows that lie elsewhere: s3://bucket/train.parquet, hf://datasets/owner/name/train.parquet and the like.

    a configuration --with_local_rows--> the same with the files' copies in ~/.cache/search_r1/rows

fsspec reaches them, with its own credentials and variables. A file is copied again when it has changed there.
Where its place does not answer, the last copy is taken, with a note. A `*` in the name of a file stands for
all that fit. Programs do this right after they have read their arguments, so all else sees files of this
machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config import Config, Loaded, SFTConfig, get_value, replace_values
from verl.config.keys import as_list
from verl.utils.announcing import announce
from verl.utils.extras import install_command
from verl.utils.text import printable

# keys of `data`; supervised training has two of them
_FILES = ("train_files", "val_files", "extra_val_files")
_LISTS = {"data.mixture": "path", "trainer.evals": "files"}  # lists of entries -> the files of an entry


def is_remote(file: object) -> bool:
    """Return whether a file of rows lies elsewhere."""
    return isinstance(file, str) and "://" in file


def with_local_rows(loaded: Loaded) -> Loaded:
    """Return a configuration with local copies of the rows that lie elsewhere, or the same if none do.

    A plan (`trainer.dry_run`) reads no rows, and stays as it is.

    Raises:
        ValueError: if a file can't be fetched, and no copy of it is here.
    """
    config: Config | SFTConfig = loaded.config
    if isinstance(config, Config) and config.trainer.dry_run:
        return loaded
    values: dict[str, Any] = {}
    for name, files in config.data.items():
        if name in _FILES and any(map(is_remote, as_list(files))):
            values[f"data.{name}"] = local_files(files)
    if isinstance(config, Config):
        for key, field in _LISTS.items():
            entries = get_value(config, key) or []
            if any(_has_remote(entry, field) for entry in entries):
                values[key] = [_with_local(entry, field) for entry in entries]
    return replace(loaded, config=replace_values(config, values)) if values else loaded


def _has_remote(entry: Any, field: str) -> bool:
    return isinstance(entry, Mapping) and any(map(is_remote, as_list(entry.get(field))))


def _with_local(entry: Any, field: str) -> Any:
    if not _has_remote(entry, field):
        return entry
    return {**entry, field: local_files(entry[field])}


def local_files(files: str | list[str]) -> str | list[str]:
    """Return the files with local copies in place of those elsewhere: one name for one, else a list."""
    local: list[str] = []
    for file in as_list(files):
        local += [str(path) for path in fetch_rows(file)] if is_remote(file) else [file]
    return local[0] if isinstance(files, str) and len(local) == 1 else local


def fetch_rows(url: str) -> list[Path]:
    """Return the local copies of the files that an address stands for.

    Raises ValueError if they can't be fetched, and no copy is here.
    """
    options: dict[str, Any] = {}
    if url.startswith("s3://"):  # a place that is silent shall not hold up the start
        options["config_kwargs"] = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 2}}
    shown_url = _without_secrets(url)
    folder = _cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16]
    try:
        import fsspec

        file_system, name = fsspec.core.url_to_fs(url, **options)
        names = sorted(map(str, file_system.glob(name))) if "*" in name else [name]
        if not names:
            raise FileNotFoundError(f"no file fits {name}")
        return [_fetch(file_system, name, folder) for name in names]
    except ImportError as error:
        raise ValueError(
            f"Found rows at {shown_url}: {error}; install it: {install_command('remote')}"
        ) from error
    except FileNotFoundError as error:
        reason = _without_secrets(str(error))
        raise ValueError(
            f"Found no rows at {shown_url} ({reason}); expected a .parquet or .jsonl file."
        ) from error
    except Exception as error:  # of any of fsspec's file systems
        copies = sorted(folder.glob("*/*"), key=lambda path: path.stat().st_mtime)
        reason = _without_secrets(" ".join(printable(error).split()))
        if "*" in url or not copies:
            raise ValueError(
                f"Found rows at {shown_url}, which can't be fetched ({reason}); expected a file that can be "
                "read. Look at credentials and network, or give a file of this machine."
            ) from error
        print(
            f"note: {shown_url} does not answer ({reason}); its last copy is taken: {copies[-1]}",
            file=sys.stderr,
        )
        return [copies[-1]]


def _without_secrets(text: str) -> str:
    """Return a text in which no address has a query, which may be a signature, or a user with a password."""
    return re.sub(r"://[^/\s@]*@", "://", re.sub(r"\?[^\s)]*", "", text))


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "search_r1" / "rows"


def _fetch(file_system: Any, name: str, folder: Path) -> Path:
    """Return the local copy of a file, which is made if there is none of this version of it."""
    version = hashlib.sha256(str(file_system.ukey(name)).encode()).hexdigest()[:16]
    path = folder / version / Path(name.partition("?")[0]).name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        incomplete = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
        try:
            with announce(f"fetching {_without_secrets(name)}", sys.stderr):
                file_system.get_file(name, str(incomplete))
            incomplete.replace(path)
        finally:
            incomplete.unlink(missing_ok=True)
    return path

"""The sources of `data.mixture`: what a user may write, and what it means.

{path: math.parquet, amount: 1.0, ratio: 3, verifier: math}      a file, a list of files, or a folder
{env: {id: wordle, args: {...}}, name: words, n: 4}              rows of a `verifiers` environment
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from verl.config.keys import as_list
from verl.config.schema import Config

SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Source:
    """One entry of `data.mixture`.

    Attributes:
        path: file (.parquet, .jsonl), list of files, or a folder, of which the files that begin with one of
            `splits` are read.
        amount: with a decimal point a share of the rows (3.0: three times as many draws), without one a
            count of rows.
        ratio: its weight among the prompts of a step; None: its rows, times what amount repeats.
        verifier: names the verifier of rows that name none; their plain ground truth is its label.
        env_class: environment of rows that name none. n: answers to each prompt, instead of rollout.n_agent.
        env: {id, args} of a `verifiers` environment, whose rows these are, instead of path.
        files: what path comes to.
    """

    name: str
    path: str | list[str] | None = None
    amount: int | float = 1.0
    ratio: int | float | None = None
    verifier: str | None = None
    env_class: str | None = None
    n: int | None = None
    splits: str | list[str] = "train"
    env: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()

    def rows_to_use(self, num_rows: int) -> int | None:
        """How many of its rows are drawn from; None: all. ValueError: amount is 1 where 1.0 was meant."""
        if self.amount == 1 and isinstance(self.amount, int) and num_rows > 100:
            raise ValueError(
                f"Found amount: 1, a single row, for {self.name!r} of data.mixture, which has {num_rows} "
                "rows; expected amount: 1.0 for all of them, or a larger count such as amount: 500."
            )
        count = self.amount if isinstance(self.amount, int) else int(self.amount * num_rows + 0.5)
        return max(count, 1) if count < num_rows else None

    def weight(self, num_rows: int) -> float:
        """Its weight among the prompts of a step, of a source with so many rows."""
        if self.ratio is not None:
            return float(self.ratio)
        return float(self.amount if isinstance(self.amount, int) else self.amount * num_rows)


def _types() -> dict[str, tuple[type, ...]]:
    """Key of an entry -> types of its value."""
    hints = get_type_hints(Source)
    del hints["files"]
    return {
        name: tuple(get_origin(each) or each for each in get_args(hint) or (hint,))
        for name, hint in hints.items()
    }


def sources_of(config: Config, with_data: bool = True) -> list[Source]:
    """The sources of `data.mixture`, in its order; none without one.

    Raises:
        ValueError: an entry that can't be meant so, or (with_data) a file that is not there.
    """
    sources, types = list[Source](), _types()
    for number, entry in enumerate(config.data.mixture or []):
        where = f"data.mixture[{number}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"Found {where}={entry!r}; expected {{path: <file>, ratio: 1, ...}}.")
        for key, value in entry.items():
            if key not in types:
                near = difflib.get_close_matches(str(key), types, 1, 0)[0]
                raise ValueError(
                    f"Found the unknown key {key!r} in {where}; the nearest one is {near!r} (there are "
                    f"{', '.join(types)})."
                )
            if value is not None and (not isinstance(value, types[key]) or isinstance(value, bool)):
                kinds = " or ".join(kind.__name__ for kind in types[key] if kind is not NoneType)
                raise ValueError(f"Found {key}: {value!r} in {where}; expected {kinds}.")
            if isinstance(value, int | float) and value <= 0:
                raise ValueError(f"Found {key}: {value} in {where}; expected a number above 0.")
        given = {key: value for key, value in entry.items() if value is not None}
        if ("path" in given) == ("env" in given):
            raise ValueError(f"Found {entry} at {where}; expected path: <file>, or env: {{id: <name>}}.")
        if "env" in given and not isinstance(given["env"].get("id"), str):
            raise ValueError(f"Found env: {given['env']} in {where}; expected {{id: <name>, args: {{...}}}}.")
        paths = [Path(str(path)).expanduser() for path in as_list(given.get("path", []))]
        files = [file for path in paths for file in _files(path, as_list(given.get("splits", "train")))]
        for path in paths if with_data else []:
            if not any(file == path or path in file.parents for file in files):
                raise ValueError(
                    f"Found no file {' or '.join(SUFFIXES)} at {path} ({where}); expected one, or a folder "
                    f"with files whose names begin with {given.get('splits', 'train')}."
                )
        given.setdefault("name", given["env"]["id"] if "env" in given else (paths or [Path("rows")])[0].stem)
        if given["name"] in {source.name for source in sources} or "/" in given["name"]:
            what = "with a /" if "/" in given["name"] else "twice"
            raise ValueError(
                f"Found the name {given['name']!r} at {where} {what}; "
                "expected a name of its own for each source: name: <name>."
            )
        sources.append(Source(**given, files=tuple(files)))
    return sources


def _files(path: Path, splits: list[str]) -> list[Path]:
    """A file itself; of a folder, the files of these splits, also in its folder `data`."""
    if not path.is_dir():
        return [path] if path.is_file() and path.suffix in SUFFIXES else []
    inside = sorted(file for folder in (path, path / "data") for file in folder.glob("*.*"))
    return [file for file in inside if file.suffix in SUFFIXES and file.name.startswith(tuple(splits))]

"""The entries of `data.mixture` and `trainer.evals`: what a user may write, and what it means.

{path: math.parquet, amount: 1.0, ratio: 3, verifier: math}      a file, a list of files, or a folder
{env: {id: wordle, args: {...}}, name: words, n: 4}              rows of a `verifiers` environment
{files: test.parquet, every: 50, rollouts: 4}                    a set that is measured during training
{retriever: shuffled, n: 100}                                    questions of the validation, as a control
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from verl.config.keys import Block, Count, NotNegative, Positive, Range, as_list, config_block, key, keys_of
from verl.config.schema import Config

SUFFIXES = (".parquet", ".jsonl")
OWN = "own"
SHUFFLED = "shuffled"
EMPTY = "empty"
RETRIEVERS = (OWN, SHUFFLED, EMPTY)  # what the searches of a set find
VALIDATION = "val"  # the name of a set without files
Entry = TypeVar("Entry", bound=Block)


@config_block
class Source(Block):
    """One entry of `data.mixture`; `files` are the files that `path` stands for."""

    name: str = key(None, "its name; default: that of the file or environment")
    path: str | list[str] | None = key(None, "file (.parquet, .jsonl), list of files, or a folder")
    splits: str | list[str] = key("train", "of a folder the files are read whose names begin so")
    env: dict | None = key(
        None, "instead of path: {id, args} of a `verifiers` environment, whose rows these are"
    )
    amount: int | Annotated[float, Range(0, above=True)] = key(
        1.0, "with a decimal point a share of the rows (3.0: three times as many draws), without one a count"
    )
    ratio: Positive | None = key(None, "its weight in a step (null: its rows, times what amount repeats)")
    verifier: str | None = key(None, "of rows that name none; their plain ground truth is its label")
    env_class: str | None = key(None, "environment of rows that name none")
    n: Count | None = key(None, "answers to each prompt, instead of rollout.n_agent")
    files: tuple[Path, ...] = ()

    def rows_to_use(self, num_rows: int) -> int | None:
        """Return how many of the source's rows are drawn from; None stands for all.

        Raises ValueError if amount is 1 where 1.0 was probably meant.
        """
        if self.amount == 1 and isinstance(self.amount, int) and num_rows > 100:
            raise ValueError(
                f"Found amount: 1, a single row, for {self.name!r} of data.mixture, which has {num_rows} "
                "rows; expected amount: 1.0 for all of them, or a larger count such as amount: 500."
            )
        count = self.amount if isinstance(self.amount, int) else int(self.amount * num_rows + 0.5)
        return max(count, 1) if count < num_rows else None

    def weight(self, num_rows: int) -> float:
        """Return the source's weight among the prompts of a step, if it has `num_rows` rows."""
        if self.ratio is not None:
            return float(self.ratio)
        return float(self.amount if isinstance(self.amount, int) else self.amount * num_rows)


def sources_of(config: Config, with_data: bool = True) -> list[Source]:
    """Return the sources of `data.mixture`, in its order; an empty list without a mixture.

    Raises:
        ValueError: an entry is wrong, or (with_data) a file does not exist.
    """
    sources: dict[str, Source] = {}
    for number, entry in enumerate(config.data.mixture or []):
        where = f"data.mixture[{number}]"
        source = read_entry(Source, entry, where, "{path: <file>, ratio: 1, ...}")
        if (source.path is None) == (source.env is None):
            raise ValueError(f"Found {entry} at {where}; expected path: <file>, or env: {{id: <name>}}.")
        if source.env is not None and not isinstance(source.env.get("id"), str):
            raise ValueError(f"Found env: {source.env} in {where}; expected {{id: <name>, args: {{...}}}}.")
        paths = [Path(path).expanduser() for path in as_list(source.path) if path is not None]
        files = tuple(file for path in paths for file in _files(path, as_list(source.splits)))
        for path in paths if with_data else []:
            if not any(file == path or path in file.parents for file in files):
                raise ValueError(
                    f"Found no file {' or '.join(SUFFIXES)} at {path} ({where}); expected one, or a folder "
                    f"with files whose names begin with {source.splits}."
                )
        name = source.name or (paths[0].stem if paths else (source.env or {})["id"])
        if name in sources or "/" in name:
            problem = "with a /" if "/" in name else "twice"
            raise ValueError(
                f"Found the name {name!r} at {where} {problem}; "
                "expected a name of its own for each source: name: <name>."
            )
        sources[name] = replace(source, name=name, files=files)
    return list(sources.values())


def read_entry(block: type[Entry], entry: object, where: str, expected: str) -> Entry:
    """Return an entry of a list in the configuration, checked by its block.

    Raises ValueError if the entry is wrong.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"Found {where}={entry!r}; expected {expected}.")
    keys = keys_of(block)
    settings = {name: value for name, value in entry.items() if value is not None}
    for name, value in settings.items():
        if name not in keys:
            nearest = difflib.get_close_matches(str(name), keys, 1, 0)[0]
            raise ValueError(
                f"Found the unknown key {name!r} in {where}; the nearest one is {nearest!r} (there are "
                f"{', '.join(keys)})."
            )
        replace(keys[name], path=f"{where}.{name}").check(value)
        if isinstance(value, list) and not (value and all(isinstance(item, str) for item in value)):
            raise ValueError(f"Found {where}.{name}={value}; expected a text, or a list of texts.")
    return block(**settings)


@config_block
class HeldOut(Block):
    """One entry of `trainer.evals`: rows that are asked during training, and never trained on.

    `of_validation` is true if the entry names no files, so that its rows are the validation's.
    """

    files: str | list[str] | None = key(
        None, "parquet or jsonl file, or a list of files; default: the questions of data.val_files"
    )
    name: str = key(None, "of its figures, eval/NAME/...; default: that of the file, else val")
    every: Count = key(100, "steps between two measurements; the last step is always one")
    n: Count | None = key(None, "so many rows, drawn with a fixed seed (null: all)")
    rollouts: Count = key(1, "of each row")
    temperature: NotNegative = key(1.0, "of their sampling; 0: greedy")
    solved_at: float = key(1.0, "reward from which a rollout counts as solved, for pass@j")
    retriever: str = key(
        OWN,
        "what searches find: the server's passages, those of other questions of the set, or none",
        " ".join(RETRIEVERS),
    )
    of_validation: bool = False


def evals_of(config: Config, with_data: bool = True) -> list[HeldOut]:
    """Return the sets of `trainer.evals`, in its order.

    The name of a set says which retriever it has: NAME, NAME/shuffled or NAME/empty.

    Raises:
        ValueError: an entry is wrong, or (with_data) a file does not exist.
    """
    sets: dict[str, HeldOut] = {}
    for number, entry in enumerate(config.trainer.evals or []):
        where = f"trainer.evals[{number}]"
        held_out = read_entry(HeldOut, entry, where, "{files: <file>, every: 100, rollouts: 4}")
        of_validation = held_out.files is None
        files = [Path(file).expanduser() for file in as_list(held_out.files) if file is not None]
        for file in files if with_data else []:
            if not file.is_file() or file.suffix not in SUFFIXES:
                raise ValueError(f"Found no file {' or '.join(SUFFIXES)} at {file} ({where}); expected one.")
        default = files[0].stem if files else VALIDATION
        name = held_out.name or default
        full_name = name
        if held_out.retriever != OWN:
            full_name = f"{name}/{held_out.retriever}"
            if not config.do_search and not of_validation:
                raise ValueError(
                    f"Found retriever: {held_out.retriever} in {where} with do_search=false, where nothing "
                    f"is searched; expected do_search=true, or retriever: {OWN}."
                )
        if full_name in sets or "/" in name:
            raise ValueError(
                f"Found the name {full_name!r} at {where}, which is taken or has a /; expected one of "
                "its own: name: <name>."
            )
        sets[full_name] = replace(held_out, name=full_name, of_validation=of_validation)
    return list(sets.values())


def _files(path: Path, splits: list[str]) -> list[Path]:
    """Return a file itself; for a folder, the files of these splits, also in its folder `data`."""
    if not path.is_dir():
        return [path] if path.is_file() and path.suffix in SUFFIXES else []
    candidates = sorted(file for folder in (path, path / "data") for file in folder.glob("*.*"))
    return [file for file in candidates if file.suffix in SUFFIXES and file.name.startswith(tuple(splits))]

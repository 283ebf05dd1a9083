"""Helpers that the programs of this folder share: their commands, whole files and the rows in them.

Reading names the place of a mistake. Files are written under a temporary name and renamed, so that nobody
sees half of a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from verl.utils.extras import missing_package
from verl.utils.text import printable

PARQUET_ROWS = 5_000  # rows that are held at once


def run_command(
    parser: argparse.ArgumentParser,
    program: Callable[[argparse.Namespace], dict[str, int] | int | None],
    argv: list[str] | None = None,
) -> int:
    """Run a program with its options and print what it wrote: {file in --out: rows}.

    Returns the exit status: 0, or what the program returns; 2 for a mistake of the user.
    """
    options = parser.parse_args(argv)
    try:
        counts = program(options)
    except (ValueError, OSError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    if isinstance(counts, int):
        return counts
    for name, count in (counts or {}).items():
        print(f"{options.out / name}: {count:,} rows")
    return 0


def describe(value: Any) -> str:
    """Return type and beginning of a value, for error messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def get_field(value: Any, key: str, expected: type, where: str) -> Any:
    """Return `value[key]`, or raise a ValueError that says what was found in its place."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object with {key!r}, found {describe(value)}")
    if key not in value:
        raise ValueError(f"{where}: no {key!r}; its keys are {sorted(map(str, value))}")
    if not isinstance(value[key], expected):
        raise ValueError(f"{where}: {key!r} must be a {expected.__name__}, found {describe(value[key])}")
    return value[key]


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file. Raises ValueError if it can't be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: can't be read ({error})") from None


def parse_json(text: str, path: Path, line: int = 1) -> Any:
    """Parse the text of a file that begins at `line`. Raises ValueError with the line of a mistake."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {line + error.lineno - 1}: not JSON ({error.msg})") from None


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError if it can't be read."""
    return parse_json(read_text(path), path)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of each record in a parquet file, in JSON lines (.jsonl) or in a JSON list.

    Only a few records of a parquet file are held at a time. Raises ValueError if the file can't be read.
    """
    if path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
                rows = (record for batch in file.iter_batches(PARQUET_ROWS) for record in batch.to_pylist())
                yield from ((f"{path}, row {number}", record) for number, record in enumerate(rows))
        except (OSError, ArrowException) as error:
            raise ValueError(f"{path}: can't be read ({error})") from None
        return
    text = read_text(path)
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at U+2028
            if line.strip():
                yield f"{path}, line {number}", parse_json(line, path, number)
        return
    records = parse_json(text, path)
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a list, found {describe(records)}")
    yield from ((f"{path}, [{number}]", record) for number, record in enumerate(records))


def rows_file(folder: Path, name: str) -> Path | None:
    """Return the file of rows of a name in a folder, NAME.parquet or NAME.jsonl; None if there is neither."""
    paths = [folder / f"{name}.parquet", folder / f"{name}.jsonl"]
    return next((path for path in paths if path.is_file()), None)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object a line, UTF-8; return the number of rows."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    _write(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
    return len(lines)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> int:
    """Write rows to a parquet file, one column per key of the first row; return the number of rows.

    Raises ValueError if there are no rows, or if pyarrow is not installed.
    """
    try:  # imported here, because a retrieval server's environment makes its corpus without pyarrow
        from pyarrow import Table, parquet
    except ImportError:
        alone = f"{sys.executable} -m pip install -c constraints.txt pyarrow"
        raise ValueError(f"{missing_package(str(path), 'pyarrow')}, or alone: {alone}") from None
    if not rows:
        raise ValueError(f"there are no rows to write to {path}")
    _write(path, lambda temporary: parquet.write_table(Table.from_pylist(rows), temporary))
    return len(rows)


def write_settings(out: Path, settings: dict[str, Any]) -> None:
    """Write settings.yaml, the keys of a run.

    It is written last, as a sign that all files are there. JSON is YAML.
    """
    write_jsonl(out / "settings.yaml", [settings])


def make_row(
    data_source: str, prompt: str, question: str, answers: list[str], split: str, index: int, **extra: Any
) -> dict[str, Any]:
    """Return a parquet row in Search-R1's schema; `extra` joins split and index in `extra_info`."""
    return {
        "id": f"{split}_{index}",
        "question": question,
        "golden_answers": answers,
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index, **extra},
    }


def tidy_question(question: str) -> str:
    """Return a question without blanks around it and with a question mark.

    Search-R1's rows and infer.py have questions in this form.
    """
    question = question.strip()
    return question if question.endswith("?") else question + "?"

"""Which rows have programs run by the code server, read from their files before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl.config import Config
from verl.config.mixture import sources_of
from verl.data.row_environments import environments_of, row_files
from verl.verifiers.registry import assigned_verifiers

CODE_ENVIRONMENTS = frozenset(["lcb", "searchcode"])
CODE_VERIFIERS = frozenset(["code", "code_stdio"])
_COLUMNS = ("reward_model", "reward_spec", "dataset", "ground_truth")  # where a row names its verifiers
_CODE_IN_TEXT = r'"name"\s*:\s*"(?i:code|code_stdio)"'
_ROWS_AT_ONCE = 4096


def runs_programs(config: Config) -> bool:
    """Return whether a run asks a code server: by environments, or by verifiers that its rows name."""
    if ask_code_server(environments_of(config), config):
        return True
    if any(source.verifier in CODE_VERIFIERS for source in sources_of(config, with_data=False)):
        return True
    return any(names_code_verifier(path) for path, _ in row_files(config))


def ask_code_server(environments: Set[str], config: Config) -> bool:
    """Return whether one of these environments asks a code server.

    An environment whose settings have a `code_api_url` of their own is not counted.
    """
    served = {
        name for name, values in config.environment.env_config.items() if "code_api_url" in (values or {})
    }
    return bool((environments & CODE_ENVIRONMENTS) - served)


def names_code_verifier(path: Path) -> bool:
    """Return whether a row of a file names the verifier code or code_stdio.

    The answer is False if there is no file, and for a file that can't be read, because other checks say why.
    """
    path = path.expanduser()
    with suppress(ValueError, OSError, RecursionError, pa.ArrowException):
        if path.suffix == ".jsonl":
            return _is_named_in_lines(path)
        file = pq.ParquetFile(path)
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns) if columns else ()
        return any(_is_named_in(name, batch.column(name)) for batch in batches for name in columns)
    return False


def _is_named_in_lines(path: Path) -> bool:
    """Return whether a line of a .jsonl file names one of them; only lines that may do so are parsed."""
    with path.open("rb") as lines:
        for line in lines:
            if not any(f'"{name}'.encode() in line.replace(b"\\", b"").lower() for name in CODE_VERIFIERS):
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                continue
            with suppress(ValueError):  # a row that is wrong is reported elsewhere
                assigned = assigned_verifiers(row.get("reward_model") or row.get("reward_spec"), row)
                if any(entry.name in CODE_VERIFIERS for entry in assigned):
                    return True
    return False


def _is_named_in(name: str, column: pa.Array) -> bool:
    """Return whether a column, or a field inside it, names one of them."""
    return any(_names_code(field, texts) for field, texts in _texts_in(name, column))


def _names_code(field: str, texts: pa.Array) -> bool:
    """Return whether texts are such names, or a ground truth as JSON text that has one."""
    if field in ("name", "verifier", "dataset"):
        return bool(
            pc.any(pc.is_in(pc.utf8_lower(texts), pa.array(sorted(CODE_VERIFIERS), texts.type))).as_py()
        )
    return bool(pc.any(pc.match_substring_regex(texts, _CODE_IN_TEXT)).as_py())


def _texts_in(name: str, column: Any) -> Iterator[tuple[str, pa.Array]]:
    """Yield (name of the field, its texts) of all fields with texts, those of structs and lists included."""
    kind = column.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _texts_in(kind.field(number).name, column.field(number))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _texts_in(name, column.flatten())
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield name, column

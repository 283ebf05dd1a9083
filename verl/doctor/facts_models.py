"""Models, by their files alone: parameters from the headers of safetensors, lengths from config.json.

    a folder, or owner/name in the hub's cache -> Model(num_params, max_positions, what is missing)

Nothing is loaded and nothing is asked over the network; a 70B model takes milliseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.doctor.facts import Model
from verl.doctor.facts_places import hub_folder

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MAX_HEADER_BYTES = 100 * 2**20


def look_at_model(key: str, path: str, environment: Mapping[str, str]) -> Model:
    """What the files of a model say. `key`: the setting that names it."""
    folder = Path(path)
    where = "folder"
    if not folder.is_dir():
        where = "nowhere" if path.count("/") != 1 or path[0] in "./~" else "hub"
        cached = _snapshot(path, hub_folder(environment)) if where == "hub" else None
        if cached is None:
            return Model(key, path, where)
        folder, where = cached, "cache"
    problem, config = None, {}
    try:
        if (folder / "config.json").is_file():
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num_params, dtype_bytes = _count_parameters(folder)
    except (OSError, ValueError, KeyError) as error:
        problem, num_params, dtype_bytes = f"{type(error).__name__}: {error}", None, None
    text = config.get("text_config", config)  # of models that see and read
    return Model(
        key,
        path,
        where,
        num_params,
        dtype_bytes,
        _max_positions(text),
        missing=_missing(folder),
        problem=problem,
    )


def _max_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that a config.json allows, those of a stretched RoPE (YaRN, linear, ...) included."""
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if positions is None or not isinstance(factor := scaling.get("factor"), int | float):
        return positions
    return max(positions, int(factor * scaling.get("original_max_position_embeddings", positions)))


def _snapshot(name: str, cache: Path) -> Path | None:
    """The cached files of `owner/name`, the revision that `main` is at."""
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    found = folder / "snapshots" / revision
    if revision and (found / "config.json").exists():
        return found
    others = sorted(folder.glob("snapshots/*/config.json"))
    return others[-1].parent if others else None


def _missing(folder: Path) -> tuple[str, ...]:
    kinds = {
        "config": (folder / "config.json").exists(),
        "weights": any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")),
        "tokenizer": any((folder / name).exists() for name in TOKENIZERS),
    }
    kinds |= dict.fromkeys(_missing_shards(folder), False)
    return tuple(name for name, is_there in kinds.items() if not is_there)


def _missing_shards(folder: Path) -> list[str]:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        return []
    return sorted({name for name in names if not (folder / name).exists()})


def _count_parameters(folder: Path) -> tuple[int | None, int | None]:
    """(parameters, bytes of most of them) of the safetensors files; (None, None) without such files."""
    by_type: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                by_type[entry["dtype"]] = by_type.get(entry["dtype"], 0) + math.prod(entry["shape"])
    if not by_type:
        return None, None
    return sum(by_type.values()), DTYPE_BYTES.get(max(by_type, key=lambda name: by_type[name]))


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
            raise ValueError(
                f"{path.name} is no safetensors file (a git-lfs pointer? fetch it: git lfs pull)"
            )
        header = json.loads(file.read(size))
    end = max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    if path.stat().st_size < 8 + size + end:
        raise ValueError(f"{path.name} was cut short: copy it again")
    return header

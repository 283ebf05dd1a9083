"""Folders that a run writes to: can a small file be written there now, and how much room is left."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl.doctor.facts import Place

TRIAL_BYTES = 64 * 1024  # enough to meet a quota that is used up, too little to be one's trouble


def look_at_place(used_for: str, path: str | Path) -> Place:
    """The nearest parent of `path` that is there: a trial file, free room. Makes no folder."""
    folder = existing_parent(Path(os.path.expanduser(path)).absolute())  # a user may have no home folder
    try:
        sizes = os.statvfs(folder)
    except OSError as error:
        return Place(used_for, str(path), error.strerror)
    return Place(
        used_for,
        str(path),
        _try_to_write(folder),
        free_bytes=sizes.f_bavail * sizes.f_frsize,
        total_bytes=sizes.f_blocks * sizes.f_frsize,
    )


def existing_parent(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _try_to_write(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor_") as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    return None


def hub_folder(environment: Mapping[str, str]) -> Path:
    """The cache of models from the hub."""
    home = environment.get("HF_HOME")
    if home is None:
        home = str(Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    usual = environment.get("HUGGINGFACE_HUB_CACHE", str(Path(home) / "hub"))  # its older name
    return Path(os.path.expanduser(environment.get("HF_HUB_CACHE", usual)))

"""The files of a benchmark's results, and the look at them before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.json_files import read_lines, to_json

RESULTS_FILE = "results.jsonl"
SETTINGS_FILE = "settings.json"


def check_results(folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Check that the results in a folder can begin or go on.

    Args:
        folder: The folder of the results.
        settings: Everything that a result depends on.
        resume: Whether the command may go on with existing results.

    Raises:
        ValueError: If there are results already and `resume` is False, or they have other settings.
    """
    if not (folder / RESULTS_FILE).exists():
        return
    if not resume:
        raise ValueError(
            f"Found results at {folder}; expected none. Give --resume to go on with them, or another --out."
        )
    (saved,) = read_lines(folder / SETTINGS_FILE) or [{}]
    current = json.loads(to_json(settings))  # in the form in which a file has them
    changed = [name for name in (saved | current) if saved.get(name) != current.get(name)]
    if changed:
        changes = ", ".join(f"{name}={saved.get(name)!r}, now {current.get(name)!r}" for name in changed)
        raise ValueError(
            f"{folder} was begun with other settings: {changes}. Use those, or give another --out."
        )

"""Files of data sets and models on the Hugging Face hub, by huggingface_hub.

Its resume and its checks, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy variables of the environment
are in force. What it raises becomes a ValueError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _ask_hub(what: str, question: Callable[[Any], Any]) -> Any:
    """What a function of huggingface_hub gives; None where the repository has no such file."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        needed = "huggingface_hub is not installed: pip install -c constraints.txt huggingface_hub"
        raise ValueError(needed) from None
    try:
        return question(hub)
    except Exception as error:  # also those of the HTTP library below it, which its versions have others of
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None  # a local one: not in the cache, and no hub
        reason = re.sub(r"\?\S*", "", " ".join(str(error).split()))  # a signed address lets anybody in
        raise ValueError(
            f"{what} can't be had from the hub ({reason}); the same command goes on where this one was"
        ) from None


def fetch_file(repository: str, path: str, folder: Path | None = None) -> Path | None:
    """A file below `folder` (None: in the hub's cache), downloaded if it is not there yet; None where the
    repository has no such file. Raises ValueError when the hub can't be reached or refuses.
    """
    kind: dict[str, Any] = {"repo_type": "dataset", "local_dir": folder}
    found = _ask_hub(f"{path} of {repository}", lambda hub: hub.hf_hub_download(repository, path, **kind))
    return None if found is None else Path(found)


def fetch_folder(repository: str, path: str, folder: Path) -> None:
    """A repository's folder `path`, as `folder`/`path`. Raises ValueError as `fetch_file` does."""
    # not snapshot_download: without a hub it is content
    found = _ask_hub(
        f"{path}/ of {repository}", lambda hub: hub.list_repo_files(repository, repo_type="dataset")
    )
    names = [name for name in found or () if name.startswith(f"{path}/")]
    if not names:
        raise ValueError(f"{repository} has no folder {path}")
    for name in names:
        fetch_file(repository, name, folder)


def fetch_model(name: str) -> Path:
    """The folder of a model in the hub's cache, with all that it is read from. Raises ValueError as
    `fetch_file` does.
    """
    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    other = ["consolidated*", "original/*"]  # the same weights in another form
    found = _ask_hub(
        name, lambda hub: hub.snapshot_download(name, allow_patterns=kinds, ignore_patterns=other)
    )
    if found is None or not (Path(found) / "config.json").is_file():
        raise ValueError(f"--model: {name} is no model's name on the hub: it has no config.json")
    return Path(found)

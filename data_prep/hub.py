"""Files of data sets and models on the Hugging Face hub, by huggingface_hub.

Its resume and its checks, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy variables of the environment
are in force. Its exceptions become a ValueError of one line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.utils.extras import install_command
from verl.utils.hub import hub_problem, is_offline, leave_hub_alone, use_cache_if_hub_is_away
from verl.utils.text import printable


def _call_hub(label: str, call: Callable[[Any], Any]) -> Any:
    """Return what a function of huggingface_hub returns, or None if the repository has no such file."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        alone = f"{sys.executable} -m pip install -c constraints.txt huggingface_hub"
        raise ValueError(
            f"{label} needs the package huggingface_hub, which is not installed; the extras train and dense "
            f"bring it: {install_command('train')}, or alone: {alone}"
        ) from None
    try:
        return call(hub)
    except Exception as error:  # its versions use different HTTP libraries, whose exceptions differ
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None  # the local error means that the file is not cached and the hub can't be reached
        reason = re.sub(r"\?\S*", "", " ".join(str(error).split()))  # a signed address lets anybody in
        raise ValueError(
            f"{label} can't be had from the hub ({reason}); the same command goes on where this one was, "
            "on a machine with network"
        ) from None


def _leave_hub_alone_if_away(repository: str, path: str) -> None:
    """Take what is cached of a data set, if the hub does not answer within seconds."""
    with contextlib.suppress(ImportError):  # `_call_hub` says that huggingface_hub is missing
        problem = hub_problem(repository, path, "dataset", may_lack=True)
        if problem is not None and not is_offline():
            print(printable(f"note: {problem}; the cache is used"), file=sys.stderr, flush=True)
            leave_hub_alone()


def fetch_file(repository: str, path: str, folder: Path | None = None) -> Path | None:
    """Return a file of a repository, downloaded if it is not there yet, or None if there is no such file.

    Args:
        repository: name of the data set.
        path: the file's path in the repository.
        folder: the folder below which the file is. None: the hub's cache.

    Raises:
        ValueError: the hub can't be reached or refuses.
    """
    _leave_hub_alone_if_away(repository, path)
    kind: dict[str, Any] = {"repo_type": "dataset", "local_dir": folder}
    file = _call_hub(f"{path} of {repository}", lambda hub: hub.hf_hub_download(repository, path, **kind))
    return None if file is None else Path(file)


def fetch_folder(repository: str, path: str, folder: Path) -> None:
    """Download a repository's folder `path`, as `folder`/`path`. Raises ValueError as `fetch_file` does."""
    _leave_hub_alone_if_away(repository, ".gitattributes")
    # snapshot_download is not used, because it does not complain if the hub can't be reached.
    listed = _call_hub(
        f"{path}/ of {repository}", lambda hub: hub.list_repo_files(repository, repo_type="dataset")
    )
    names = [name for name in listed or () if name.startswith(f"{path}/")]
    if not names:
        raise ValueError(f"{repository} has no folder {path}")
    for name in names:
        fetch_file(repository, name, folder)


def fetch_model(name: str) -> Path:
    """Return the folder of a model in the hub's cache, with all files that it is read from.

    Raises ValueError as `fetch_file` does, or if the name is no model's.
    """
    use_cache_if_hub_is_away({"--model": name})
    kinds = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    excluded = ["consolidated*", "original/*"]  # the same weights in another form
    folder = _call_hub(
        name, lambda hub: hub.snapshot_download(name, allow_patterns=kinds, ignore_patterns=excluded)
    )
    if folder is None or not (Path(folder) / "config.json").is_file():
        raise ValueError(f"--model: {name} is no model's name on the hub: it has no config.json")
    return Path(folder)

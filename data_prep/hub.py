"""Files of data sets and models on the Hugging Face hub, by huggingface_hub.

Its resume and its checks, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy variables of the environment
are in force. Its exceptions become a ValueError of one line.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.utils.extras import install_command
from verl.utils.hub import hub_problem, is_offline, leave_hub_alone, local_folder, trouble_with_cached
from verl.utils.text import format_bytes, printable


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


MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
OTHER_WEIGHTS = ("*.bin", "*.bin.index.json")  # of models without *.safetensors
SAME_WEIGHTS = ("consolidated*", "original/*", "onnx/*", "openvino/*")  # in another form


def fetch_model(name: str, setting: str = "--model") -> Path:
    """Return the folder of a model in the hub's cache, with all files that it is read from.

    Args:
        name: The name of the model.
        setting: What names it, for the message.

    Raises:
        ValueError: As `fetch_file` does, or if the name is no model's, or if the disk has no room for it.
    """
    trouble = trouble_with_cached({setting: name})
    if trouble is not None:  # of this model alone: the hub may give the next one
        print(
            printable(f"note: {trouble.problem}; the cache is used for {name}"), file=sys.stderr, flush=True
        )
        folder = local_folder(name)
    else:
        folder = _fetch_snapshot(name, MODEL_FILES)
    if folder is None or not (folder / "config.json").is_file():
        raise ValueError(f"{setting}: {name} is no model's name on the hub: it has no config.json")
    if trouble is None and not any(folder.glob("*.safetensors")):
        _fetch_snapshot(name, OTHER_WEIGHTS)
    return folder


def _fetch_snapshot(name: str, kinds: Sequence[str]) -> Path | None:
    """Fetch those of a model's files that have these patterns, if the disk has room for them."""
    options: dict[str, Any] = {"allow_patterns": list(kinds), "ignore_patterns": list(SAME_WEIGHTS)}
    if not is_offline():
        files = _call_hub(name, lambda hub: hub.snapshot_download(name, dry_run=True, **options))
        num_bytes = sum(file.file_size or 0 for file in files or () if file.will_download)
        _check_room(name, num_bytes)
    folder = _call_hub(name, lambda hub: hub.snapshot_download(name, **options))
    return None if folder is None else Path(folder)


def _check_room(name: str, num_bytes: int) -> None:
    """Raise ValueError if the disk of the hub's cache has no room for a download."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(
            f"{name} needs {format_bytes(num_bytes)}, and {folder} has {format_bytes(free)} free; "
            "export HF_HOME=<folder on a file system with room>"
        )

"""Files of data set repositories on the Hugging Face hub, by huggingface_hub.

Its resume and its checks, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy variables of the environment
are in force. What it raises becomes a ValueError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOT_INSTALLED = "huggingface_hub is not installed: pip install -c constraints.txt huggingface_hub"


@contextmanager
def _errors_of_one_line(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # also those of the HTTP library below it, which its versions have others of
        reason = re.sub(r"\?\S*", "", " ".join(str(error).split()))  # a signed address lets anybody in
        raise ValueError(
            f"{what} can't be had from the hub ({reason}); the same command goes on where this one was"
        ) from None


def fetch_file(repository: str, path: str, folder: Path | None = None) -> Path | None:
    """A file below `folder` (None: in the hub's cache), downloaded if it is not there yet; None where the
    repository has no such file. Raises ValueError when the hub can't be reached or refuses.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise ValueError(NOT_INSTALLED) from None
    with _errors_of_one_line(f"{path} of {repository}"):
        try:
            return Path(hf_hub_download(repository, path, repo_type="dataset", local_dir=folder))
        except LocalEntryNotFoundError:  # also an EntryNotFoundError: not in the cache, and no hub
            raise
        except EntryNotFoundError:
            return None


def fetch_folder(repository: str, path: str, folder: Path) -> None:
    """A repository's folder `path`, as `folder`/`path`. Raises ValueError as `fetch_file` does."""
    try:
        from huggingface_hub import list_repo_files  # not snapshot_download: without a hub it is content
    except ImportError:
        raise ValueError(NOT_INSTALLED) from None
    with _errors_of_one_line(f"{path}/ of {repository}"):
        names = [
            name for name in list_repo_files(repository, repo_type="dataset") if name.startswith(f"{path}/")
        ]
    if not names:
        raise ValueError(f"{repository} has no folder {path}")
    for name in names:
        fetch_file(repository, name, folder)

"""Files of data set repositories on the Hugging Face hub.

    list_files(api, repository, revision) -> RemoteFile(path, size, sha256) of each, and the commit
    fetch_joined([part_aa, part_ab], target) -> the parts one after the other in one file, each part checked
    fetch_file(repository, path) -> a file in the hub's cache

huggingface_hub does the work: its resume, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the proxy variables of
the environment are in force. What it raises becomes a ValueError of one line.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**20

Report = Callable[[str], None]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set repository at one commit. `sha256`: None for small files, which git keeps."""

    repository: str
    commit: str
    path: str
    size: int
    sha256: str | None


@contextmanager
def plain_errors(what: str, advice: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into a ValueError: what can't be had, why, what to do."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ValueError(
            f"huggingface_hub is not installed: pip install huggingface_hub, or {advice}"
        ) from None
    import httpx  # what huggingface_hub raises when there is no connection

    try:
        yield
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        # "https://.../file?Signature=.." lets anybody in: only the part before it is shown.
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in reversed(lines) if line and not line.startswith("http")), lines[0])
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            reason = f"status {status}: it wants a token that may read it, set HF_TOKEN"
        elif status is not None:
            reason = f"status {status}"
        raise ValueError(f"{what} can't be had from the hub ({reason.partition('?')[0]}); {advice}") from None


def hub_api(endpoint: str | None = None) -> Any:
    """The hub's client, for `list_files` and `fetch_joined`."""
    with plain_errors("", "install it"):
        from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint)


def list_files(api: Any, repository: str, revision: str) -> list[RemoteFile]:
    """The files of a data set repository at the commit that the revision stands for now."""
    with plain_errors(repository, "the same command goes on where this one was"):
        info = api.dataset_info(repository, revision=revision, files_metadata=True)
    return [
        RemoteFile(repository, info.sha, entry.rfilename, entry.size or 0, entry.lfs and entry.lfs.sha256)
        for entry in info.siblings
    ]


def fetch_file(repository: str, path: str, advice: str) -> Path | None:
    """A file in the hub's cache, downloaded or found there; None where the repository has no such file.

    Raises ValueError when the hub can't be reached or refuses; `advice` ends its message.
    """
    with plain_errors(f"{path} of {repository}", advice):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(repository, path, repo_type="dataset"))
        except LocalEntryNotFoundError as error:  # also an EntryNotFoundError: not in the cache, and no hub
            raise OSError(str(error.__cause__ or error)) from None
        except EntryNotFoundError:
            return None


def fetched_bytes(target: Path) -> int:
    """What earlier calls of `fetch_joined` left of a file that is not finished."""
    left = [*target.parent.glob(f"{target.name}.*.partial"), *_parts_folder(target).rglob("*")]
    return sum(path.stat().st_size for path in left if path.is_file())


def fetch_joined(api: Any, parts: list[RemoteFile], target: Path, report: Report) -> None:
    """Writes the parts one after the other to `target`; goes on where an earlier call ended.

    Each part is checked before it is joined; at most one is on the disk twice. Raises ValueError: refused,
    no connection, a wrong checksum, no room on the disk, or another process at work on it.
    """
    if target.exists():
        return
    folder = _parts_folder(target)
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{parts[0].commit[:12]}.partial")
    advice = "the same command goes on where this one was"
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{folder}: another process is writing to it") from None
        with plain_errors(parts[0].repository, advice), partial.open("ab") as joined:
            start = 0
            for part in parts:
                if joined.tell() < start + part.size:
                    joined.truncate(start)  # what a kill left of this part
                    report(f"{part.path}: {part.size / 1e9:.2f} GB of {part.repository}")
                    path = Path(
                        api.hf_hub_download(
                            part.repository,
                            part.path,
                            repo_type="dataset",
                            revision=part.commit,
                            local_dir=folder,
                        )
                    )
                    _append_checked(path, part, joined, start)
                    path.unlink()
                start += part.size
        partial.replace(target)
        shutil.rmtree(folder)


def _parts_folder(target: Path) -> Path:
    return target.with_name(target.name + ".parts")


def _append_checked(path: Path, part: RemoteFile, joined: Any, start: int) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            joined.write(block)
    joined.flush()
    size = path.stat().st_size
    if size != part.size or part.sha256 not in (None, digest.hexdigest()):
        path.unlink()
        joined.truncate(start)
        raise ValueError(
            f"{part.path}: found {size:,} bytes with checksum {digest.hexdigest()}, "
            f"expected {part.size:,} with {part.sha256}: a proxy on the way may change it; "
            "start again to fetch it anew"
        )

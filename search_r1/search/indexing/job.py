"""One index from begun to finished, so that a kill at any moment loses little and never leaves half an index.

    IndexJob, Corpus -> <target>.building/{request.json, lock, index/}     the backend writes into index/
                     -> index/ with its manifest                           the manifest comes last
                     -> <target>                                           in one rename

The same job started again goes on in `<target>.building`. Another job (other corpus, other flags) for the
same target is refused, unless it may overwrite.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from search_r1.search.corpus import Corpus
from search_r1.search.corpus_files import Progress
from search_r1.search.indexing.corpus_check import CorpusReport
from search_r1.search.manifest import WORK_SUFFIX, Manifest, manifest_path, read_manifest, write_manifest


@dataclass(frozen=True)
class IndexJob:
    """What is to be built where.

    target: the finished index; a folder, or a file when `file_name` is set.
    backend: its name in the manifest.
    request: all that decides what the index is like, as JSON values; a resumed build must have the same.
    build: (corpus, folder, progress) -> parameters; writes into `folder`, where it finds what an earlier call
        left after a kill.
    needed_bytes: a guess of the disk space that it takes, with what is only needed while building.
    file_name: the file in `folder` that becomes `target`; None: the folder itself does.
    """

    target: Path
    backend: str
    request: dict[str, Any]
    build: Callable[[Corpus, Path, Progress], dict[str, Any]]
    needed_bytes: int
    file_name: str | None = None

    @property
    def work(self) -> Path:
        return self.target.with_name(self.target.name + WORK_SUFFIX)


def run_job(
    job: IndexJob,
    corpus: Corpus,
    checked: CorpusReport,
    *,
    overwrite: bool,
    command: list[str],
    progress: Progress,
    report: Callable[[str], None],
) -> bool:
    """Builds the index; False when it was there already.

    Args:
        checked: of this corpus, from `check_corpus`.
        overwrite: replace a finished index, or a begun one, of another corpus or other flags.
        command: kept in the manifest, to be shown when the index meets another corpus.

    Raises ValueError when the target is taken, when another process builds it, when the disk is too small,
    and when the corpus changes meanwhile.
    """
    begun = time.monotonic()
    of = corpus.fingerprint() | {"sha256": checked.sha256}
    identity = {"backend": job.backend, "corpus": of, "request": job.request}
    job.work.parent.mkdir(parents=True, exist_ok=True)
    with _locked(job.work):
        if _is_finished(job, identity, overwrite):
            return False
        resumed = _prepare_work(job, identity, overwrite)
        if resumed:
            report(f"going on with {job.work}")
        folder = job.work / "index"
        if not _marker(job).exists():
            _check_disk_space(job)
            folder.mkdir(exist_ok=True)
            parameters = _build_once(job, corpus, folder, progress)
            if checked.is_outdated():
                raise ValueError(f"{checked.path} was changed while the index was built: build it again")
            built = {
                "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - begun, 1),
                "resumed": resumed,
                "request": job.request,
                "command": command,
            }
            of_named = of | {"name": checked.path.name}
            _finish(job, folder, Manifest(job.backend, of_named, parameters, built))
        _publish(job, folder)
        return True


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Holds the lock of a work folder, and leaves none behind that is empty."""
    work.mkdir(exist_ok=True)
    with (work / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "not known"
            raise ValueError(f"{work}: another process builds this index now (process {owner})") from None
        if not _is_file_at(file.fileno(), work / "lock"):
            raise ValueError(f"{work}: another process has just finished this index; start again to see")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            if not (work / "index").exists():
                shutil.rmtree(work, ignore_errors=True)


def _is_file_at(fd: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(fd), path.stat())


def _is_finished(job: IndexJob, identity: dict[str, Any], overwrite: bool) -> bool:
    """Whether the target is this very index. Raises ValueError when it is something else that must stay."""
    if not job.target.exists():
        return False
    manifest = read_manifest(job.target)
    if manifest is None:
        raise ValueError(
            f"{job.target} exists and was not built by this program: remove it, or give another --save_dir"
        )
    of = {name: manifest.corpus.get(name) for name in identity["corpus"]}
    existing = {"backend": manifest.backend, "corpus": of, "request": manifest.built.get("request")}
    if existing == identity:
        if _read_note(job) in (identity, None):  # killed between the last rename and the end
            shutil.rmtree(job.work)
        return True
    if not overwrite:
        raise ValueError(
            f"{job.target} is an index {_difference(existing, identity)}: give another --save_dir, "
            "or --overwrite to replace it"
        )
    return False


def _difference(existing: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What sets an existing build apart: "of another corpus (...)", "built with max_length 180 (now 256)"."""
    if existing["corpus"] != wanted["corpus"]:
        count, digest = existing["corpus"].get("num_documents"), str(existing["corpus"].get("sha256"))[:12]
        given = wanted["corpus"]
        return (
            f"of another corpus ({count} documents, sha256 {digest}; the corpus given has "
            f"{given['num_documents']} documents, sha256 {given['sha256'][:12]})"
        )
    before, now = existing["request"] or {}, wanted["request"]
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    words = [f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names]
    return f"built with {', '.join(words)}" if words else f"for {existing['backend']}"


def _prepare_work(job: IndexJob, identity: dict[str, Any], overwrite: bool) -> bool:
    """Makes the work folder ready; True when it holds a begun build of the same index."""
    begun = _read_note(job)  # None: it is written before anything else, so there is nothing worth keeping
    if begun == identity:
        return (job.work / "index").exists()
    if begun is not None and not overwrite:
        raise ValueError(
            f"{job.work} holds a begun index {_difference(begun, identity)}: "
            "remove that folder, or give --overwrite to begin anew"
        )
    for path in (_marker(job), job.work / "parameters.json"):
        path.unlink(missing_ok=True)
    for path in (job.work / "index", job.work / "old"):
        shutil.rmtree(path, ignore_errors=True)
    _write_json(job.work / "request.json", identity)
    return False


def _read_note(job: IndexJob) -> dict[str, Any] | None:
    """What the work folder is for; None where it doesn't say."""
    try:
        return json.loads((job.work / "request.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_disk_space(job: IndexJob) -> None:
    there = sum(path.stat().st_size for path in job.work.rglob("*") if path.is_file())
    needed, free = job.needed_bytes - there, shutil.disk_usage(job.work).free
    if free < needed:
        raise ValueError(
            f"{job.target} needs about {needed / 2**30:.1f} GiB more on its disk while it is built, "
            f"{free / 2**30:.1f} GiB are free: make room, or give another --save_dir"
        )


def _inner(job: IndexJob, folder: Path) -> Path:
    """The index inside of the work folder."""
    return folder if job.file_name is None else folder / job.target.name


def _build_once(job: IndexJob, corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
    """What the backend's build returned; kept, so that a kill right after it doesn't mean to build again."""
    note = job.work / "parameters.json"
    if not note.exists():
        parameters = job.build(corpus, folder, progress)
        _write_json(note, parameters)
    return json.loads(note.read_text(encoding="utf-8"))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=1), encoding="utf-8")
    partial.replace(path)


def _marker(job: IndexJob) -> Path:
    """A file in the work folder that says: the index and its manifest are whole, only renames are left."""
    return job.work / "finished"


def _finish(job: IndexJob, folder: Path, manifest: Manifest) -> None:
    """Brings all files to the disk, then writes the manifest and the marker."""
    if job.file_name is not None and (folder / job.file_name).exists():
        (folder / job.file_name).replace(_inner(job, folder))
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    write_manifest(_inner(job, folder), manifest)
    _marker(job).touch()


def _publish(job: IndexJob, folder: Path) -> None:
    """The renames; each may be the first one after a kill.

    An old index is out of the way before the new one takes its name, and removed afterwards.
    """
    inner, old = _inner(job, folder), job.work / "old"
    if job.target.exists():
        old.mkdir(exist_ok=True)
        job.target.replace(old / job.target.name)
    if job.file_name is not None and manifest_path(inner).exists():
        manifest_path(inner).replace(manifest_path(job.target))  # before the file, which is nothing without
    inner.replace(job.target)
    shutil.rmtree(job.work, ignore_errors=True)

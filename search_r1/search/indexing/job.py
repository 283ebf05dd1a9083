"""Build one index so that a kill at any moment loses little and never leaves half an index.

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
from search_r1.search.indexing.corpus_check import CorpusReport
from search_r1.search.long_work import Progress
from search_r1.search.manifest import WORK_SUFFIX, Manifest, manifest_path, read_manifest, write_manifest
from search_r1.search.memory import check_room


@dataclass(frozen=True)
class IndexJob:
    """An index to build, and where.

    Attributes:
        target: The finished index: a folder, or a file when `file_name` is set.
        backend: The backend that will search it.
        request: All that decides what the index is like, as JSON values. A resumed build must have the same.
        build: Turns (corpus, folder, progress) into parameters for the manifest. It goes on from what is in
            `folder`.
        needed_bytes: A guess of the disk space that it takes while it is built.
        file_name: The file in `folder` that becomes `target`. None means that the folder itself does.
    """

    target: Path
    backend: str
    request: dict[str, Any]
    build: Callable[[Corpus, Path, Progress], dict[str, Any]]
    needed_bytes: int = 0
    file_name: str | None = None

    @property
    def work(self) -> Path:
        return self.target.with_name(self.target.name + WORK_SUFFIX)


def run_job(
    job: IndexJob,
    corpus: Corpus,
    corpus_report: CorpusReport,
    overwrite: bool,
    command: list[str],
    progress: Progress,
    report: Callable[[str], None],
) -> bool:
    """Build an index.

    Args:
        job: The index.
        corpus: Its corpus.
        corpus_report: The report of `check_corpus` on the corpus.
        overwrite: Replace a finished index, or a begun one, of another corpus or other flags.
        command: Is kept in the manifest, to be shown when the index meets another corpus.
        progress: Is told how far the build is.
        report: Gets lines about what happens.

    Returns:
        False if the index was there already.

    Raises:
        ValueError: If the target is taken, if another process builds it, if the disk is too small, and if the
            corpus changes meanwhile.
    """
    started = time.monotonic()
    hashes = corpus.fingerprint() | {"sha256": corpus_report.sha256}
    identity = {"backend": job.backend, "corpus": hashes, "request": job.request}
    folder = job.work / "index"
    job.work.parent.mkdir(parents=True, exist_ok=True)
    with _locked(job.work):
        noted = _noted_identity(job)
        if _is_finished(job, identity, noted, overwrite):
            return False
        resumed = noted == identity and folder.exists()
        if resumed:
            report(f"going on with {job.work}")
        else:
            _begin_anew(job, identity, noted, overwrite)
        parameters = job.build(corpus, folder, progress)
        if corpus_report.is_outdated():
            raise ValueError(f"{corpus_report.path} was changed while the index was built: build it again")
        built = {
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "resumed": resumed,
            "request": job.request,
            "command": command,
        }
        named_hashes = hashes | {"name": corpus_report.path.name}
        _install(job, folder, Manifest(job.backend, named_hashes, parameters, built))
        return True


def _noted_identity(job: IndexJob) -> Any:
    """Return the identity of the index that was begun in the work folder, or None if there is no note.

    The note is written before anything else, so without it there is nothing worth keeping.
    """
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_note_path(job).read_text(encoding="utf-8"))
    return None


def _note_path(job: IndexJob) -> Path:
    return job.work / "request.json"


def _is_finished(job: IndexJob, identity: dict[str, Any], noted: Any, overwrite: bool) -> bool:
    """Return whether the target is the index that the job is to build.

    Raises ValueError if it is another one, which is not to be replaced.
    """
    if not job.target.exists():
        return False
    existing = _identity_of(job.target, identity)
    if existing == identity:
        if noted in (identity, None):  # a build was killed between the last rename and the end
            shutil.rmtree(job.work)
        return True
    if not overwrite:
        raise ValueError(
            f"{job.target} is an index {_difference(existing, identity)}: give another --save_dir, "
            "or --overwrite to replace it"
        )
    return False


def _begin_anew(job: IndexJob, identity: dict[str, Any], noted: Any, overwrite: bool) -> None:
    """Note what is begun, and make an empty folder for it.

    Raises ValueError if another index was begun, which is not to be replaced, or if the disk is too small.
    """
    if noted not in (identity, None) and not overwrite:
        raise ValueError(
            f"{job.work} holds a begun index {_difference(noted, identity)}: "
            "remove that folder, or give --overwrite to begin anew"
        )
    folder = job.work / "index"
    shutil.rmtree(folder, ignore_errors=True)
    _note_path(job).write_text(json.dumps(identity, indent=1), encoding="utf-8")
    check_room(job.work, job.needed_bytes)
    folder.mkdir()


def _install(job: IndexJob, folder: Path, manifest: Manifest) -> None:
    """Write a built index and its manifest to the disk, and rename it to the target.

    A kill may come after any rename. An old index is out of the way before the new one takes its name, and is
    removed afterwards.
    """
    inner = folder
    if job.file_name is not None:
        inner = (folder / job.file_name).rename(folder / job.target.name)
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_manifest(inner, manifest)
    if job.target.exists():
        shutil.rmtree(job.work / "old", ignore_errors=True)
        (job.work / "old").mkdir()
        job.target.rename(job.work / "old" / job.target.name)
    if job.file_name is not None:  # the manifest goes before the file, which is nothing without it
        manifest_path(inner).replace(manifest_path(job.target))
    inner.rename(job.target)
    shutil.rmtree(job.work, ignore_errors=True)


@contextlib.contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the lock of a work folder, and leave none behind that is empty."""
    work.mkdir(exist_ok=True)
    with (work / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{work}: another process builds this index now") from None
        if not os.fstat(file.fileno()).st_nlink:
            raise ValueError(f"{work}: another process has just finished this index; start again to see")
        try:
            yield
        finally:
            if not (work / "index").exists():
                shutil.rmtree(work, ignore_errors=True)


def _identity_of(target: Path, template: dict[str, Any]) -> dict[str, Any]:
    """Return what a finished index is, with the fields that `template` has.

    Raises ValueError for an index that isn't ours.
    """
    manifest = read_manifest(target)
    if manifest is None:
        remedy = "remove it, or give another --save_dir"
        raise ValueError(f"{target} exists and was not built by this program: {remedy}")
    corpus = {name: manifest.corpus.get(name) for name in template["corpus"]}
    return {"backend": manifest.backend, "corpus": corpus, "request": manifest.built.get("request")}


def _difference(existing: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Say what sets an existing build apart.

    Examples are "of another corpus (...)" and "built with max_length 180 (now 256)".
    """
    if existing["corpus"] != wanted["corpus"]:
        existing_corpus, wanted_corpus = (
            f"{corpus['num_documents']} documents, sha256 {str(corpus['sha256'])[:12]}"
            for corpus in (existing["corpus"], wanted["corpus"])
        )
        return f"of another corpus ({existing_corpus}; the corpus given has {wanted_corpus})"
    old = existing["request"] or {}
    new = wanted["request"]
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    words = [f"{name} {old.get(name)!r} (now {new.get(name)!r})" for name in names]
    return f"built with {', '.join(words)}" if words else f"for {existing['backend']}"

"""Checkpoints at a remote place (fsspec): `trainer.remote_dir=s3://bucket/runs`, gs://.., file://.. and more.

    global_step_N gets its name -> a thread uploads its files -> COMPLETE.json, sizes and sha256, comes last
    resume: the newest whole one of both places; a remote one is downloaded aside, checked, and renamed

REMOTE_DIR/<run's folder>/global_step_N/...       what is there without COMPLETE.json was never whole
REMOTE_DIR/<run's folder>/records/...             metrics.jsonl, trajectories and the like, at each upload
REMOTE_DIR/<run's folder>/records/COMPLETE.json   their sizes and sha256
REMOTE_DIR/<run's folder>/OWNER                   an id that the run's folder has too: one place is one run's

An error of the remote place before a run starts ends the run: it never starts at step 0 because a bucket did
not answer. While the run goes on, an upload is tried again until `trainer.upload_deadline`; what could not be
uploaded stays on the local disk. Whoever can write to the place can name files as he likes: a name that would
leave the run's folder makes a checkpoint a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.utils.durable import free_name, sync_tree
from verl.utils.extras import install_command
from verl.utils.file_sums import damage_in, stays_inside
from verl.utils.text import printable

MANIFEST = "COMPLETE.json"
STEP_NAME = re.compile(r"global_step_([0-9]+)")
OWNER = "OWNER"
RECORDS: tuple[str, ...] = (
    "trajectories",
    "branches",
    "validation.jsonl",
    "evaluations.jsonl",
    "restarts.jsonl",
    "judge_verdicts.jsonl",
)
RECORDS += ("config.yaml", "metrics.jsonl")  # metrics.jsonl comes last: it is there when all are
RECORDS_FOLDER = "records"
FIRST_PAUSE = 1.0  # seconds between the first two tries
LONGEST_PAUSE = 60.0  # seconds between two tries at most; each pause is twice as long as the one before
JOIN_SECONDS = 10.0  # how long an end in haste waits for the file that is under way


def _say(line: str) -> None:
    """Print a line in which names and errors of the remote place are no commands to a terminal."""
    print(printable(line), flush=True)


class RemoteFailed(ValueError):
    """An error of a remote place that does not answer, or does not hold what it said."""


class CheckpointDamaged(ValueError):
    """An error of a local checkpoint whose files are not those that were written."""


class RemoteDamaged(RemoteFailed):
    """An error of a checkpoint at a remote place whose files are not those that were uploaded."""


class RemoteStore:
    """A run's folder at a remote place.

    Args:
        remote_dir: address of the place, `trainer.remote_dir`.
        run_name: name of the run's folder there.

    Raises:
        ValueError: if the address can't be used.
    """

    def __init__(self, remote_dir: str, run_name: str) -> None:
        options: dict[str, Any] = {}
        if remote_dir.startswith("s3://"):  # a stalled request is tried again here, not for an hour there
            waits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
            options["config_kwargs"] = waits
        try:
            import fsspec
            from fsspec.implementations.local import LocalFileSystem

            self.fs, base = fsspec.core.url_to_fs(remote_dir, **options)
        except ImportError as error:
            raise ValueError(
                f"trainer.remote_dir={remote_dir}: {error}; install it: {install_command('remote')}"
            ) from error
        except Exception as error:  # of any of fsspec's file systems
            raise ValueError(f"trainer.remote_dir={remote_dir}: {error}") from error
        self._uploaded: set[tuple[str, str]] = set()
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.url = remote_dir
        self.base = base.rstrip("/")
        self.root = f"{self.base}/{run_name}"

    def _call(self, call: Callable[..., Any], *arguments: Any, **flags: Any) -> Any:
        """Return what the place answers to a call of its file system.

        Raises FileNotFoundError if it says so, and RemoteFailed for every other error.
        """
        try:
            self.fs.invalidate_cache()
            return call(*arguments, **flags)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any of fsspec's file systems
            raise RemoteFailed(f"trainer.remote_dir={self.url}: {type(error).__name__}: {error}") from error

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder, or [] if there is no such folder.

        `glob`, `find` and `exists` are of no use here, as they hide errors.
        """
        try:
            return [path.rstrip("/").split("/")[-1] for path in self._call(self.fs.ls, folder, detail=False)]
        except FileNotFoundError:
            return []

    def _below(self, folder: str) -> Iterator[str]:
        """Yield the names of all files below a folder."""
        for entry in self._call(self.fs.ls, folder, detail=True):
            name = entry["name"].rstrip("/").split("/")[-1]
            if entry["type"] == "directory":
                yield from (f"{name}/{inner}" for inner in self._below(f"{folder}/{name}"))
            else:
                yield name

    def check(self, run_dir: Path) -> None:
        """Check that the place can be used, and mark it as this run's.

        Raises RemoteFailed if there is no such place, nothing can be written there, or another run has it.
        """
        local_marker = run_dir / OWNER
        remote_marker = f"{self.root}/{OWNER}"
        try:
            if self.is_local and not Path(self.base).is_dir():
                # A missing mount is an error, not an empty place.
                raise FileNotFoundError(f"no folder {self.base}")
            owner = (
                self._call(self.fs.cat_file, remote_marker).decode(errors="replace")
                if OWNER in self._names(self.root)
                else None
            )
            run_id = local_marker.read_text(encoding="utf-8") if local_marker.exists() else None
            if owner is not None and run_id is None and not (run_dir / "metrics.jsonl").exists():
                run_id = owner  # the run goes on, on a machine that has nothing of it
            if owner is not None and run_id != owner:
                raise RemoteFailed(
                    f"trainer.remote_dir={self.url}: {self.root} is of another run than {run_dir}; expected "
                    "one place for each. Choose another name (trainer.default_local_dir), or another place"
                )
            run_id = run_id or uuid.uuid4().hex
            run_dir.mkdir(parents=True, exist_ok=True)
            self._put(run_id.encode(), remote_marker)
            local_marker.write_text(run_id, encoding="utf-8")
        except FileNotFoundError as error:
            raise RemoteFailed(f"trainer.remote_dir={self.url}: there is no such place ({error})") from error

    def _put(self, content: bytes | Path, place: str) -> None:
        if self.is_local:
            self._call(self.fs.makedirs, place.rsplit("/", 1)[0], exist_ok=True)
        if isinstance(content, Path):
            self._call(self.fs.put_file, str(content), place)
        else:
            self._call(self.fs.pipe_file, place, content)

    def steps(self) -> list[int]:
        """Return the steps with a whole checkpoint, oldest first.

        Raises RemoteFailed if the place does not answer.
        """
        return [step for step, is_whole in self._all_steps() if is_whole]

    def unfinished_steps(self) -> list[int]:
        """Return the steps whose folder is there without COMPLETE.json, oldest first.

        Raises RemoteFailed if the place does not answer.
        """
        return [step for step, is_whole in self._all_steps() if not is_whole]

    def _all_steps(self) -> list[tuple[int, bool]]:
        """Return the steps that have a folder, oldest first, and whether it has COMPLETE.json."""
        matches = (STEP_NAME.fullmatch(name) for name in self._names(self.root))
        steps = sorted(int(match.group(1)) for match in matches if match)
        return [(step, MANIFEST in self._names(f"{self.root}/global_step_{step}")) for step in steps]

    def upload(self, step: int, folder: Path, run_dir: Path, ended: threading.Event | None = None) -> None:
        """Upload a whole checkpoint, and the run's records so far.

        If this is called again after a failure, it sends what was not sent before.

        Args:
            step: step of the checkpoint.
            folder: the checkpoint's folder.
            run_dir: the run's folder, for the records.
            ended: breaks the upload off once it is set.

        Raises:
            RemoteFailed: if the place does not take the files.
            CheckpointDamaged: if the files are not those that were written (SUMS.json).
            OSError: if the files can't be read.
            InterruptedError: if `ended` was set.
        """
        damage = damage_in(folder)
        if damage is not None:
            raise CheckpointDamaged(f"{folder} is damaged: {damage}")
        checkpoint = f"{self.root}/{folder.name}"
        files = dict[str, dict[str, Any]]()
        self._uploaded = {sent for sent in self._uploaded if sent[0] == checkpoint}
        if not self._uploaded and MANIFEST in self._names(checkpoint):  # that one is of other content
            self._call(self.fs.rm_file, f"{checkpoint}/{MANIFEST}")

        def go_on() -> None:
            if ended is not None and ended.is_set():
                raise InterruptedError(f"the upload of step {step} was broken off")

        for path, name in _files(folder):
            files[name] = _size_and_digest(path)
            if (checkpoint, name) not in self._uploaded:
                go_on()
                self._put(path, f"{checkpoint}/{name}")
                self._uploaded.add((checkpoint, name))
        self._put_records(run_dir)
        for name, expected in files.items():
            size = self._call(self.fs.size, f"{checkpoint}/{name}")
            if size != expected["size"]:
                self._uploaded.discard((checkpoint, name))
                raise RemoteFailed(f"{checkpoint}/{name} has {size} bytes; expected {expected['size']}")
        go_on()
        manifest = json.dumps({"step": step, "files": files}, indent=1).encode()
        self._put(manifest, f"{checkpoint}/{MANIFEST}.part")
        self._call(self.fs.mv, f"{checkpoint}/{MANIFEST}.part", f"{checkpoint}/{MANIFEST}")
        self._uploaded.clear()

    def _put_records(self, run_dir: Path) -> None:
        """Upload the run's records, and after them their sizes and sums."""
        sums = dict[str, dict[str, Any]]()
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "record"  # a record grows while it is uploaded
            for record in RECORDS:
                for path, inner in _files(run_dir / record):
                    name = f"{record}/{inner}" if inner else record
                    shutil.copyfile(path, copy)
                    sums[name] = _size_and_digest(copy)
                    self._put(copy, f"{self.root}/{RECORDS_FOLDER}/{name}")
        self._put(json.dumps({"files": sums}, indent=1).encode(), f"{self.root}/{RECORDS_FOLDER}/{MANIFEST}")

    def fetch(self, step: int, run_dir: Path) -> None:
        """Download a checkpoint to its place in the run's folder, and the records if the folder has none.

        Raises:
            RemoteDamaged: if the checkpoint is not what its COMPLETE.json and its SUMS.json say.
            RemoteFailed: if the place does not answer.
        """
        checkpoint = f"{self.root}/global_step_{step}"
        incomplete = run_dir / f"global_step_{step}.incomplete"
        shutil.rmtree(incomplete, ignore_errors=True)
        incomplete.mkdir(parents=True)
        try:
            for name, expected in self._files_of(checkpoint).items():
                target = incomplete / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._call(self.fs.get_file, f"{checkpoint}/{name}", str(target))
                if _size_and_digest(target) != expected:
                    raise RemoteDamaged(f"{checkpoint}/{name} is damaged: it is not what {MANIFEST} says")
        except FileNotFoundError as error:
            raise RemoteDamaged(f"{checkpoint} lacks {error}; expected what {MANIFEST} names") from error
        damage = damage_in(incomplete)
        if damage is not None:
            raise RemoteDamaged(f"{checkpoint} was damaged before it was uploaded: {damage}")
        if not (run_dir / "metrics.jsonl").exists():
            self._fetch_records(run_dir)
        sync_tree(incomplete)
        target = run_dir / f"global_step_{step}"
        if target.exists():  # its files are damaged
            target.rename(free_name(target, "damaged"))
        incomplete.rename(target)

    def _files_of(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return what a folder's COMPLETE.json says: name -> size and sha256.

        Raises:
            RemoteDamaged: if it can't be read, or has a name that leaves the folder.
            FileNotFoundError: if there is none.
        """
        manifest = f"{folder}/{MANIFEST}"
        try:
            files = json.loads(self._call(self.fs.cat_file, manifest))["files"]
            expected = {
                name: {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
                for name, entry in files.items()
            }
        except RemoteFailed:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RemoteDamaged(f"{manifest} can't be read ({type(error).__name__}: {error})") from error
        for name in expected:
            if not stays_inside(name):
                raise RemoteDamaged(f"{manifest} names {name!r}, which is not a file below {folder}")
        return expected

    def _fetch_records(self, run_dir: Path) -> None:
        """Download the run's records. One that is not what its sums say is taken, and named.

        A record is for people: damage in it changes nothing that the run learns. It differs from its sums,
        too, if an upload was broken off.
        """
        if RECORDS_FOLDER not in self._names(self.root):
            return
        folder = f"{self.root}/{RECORDS_FOLDER}"
        expected: dict[str, dict[str, Any]] = {}
        try:
            expected = self._files_of(folder)
        except (RemoteDamaged, FileNotFoundError) as error:
            _say(f"note: the records in {folder} can't be compared with their sums: {error}")
        # metrics.jsonl comes last: it is there when all are.
        names = sorted({*self._below(folder), *expected} - {MANIFEST}, key=lambda name: name == RECORDS[-1])
        for name in names:
            if not stays_inside(name) or name.split("/")[0] not in RECORDS:
                _say(f"warning: {folder} has {name!r}, which is no record of a run; it is left")
                continue
            target = run_dir / name
            partial_file = run_dir / f"{name}.part"
            partial_file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._call(self.fs.get_file, f"{folder}/{name}", str(partial_file))
            except FileNotFoundError:
                _say(f"warning: the record {folder}/{name} is missing")
                continue
            if expected and _size_and_digest(partial_file) != expected.get(name):
                _say(f"warning: the record {folder}/{name} is not what its sums say; it is taken")
            partial_file.replace(target)

    def set_aside(self, step: int | None) -> None:
        """Rename a step's folder to *.old-K, or the run's folder if `step` is None.

        The manifests are renamed first: what is half renamed is not whole. Raises RemoteFailed if the place
        does not answer.
        """
        name = self.root.split("/")[-1] if step is None else f"global_step_{step}"
        parent = self.base if step is None else self.root
        names = self._names(parent)
        number = 1
        if name not in names:
            return
        while f"{name}.old-{number}" in names:
            number += 1
        for whole_step in [step] if step is not None else self.steps():
            manifest = f"{self.root}/global_step_{whole_step}/{MANIFEST}"
            with suppress(FileNotFoundError):
                self._call(self.fs.mv, manifest, f"{manifest}.old")
        self._call(self.fs.mv, f"{parent}/{name}", f"{parent}/{name}.old-{number}", recursive=True)

    def delete(self, step: int) -> None:
        """Delete a checkpoint.

        The manifest is deleted first: what is half deleted is not whole. Raises RemoteFailed if the place
        does not answer.
        """
        checkpoint = f"{self.root}/global_step_{step}"
        with suppress(FileNotFoundError):
            self._call(self.fs.rm_file, f"{checkpoint}/{MANIFEST}")
            self._call(self.fs.rm, checkpoint, recursive=True)


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, name below root) of all files; if the root is a file itself, its name is ""."""
    if root.is_file():
        yield root, ""
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield path, path.relative_to(root).as_posix()


def _size_and_digest(path: Path) -> dict[str, Any]:
    """Return the entry of a file in COMPLETE.json."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class Uploads:
    """The thread that uploads checkpoints, in their order.

    Args:
        store: the remote place.
        run_dir: the run's folder.
        keep: how many remote checkpoints stay, the newest ones; None for all.
        deadline: seconds until a checkpoint is given up.

    Attributes:
        whole: steps that are, or were, whole at the remote place: their local copies may go.

    Raises:
        RemoteFailed: if the remote place does not answer at the start.
    """

    def __init__(self, store: RemoteStore, run_dir: Path, keep: int | None, deadline: float) -> None:
        self.store = store
        self.run_dir = run_dir
        self.keep = keep
        self.deadline = deadline
        self.whole = set(store.steps())
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        self._queue.put(step)

    def close(self, in_haste: bool) -> None:
        """Wait for what is still to be uploaded, and end the thread.

        Args:
            in_haste: whether to wait only some seconds, for the file that is under way.
        """
        if in_haste:
            self._ended.set()
        self._queue.put(None)
        self._thread.join(JOIN_SECONDS if in_haste else None)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None and not self._ended.is_set():
            if self._upload(step):
                self._prune()

    def _upload(self, step: int) -> bool:
        folder = self.run_dir / f"global_step_{step}"
        until = time.monotonic() + self.deadline
        pause = FIRST_PAUSE
        while folder.is_dir() and not self._ended.is_set():
            try:
                self.store.upload(step, folder, self.run_dir, self._ended)
                self.whole.add(step)
                return True
            except CheckpointDamaged as error:
                _say(f"warning: checkpoint {step} is not uploaded: {error}")
                return False
            except (RemoteFailed, OSError) as error:
                problem = str(error)
            if time.monotonic() + pause > until:
                _say(
                    f"warning: checkpoint {step} could not be uploaded within {self.deadline:g} s "
                    f"(trainer.upload_deadline): {problem}. It stays in {folder}."
                )
                return False
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _prune(self) -> None:
        """Delete old checkpoints at the remote place.

        If one can't be deleted now, this is tried again after the next upload.
        """
        try:
            for old_step in self.store.steps()[: -self.keep] if self.keep else []:
                self.store.delete(old_step)
        except (RemoteFailed, OSError) as error:
            _say(f"warning: an old checkpoint could not be deleted there: {error}")

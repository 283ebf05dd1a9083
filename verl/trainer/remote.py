"""Checkpoints elsewhere: `trainer.remote_dir=s3://bucket/runs`, gs://.., file://.., whatever fsspec reaches.

    global_step_N gets its name -> a thread uploads its files -> COMPLETE.json, sizes and sha256, comes last
    resume: the newest whole one of both places; a remote one is downloaded aside, checked, and renamed

REMOTE_DIR/<run's folder>/global_step_N/...       what is there without COMPLETE.json was never whole
REMOTE_DIR/<run's folder>/records/...             metrics.jsonl, trajectories and the like, at each upload
REMOTE_DIR/<run's folder>/OWNER                   an id that the run's folder has too: one place is one run's

An error of the remote place before a run starts ends it: it never starts at step 0 because a bucket did not
answer. While the run goes on an upload is tried again until `trainer.upload_deadline`; what could not be
uploaded stays on the local disk.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.utils.durable import sync_tree

MANIFEST = "COMPLETE.json"
OWNER = "OWNER"
RECORDS: tuple[str, ...] = (
    "trajectories",
    "branches",
    "validation.jsonl",
    "evaluations.jsonl",
    "restarts.jsonl",
    "judge_verdicts.jsonl",
)
RECORDS += ("config.yaml", "metrics.jsonl")  # the last one is there when all are
# seconds between two tries
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
JOIN_SECONDS = 10.0


class RemoteFailed(ValueError):
    """The remote place does not answer, or does not hold what it said."""


class RemoteStore:
    """A run's folder at a remote place. ValueError: the address can't be used."""

    def __init__(self, remote_dir: str, run_name: str) -> None:
        options: dict[str, Any] = {}
        if remote_dir.startswith("s3://"):  # a request that stalls is tried again here, not for an hour there
            waits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
            options["config_kwargs"] = waits
        try:
            import fsspec
            from fsspec.implementations.local import LocalFileSystem

            self.fs, base = fsspec.core.url_to_fs(remote_dir, **options)
        except ImportError as error:
            raise ValueError(
                f"trainer.remote_dir={remote_dir}: {error}; install it: "
                "pip install -c constraints.txt -e '.[remote]'"
            ) from error
        except Exception as error:  # of any of fsspec's file systems
            raise ValueError(f"trainer.remote_dir={remote_dir}: {error}") from error
        self._sent: set[tuple[str, str]] = set()
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.url = remote_dir
        self.base = base.rstrip("/")
        self.root = f"{self.base}/{run_name}"

    def _ask(self, call: Callable[..., Any], *arguments: Any, **flags: Any) -> Any:
        """What the place answers. RemoteFailed; FileNotFoundError."""
        try:
            self.fs.invalidate_cache()
            return call(*arguments, **flags)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any of fsspec's file systems
            raise RemoteFailed(f"trainer.remote_dir={self.url}: {type(error).__name__}: {error}") from error

    def _names(self, folder: str) -> list[str]:
        """What a folder has; [] if there is none. Not by `glob`, `find` or `exists`, which hide errors."""
        try:
            return [path.rstrip("/").split("/")[-1] for path in self._ask(self.fs.ls, folder, detail=False)]
        except FileNotFoundError:
            return []

    def _below(self, folder: str) -> Iterator[str]:
        """The names of all files below a folder."""
        for entry in self._ask(self.fs.ls, folder, detail=True):
            name = entry["name"].rstrip("/").split("/")[-1]
            if entry["type"] == "directory":
                yield from (f"{name}/{inner}" for inner in self._below(f"{folder}/{name}"))
            else:
                yield name

    def check(self, run_dir: Path) -> None:
        """RemoteFailed: there is no such place, nothing can be written there, or another run has it."""
        mine = run_dir / OWNER
        theirs = f"{self.root}/{OWNER}"
        try:
            if self.is_local and not Path(self.base).is_dir():
                raise FileNotFoundError(f"no folder {self.base}")  # a mount that is away is no new place
            owner = self._ask(self.fs.cat_file, theirs).decode() if OWNER in self._names(self.root) else None
            own = mine.read_text(encoding="utf-8") if mine.exists() else None
            if owner is not None and own is None and not (run_dir / "metrics.jsonl").exists():
                own = owner  # a run that goes on, on a machine that has nothing
            if owner is not None and own != owner:
                raise RemoteFailed(
                    f"trainer.remote_dir={self.url}: {self.root} is of another run than {run_dir}; expected "
                    "one place for each. Choose another name (trainer.default_local_dir), or another place"
                )
            own = own or uuid.uuid4().hex
            run_dir.mkdir(parents=True, exist_ok=True)
            self._put(own.encode(), theirs)
            mine.write_text(own, encoding="utf-8")
        except FileNotFoundError as error:
            raise RemoteFailed(f"trainer.remote_dir={self.url}: there is no such place ({error})") from error

    def _put(self, content: bytes | Path, place: str) -> None:
        if self.is_local:
            self._ask(self.fs.makedirs, place.rsplit("/", 1)[0], exist_ok=True)
        if isinstance(content, Path):
            self._ask(self.fs.put_file, str(content), place)
        else:
            self._ask(self.fs.pipe_file, place, content)

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first. RemoteFailed."""
        folders = [name.removeprefix("global_step_") for name in self._names(self.root)]
        steps = [int(name) for name in folders if name.isdigit()]
        return sorted(step for step in steps if MANIFEST in self._names(f"{self.root}/global_step_{step}"))

    def upload(self, step: int, folder: Path, run_dir: Path, ended: threading.Event | None = None) -> None:
        """A whole checkpoint, and the run's records so far. Called again after a failure, it sends what was
        not sent. RemoteFailed, OSError; InterruptedError: `ended` was set.
        """
        place = f"{self.root}/{folder.name}"
        files = dict[str, dict[str, Any]]()
        self._sent = {each for each in self._sent if each[0] == place}
        if not self._sent and MANIFEST in self._names(place):  # of other content
            self._ask(self.fs.rm_file, f"{place}/{MANIFEST}")

        def go_on() -> None:
            if ended is not None and ended.is_set():
                raise InterruptedError(f"the upload of step {step} was broken off")

        for path, name in _files(folder):
            files[name] = {"size": path.stat().st_size, "sha256": _digest(path)}
            if (place, name) not in self._sent:
                go_on()
                self._put(path, f"{place}/{name}")
                self._sent.add((place, name))
        for record in RECORDS:
            for path, name in _files(run_dir / record):
                self._put(path, f"{self.root}/records/{record}" + (f"/{name}" if name else ""))
        for name, about in files.items():
            size = self._ask(self.fs.size, f"{place}/{name}")
            if size != about["size"]:
                self._sent.discard((place, name))
                raise RemoteFailed(f"{place}/{name} has {size} bytes; expected {about['size']}")
        go_on()
        manifest = json.dumps({"step": step, "files": files}, indent=1).encode()
        self._put(manifest, f"{place}/{MANIFEST}.part")
        self._ask(self.fs.mv, f"{place}/{MANIFEST}.part", f"{place}/{MANIFEST}")
        self._sent.clear()

    def fetch(self, step: int, run_dir: Path) -> None:
        """Downloads a checkpoint to its place in the run's folder, checked against the manifest, and records
        where the folder has none. RemoteFailed.
        """
        place = f"{self.root}/global_step_{step}"
        aside = run_dir / f"global_step_{step}.incomplete"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            files = json.loads(self._ask(self.fs.cat_file, f"{place}/{MANIFEST}"))["files"]
            for name, about in files.items():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._ask(self.fs.get_file, f"{place}/{name}", str(target))
                if target.stat().st_size != about["size"] or _digest(target) != about["sha256"]:
                    raise RemoteFailed(f"{place}/{name} is damaged: it is not what {MANIFEST} says")
            if not (run_dir / "metrics.jsonl").exists() and "records" in self._names(self.root):
                names = sorted(self._below(f"{self.root}/records"), key=lambda name: name == "metrics.jsonl")
                for name in names:
                    target = run_dir / name
                    part = run_dir / f"{name}.part"
                    part.parent.mkdir(parents=True, exist_ok=True)
                    self._ask(self.fs.get_file, f"{self.root}/records/{name}", str(part))
                    part.replace(target)
        except FileNotFoundError as error:
            raise RemoteFailed(f"{place} lacks {error}; expected what {MANIFEST} names") from error
        sync_tree(aside)
        aside.rename(run_dir / f"global_step_{step}")

    def set_aside(self, step: int | None) -> None:
        """Another name, *.old-K, for a step's folder, or for all of the run's. What is half renamed is not
        whole. RemoteFailed.
        """
        name = self.root.split("/")[-1] if step is None else f"global_step_{step}"
        parent = self.base if step is None else self.root
        others = self._names(parent)
        number = 1
        if name not in others:
            return
        while f"{name}.old-{number}" in others:
            number += 1
        for each in [step] if step is not None else self.steps():
            manifest = f"{self.root}/global_step_{each}/{MANIFEST}"
            with suppress(FileNotFoundError):
                self._ask(self.fs.mv, manifest, f"{manifest}.old")
        self._ask(self.fs.mv, f"{parent}/{name}", f"{parent}/{name}.old-{number}", recursive=True)

    def delete(self, step: int) -> None:
        """The manifest first: what is half deleted is not whole. RemoteFailed."""
        place = f"{self.root}/global_step_{step}"
        with suppress(FileNotFoundError):
            self._ask(self.fs.rm_file, f"{place}/{MANIFEST}")
            self._ask(self.fs.rm, place, recursive=True)


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """(path, name below root) of all files; of a file itself, ""."""
    if root.is_file():
        yield root, ""
    elif root.is_dir():
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield path, path.relative_to(root).as_posix()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Uploads:
    """The thread that uploads checkpoints, in their order.

    Attributes:
        whole: steps that are, or were, whole elsewhere: their local copies may go.
    """

    def __init__(self, store: RemoteStore, run_dir: Path, keep: int | None, deadline: float) -> None:
        """keep: remote checkpoints that stay, the newest (None: all). deadline: seconds until a checkpoint is
        given up. RemoteFailed.
        """
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
        """Waits for what is still to be uploaded; in_haste: some seconds, for the file that is under way."""
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
            except (RemoteFailed, OSError) as error:
                problem = str(error)
            if time.monotonic() + pause > until:
                print(
                    f"warning: checkpoint {step} could not be uploaded within {self.deadline:g} s "
                    f"(trainer.upload_deadline): {problem}. It stays in {folder}.",
                    flush=True,
                )
                return False
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _prune(self) -> None:
        """Deletes the old ones there; what can't be deleted now is tried after the next upload."""
        try:
            for old in self.store.steps()[: -self.keep] if self.keep else []:
                self.store.delete(old)
        except (RemoteFailed, OSError) as error:
            print(f"warning: an old checkpoint could not be deleted there: {error}", flush=True)

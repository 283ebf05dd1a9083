"""Checkpoints elsewhere: `trainer.remote_dir=s3://bucket/runs`, gs://.., file://.., whatever fsspec reaches.

    global_step_N gets its name -> a thread uploads its files -> COMPLETE.json, sizes and sha256, comes last
    resume: the newest whole one of both places; a remote one is downloaded aside, checked, and renamed

REMOTE_DIR/<run's folder>/global_step_N/...       what is there without COMPLETE.json was never whole
REMOTE_DIR/<run's folder>/records/...             metrics.jsonl, trajectories and the like, at each upload

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "COMPLETE.json"
RECORDS = (
    "metrics.jsonl",
    "validation.jsonl",
    "evaluations.jsonl",
    "restarts.jsonl",
    "config.yaml",
    "trajectories",
)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two tries


class RemoteFailed(ValueError):
    """The remote place does not answer, or does not hold what it said."""


class RemoteStore:
    """A run's folder at a remote place. ValueError: the address can't be used."""

    def __init__(self, remote_dir: str, run_name: str, options: dict[str, Any] | None = None) -> None:
        options = dict(options or {})
        if remote_dir.startswith("s3://"):  # a request that stalls is tried again here, not for an hour there
            waits = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
            options.setdefault("config_kwargs", waits)
        elif remote_dir.startswith("file://"):
            options.setdefault("auto_mkdir", True)
        try:
            import fsspec

            self.fs, root = fsspec.core.url_to_fs(remote_dir, **options)
        except ImportError as error:
            raise ValueError(
                f"trainer.remote_dir={remote_dir}: {error}; install it: "
                "pip install -c constraints.txt -e '.[remote]'"
            ) from error
        except Exception as error:  # of any of fsspec's file systems
            raise ValueError(f"trainer.remote_dir={remote_dir}: {error}") from error
        self._sent: set[tuple[str, str]] = set()
        self.url, self.root = remote_dir, f"{root.rstrip('/')}/{run_name}"

    def _ask(self, call: Callable[..., Any], *arguments: Any, **flags: Any) -> Any:
        """What the place answers. RemoteFailed."""
        try:
            self.fs.invalidate_cache()
            return call(*arguments, **flags)
        except FileNotFoundError:
            raise
        except Exception as error:  # of any of fsspec's file systems
            raise RemoteFailed(f"trainer.remote_dir={self.url}: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """RemoteFailed: nothing can be written there."""
        try:
            self._ask(self.fs.pipe_file, f"{self.root}/records/.writable", b"")
        except FileNotFoundError as error:
            raise RemoteFailed(f"trainer.remote_dir={self.url}: there is no such place ({error})") from error

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first. RemoteFailed."""

        def look() -> list[int]:
            found = []
            for path in self.fs.glob(f"{self.root}/global_step_*/{MANIFEST}"):
                step = path.split("/")[-2].removeprefix("global_step_")
                found += [int(step)] if step.isdigit() else []
            return sorted(found)

        try:
            steps: list[int] = self._ask(look)
        except FileNotFoundError:
            return []
        return steps

    def upload(self, step: int, folder: Path, run_dir: Path) -> None:
        """A whole checkpoint, and the run's records so far. Called again after a failure, it sends what was
        not sent. RemoteFailed, OSError.
        """
        place, files = f"{self.root}/{folder.name}", {}
        if not self._sent and self._ask(self.fs.exists, f"{place}/{MANIFEST}"):  # of other content
            self._ask(self.fs.rm_file, f"{place}/{MANIFEST}")
        for path, name in _files(folder):
            files[name] = {"size": path.stat().st_size, "sha256": _digest(path)}
            if (place, name) not in self._sent:
                self._ask(self.fs.put_file, str(path), f"{place}/{name}")
                self._sent.add((place, name))
        for record in RECORDS:
            for path, name in _files(run_dir / record):
                there = f"{self.root}/records/{record}" + (f"/{name}" if name else "")
                self._ask(self.fs.put_file, str(path), there)
        for name, about in files.items():
            size = self._ask(self.fs.size, f"{place}/{name}")
            if size != about["size"]:
                self._sent.discard((place, name))
                raise RemoteFailed(f"{place}/{name} has {size} bytes; expected {about['size']}")
        manifest = json.dumps({"step": step, "files": files}, indent=1).encode()
        self._ask(self.fs.pipe_file, f"{place}/{MANIFEST}.part", manifest)
        self._ask(self.fs.mv, f"{place}/{MANIFEST}.part", f"{place}/{MANIFEST}")
        self._sent.clear()

    def download(self, step: int, aside: Path, run_dir: Path) -> None:
        """A checkpoint's files to an empty folder, checked against the manifest; and the run's records, where
        the folder has none. RemoteFailed.
        """
        place = f"{self.root}/global_step_{step}"
        try:
            files = json.loads(self._ask(self.fs.cat_file, f"{place}/{MANIFEST}"))["files"]
            for name, about in files.items():
                target = aside / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._ask(self.fs.get_file, f"{place}/{name}", str(target))
                if target.stat().st_size != about["size"] or _digest(target) != about["sha256"]:
                    raise RemoteFailed(f"{place}/{name} is damaged: it is not what {MANIFEST} says")
            if not (run_dir / "metrics.jsonl").exists():
                for path in self._ask(self.fs.find, f"{self.root}/records"):
                    target = run_dir / path.split(f"{self.root}/records/", 1)[1]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._ask(self.fs.get_file, path, str(target))
        except FileNotFoundError as error:
            raise RemoteFailed(f"{place} lacks {error}; expected what {MANIFEST} names") from error

    def set_aside(self, step: int | None) -> None:
        """Another name, *.old-K, for a step's folder, or for all of the run's. RemoteFailed."""
        place = self.root if step is None else f"{self.root}/global_step_{step}"

        def move() -> None:
            number = 1
            while self.fs.exists(f"{place}.old-{number}"):
                number += 1
            self.fs.mv(place, f"{place}.old-{number}", recursive=True)

        self._ask(move)

    def delete(self, step: int) -> None:
        """The manifest first: what is half deleted is not whole."""
        place = f"{self.root}/global_step_{step}"
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
        whole: steps that are whole elsewhere: their local copies may go.
        problem: why the last try failed, or "".
    """

    def __init__(
        self,
        store: RemoteStore,
        run_dir: Path,
        keep: int | None,
        deadline: float,
        say: Callable[[str], None] = print,
    ) -> None:
        """keep: remote checkpoints that stay, the newest (None: all). deadline: seconds until a checkpoint is
        given up.
        """
        self.store, self.run_dir, self.keep, self.deadline = store, run_dir, keep, deadline
        self.whole: set[int] = set(store.steps())
        self.problem = ""
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def add(self, step: int) -> None:
        self._queue.put(step)

    def close(self, in_haste: bool) -> None:
        """Waits for what is still to be uploaded; in_haste: not."""
        if in_haste:
            self._ended.set()
        self._queue.put(None)
        if not in_haste:
            self._thread.join()

    def _run(self) -> None:
        while (step := self._queue.get()) is not None and not self._ended.is_set():
            self._upload(step)

    def _upload(self, step: int) -> None:
        folder = self.run_dir / f"global_step_{step}"
        until, pause = time.monotonic() + self.deadline, FIRST_PAUSE
        while folder.is_dir() and not self._ended.is_set():
            try:
                self.store.upload(step, folder, self.run_dir)
                self.problem = ""
                self.whole.add(step)
                for old in sorted(self.store.steps())[: -self.keep] if self.keep else []:
                    self.store.delete(old)
                    self.whole.discard(old)
                return
            except (RemoteFailed, OSError) as error:
                self.problem = str(error)
            if time.monotonic() + pause > until:
                print(
                    f"warning: checkpoint {step} could not be uploaded within {self.deadline:g} s "
                    f"(trainer.upload_deadline): {self.problem}. It stays in {folder}.",
                    flush=True,
                )
                return
            self._ended.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def fetch(store: RemoteStore, step: int, run_dir: Path) -> None:
    """Downloads a checkpoint to its place in the run's folder. RemoteFailed."""
    aside = run_dir / f"global_step_{step}.incomplete"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    store.download(step, aside, run_dir)
    aside.rename(run_dir / f"global_step_{step}")

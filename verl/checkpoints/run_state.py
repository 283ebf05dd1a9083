"""The checkpoints of a run: what it needs to go on after it was killed, and how that gets to disk whole.

    <run folder>/global_step_N/actor/...          weights, optimizer, schedule, random state (worker's format)
    <run folder>/global_step_N/actor/huggingface  the same weights as a Hugging Face folder
    <run folder>/global_step_N/critic/...
    <run folder>/global_step_N/prompt_history.npz which prompts were drawn and solved, where that decides
    <run folder>/global_step_N/run_state.json     step, data position, KL coefficient, totals
    <run folder>/global_step_N/SUMS.json          sizes and sums of all these files
    <run folder>/latest_checkpointed_iteration.txt the N of the newest one, for verl's tools

A checkpoint is written to `global_step_N.incomplete` and renamed when everything is on disk, so that whatever
bears the final name is whole. Its sums come last. Before a checkpoint is loaded, its files are compared with
them: `find_whole` passes over a damaged checkpoint, names it, and takes the one before. A checkpoint of an
older version has no sums; it is taken, and a line says so. With `trainer.async_checkpoint` the workers take
snapshots and write them while training goes on:

    save(step): workers take snapshots | next step ... commit_if_written() ... | the folder gets its name
                 their threads write, a thread of the driver adds the sums --->
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from verl.checkpoints.file_names import NEWEST_STEP_FILE
from verl.checkpoints.remote_store import MANIFEST, RemoteDamaged, RemoteFailed, RemoteStore, Uploads
from verl.config.schema import RunSettings, Trainer
from verl.single_controller.base import WorkerGroup
from verl.utils.announcing import announce
from verl.utils.durable import free_name, sync, sync_tree
from verl.utils.file_sums import SUMS_FILE, damage_in, has_sums, write_sums
from verl.utils.text import printable
from verl.workers.engine.snapshot import CheckpointFailed

State = TypeVar("State", bound="SavedState")

STEP_FOLDER = re.compile(r"global_step_(\d+)")
STATE_FILE = "run_state.json"
_LOCK_FILE = "run.lock"
# Steps. A run that may go back keeps a checkpoint that is so old, since a collapse is seen late.
KEEP_BEHIND = 20
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
# What the processes that write may take after a failure. They may be gone, busy, or wait for each other.
_SECONDS_AFTER_A_FAILURE = 10.0


def step_of(folder: Path | None) -> int:
    """Return the step of a checkpoint's folder, `global_step_N`; 0 for None, a run's start."""
    if folder is None:
        return 0
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else RunState.load(folder).step


class RunStopped(RuntimeError):
    """An error of a run that can't go on, for a reason outside of it.

    When the run is started again, it resumes from its last checkpoint.
    """


class SearchesFailed(RunStopped):
    """An error of a run in which too many searches failed: the retrieval server is away."""


class DiskFailed(RunStopped):
    """An error of a run whose records can't be written: the disk is full, or broken."""


class EnvironmentsFailed(SearchesFailed):
    """An error of a run in which too many episodes failed in their environments."""


@dataclass
class SavedState:
    """The position and the totals of a run, as they are stored in the folder of a checkpoint."""

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls: type[State], folder: Path) -> State:
        """Read what `save` wrote.

        Raises ValueError if it is of another program's run, or of another version's.
        """
        stored = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        names = {field.name for field in fields(cls)}
        if stored.keys() != names:
            raise ValueError(
                f"{STATE_FILE} holds {', '.join(sorted(stored))}; expected {', '.join(sorted(names))}. The "
                "checkpoint is of another program (supervised or reinforcement learning) or of another "
                "version; start from its model instead: the folder huggingface inside of it."
            )
        return cls(**stored)


@dataclass
class RunState(SavedState):
    """The position and the totals of a run; everything in it survives a restart.

    The attributes sampler (the data position), kl_controller, running_baseline and health are the
    `state_dict` of the objects of these names.
    """

    step: int = 0  # finished training steps
    sampler: dict[str, Any] = field(default_factory=dict)
    kl_controller: dict[str, float] = field(default_factory=dict)
    running_baseline: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0  # up to the last finished step, pauses left out
    seconds_by_phase: dict[str, float] = field(default_factory=dict)  # `timing_s/*` added up
    generated_tokens: int = 0  # tokens that the policy sampled for training
    trained_tokens: int = 0  # tokens that went through the update, of prompts and observations too
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)  # "before", "after" -> its summary

    def add_step(
        self, metrics: dict[str, float], seconds_by_phase: dict[str, float], wall_seconds: float
    ) -> None:
        """Add one finished step to the totals."""
        self.wall_seconds = wall_seconds
        self.generated_tokens += int(metrics["perf/generated_tokens"])
        self.trained_tokens += int(metrics["perf/trained_tokens"])
        for phase, seconds in seconds_by_phase.items():
            self.seconds_by_phase[phase] = self.seconds_by_phase.get(phase, 0.0) + seconds


class CheckpointStore:
    """The checkpoints in a run's folder.

    Args:
        run_dir: the run's folder.
        max_to_keep: how many checkpoints stay on disk (the newest); None or 0 keeps all.
        remote: where checkpoints are uploaded to, once `uploads` is set. Those that are not whole there stay
            on disk.
        keep_behind: a checkpoint that is at least so many steps old stays besides; 0 for none.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        max_to_keep: int | None,
        remote: RemoteStore | None = None,
        keep_behind: int = 0,
    ) -> None:
        self.remote = remote
        self.last_size = 0
        self.uploads: Uploads | None = None
        # Whether to wait for uploads at the end of the run, which then was no failure.
        self.ended_well = False
        self.run_dir = Path(run_dir).expanduser().absolute()  # workers may have another working directory
        self.max_to_keep = max_to_keep
        self.keep_behind = keep_behind
        self.last_written: int | None = None  # step of the newest checkpoint that this object has committed
        self._lock: TextIO | None = None

    def steps_anywhere(self) -> list[int]:
        """Return the steps with a whole checkpoint, here or at the remote place.

        Raises RemoteFailed if the remote place can't be read.
        """
        remote_steps = self.remote.steps() if self.remote is not None else []
        return sorted({*self.steps(), *remote_steps})

    def steps(self) -> list[int]:
        """Return the steps with a whole checkpoint on disk, oldest first."""
        if not self.run_dir.is_dir():
            return []
        matches = (STEP_FOLDER.fullmatch(path.name) for path in self.run_dir.iterdir())
        return sorted(int(match.group(1)) for match in matches if match)

    def origin(self) -> str:
        """Say where a run goes on from."""
        steps = self.steps()
        return f"step {steps[-1]}" if steps else "its beginning, as it has no checkpoint yet"

    def folder(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}"

    def begin(self, step: int) -> Path:
        """Make an empty folder to write the checkpoint of `step` into, until `commit`.

        If there is no room for a checkpoint as large as the last one, old ones that are whole at the remote
        place are deleted here. Raises OSError if that is not enough.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        steps = self.steps()
        need = int(1.1 * (self.last_size or self._size_of_last(self.steps())))
        while (free := shutil.disk_usage(self.run_dir).free) < need:
            old_step = next(
                (old_step for old_step in steps[:-1] if self.uploads and old_step in self.uploads.whole), None
            )
            if old_step is None:
                raise OSError(
                    f"{self.run_dir} has {free / 1e6:,.0f} MB free; expected {need / 1e6:,.0f}, 1.1 times "
                    "the last checkpoint. Make room, or lower trainer.max_ckpt_to_keep"
                )
            _delete(self.folder(old_step))
            steps.remove(old_step)
        unfinished = self._incomplete_folder(step)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        return unfinished

    def seal(self, step: int) -> None:
        """Write the sums of what was written since `begin`, and force everything to the disk.

        This reads all files, which takes about a second for 1 GB.
        """
        unfinished = self._incomplete_folder(step)
        write_sums(unfinished)
        sync_tree(unfinished)

    def commit(self, step: int) -> None:
        """Make what was written since `begin` the checkpoint of `step`; call `seal` unless it was called."""
        unfinished = self._incomplete_folder(step)
        target = self.folder(step)
        if not has_sums(unfinished):
            self.seal(step)
        if target.exists():
            _delete(target)
        os.replace(unfinished, target)
        self._track_latest()
        sync(self.run_dir)
        self.last_written = step
        self.last_size = self._size_of_last([step])
        if self.uploads is not None:
            self.uploads.add(step)
        kept_to_go_back = self._kept_to_go_back(step)
        for old_step in self.steps()[: -self.max_to_keep] if self.max_to_keep else []:
            if old_step in kept_to_go_back:
                continue
            if self.remote is None or (self.uploads is not None and old_step in self.uploads.whole):
                _delete(self.folder(old_step))

    def _kept_to_go_back(self, step: int) -> set[int]:
        """Return the checkpoints that stay at `step` whatever their number.

        They are one that is `keep_behind` steps old, and later ones at half that distance, one of which will
        take its place.
        """
        anchors: list[int] = []
        for old_step in self.steps() if self.keep_behind else ():
            if not anchors or old_step - anchors[-1] >= self.keep_behind // 2:
                anchors.append(old_step)
        oldest = max((anchor for anchor in anchors if anchor <= step - self.keep_behind), default=0)
        return {anchor for anchor in anchors if anchor >= oldest}

    def _size_of_last(self, steps: list[int]) -> int:
        """Return the size of the last of these checkpoints, in bytes."""
        paths = self.folder(steps[-1]).rglob("*") if steps else ()
        return sum(
            {(status := path.stat()).st_ino: status.st_size for path in paths if path.is_file()}.values()
        )

    def start_uploads(self, keep: int | None, deadline: float) -> None:
        """Upload checkpoints from now on, beginning with those that are here and not at the remote place.

        Raises RunStopped if the remote place does not answer.
        """
        if self.remote is None:
            return
        try:
            self.remote.check(self.run_dir)  # the folder there may just have been set aside
            self.uploads = Uploads(self.remote, self.run_dir, keep, deadline)
        except RemoteFailed as error:
            raise RunStopped(str(error)) from error
        remote_steps = sorted(self.uploads.whole)
        # Older ones than this would be deleted there.
        oldest = remote_steps[-keep:][0] if keep and len(remote_steps) >= keep else -1
        for step in self.steps():
            if step not in remote_steps and step > oldest:
                self.uploads.add(step)

    def end_uploads(self) -> None:
        """Stop uploading; wait for what is to be uploaded if the run has ended as it should."""
        uploads = self.uploads
        self.uploads = None
        if uploads is not None:
            with announce(f"uploading to {uploads.store.url}"):
                uploads.close(in_haste=not self.ended_well)

    def find_whole(self, mode: str, from_path: str | None) -> Path | None:
        """Return the checkpoint of `find_resume`, or the newest one before it whose files are whole.

        All its files are read, and it is downloaded if it is only at the remote place. Damaged checkpoints
        that are passed over are named, and renamed to `global_step_N.damaged-K`. The folder must be locked.

        Raises:
            ValueError: if the checkpoint of `from_path` is damaged, or if all of the run's checkpoints are.
            RemoteFailed: if the remote place does not answer.
        """
        remote_steps = self._remote_steps() if mode in ("auto", "latest") else []
        newest = self.find_resume(mode, from_path)
        if newest is None:
            return None
        if mode == "from_path":
            check_whole(newest)
            return newest
        damages: list[str] = []
        damaged: list[Path] = []
        for step in sorted({*self.steps(), *remote_steps}, reverse=True):
            folder = self.folder(step)
            if folder.is_dir():
                damage = damage_in(folder)
                if damage is None:
                    return self._chosen(folder, damaged)
                damaged.append(folder)
                damages.append(f"{folder}: {damage}")
                print(printable(f"warning: a damaged checkpoint is passed over: {damages[-1]}"), flush=True)
            if self.remote is not None and step in remote_steps:
                try:
                    with announce(f"downloading the checkpoint of step {step} from {self.remote.url}"):
                        self.remote.fetch(step, self.run_dir)
                    return self._chosen(folder, [other for other in damaged if other != folder])
                except RemoteDamaged as error:
                    damages.append(str(error))
                    print(printable(f"warning: a damaged checkpoint is passed over: {error}"), flush=True)
        raise ValueError(
            f"Found no whole checkpoint in {self.run_dir}, and {len(damages)} damaged ones, the newest of "
            f"them {damages[0]}. Expected one that is whole. Copy one back from a backup, or start the run "
            "anew with trainer.resume_mode=none, which sets the folder aside."
        )

    def _remote_steps(self) -> list[int]:
        """Return the steps with a whole checkpoint at the remote place; name newer ones that are not."""
        if self.remote is None:
            return []
        steps = self.remote.steps()
        for step in self.remote.unfinished_steps():
            if step > max(steps, default=-1):
                print(
                    f"note: step {step} at {self.remote.url} has no {MANIFEST}: it is not whole", flush=True
                )
        return steps

    def _chosen(self, folder: Path, damaged: list[Path]) -> Path:
        """Return a checkpoint that is gone on from, after the damaged ones were renamed."""
        for other in damaged:
            os.replace(other, free_name(other, "damaged"))
        if damaged:
            self._track_latest()
        _note_missing_sums(folder)
        return folder

    def _incomplete_folder(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}.incomplete"

    def lock(self) -> None:
        """Keep other runs out of the folder until `unlock`, or until the process ends.

        Raises ValueError if another run is in the folder.
        """
        self.unlock()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        lock = (self.run_dir / _LOCK_FILE).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ValueError(
                f"{self.run_dir} is in use by another run. Wait for its end or stop it, or choose another "
                "folder: trainer.default_local_dir (EXPERIMENT_NAME for train_grpo.sh and train_ppo.sh)."
            ) from error
        self._lock = lock

    def unlock(self) -> None:
        """Let other runs into the folder again. A folder that holds nothing but the lock is removed."""
        if self._lock is None:
            return
        with suppress(OSError):
            if [path.name for path in self.run_dir.iterdir()] == [_LOCK_FILE]:
                (self.run_dir / _LOCK_FILE).unlink()
                self.run_dir.rmdir()
        self._lock.close()
        self._lock = None

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to `<folder>.old-K`.

        This is for a new start (`trainer.resume_mode=none`): nothing that the earlier run wrote is lost.

        Returns:
            The new name, or None if there is no earlier run.
        """
        self._set_aside_there(None)
        if not (self.run_dir / "metrics.jsonl").exists() and not self.steps():
            return None
        new_name = free_name(self.run_dir)
        os.replace(self.run_dir, new_name)
        return new_name

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps to `global_step_N.old-K`; return the new names.

        A run that goes on from an earlier checkpoint (`trainer.resume_mode=from_path`) leaves them behind.
        Under their own names they would be taken for its newest ones.
        """
        moved = []
        self._set_aside_there(step)
        for later in self.steps():
            if later > step:
                moved.append(free_name(self.folder(later)))
                os.replace(self.folder(later), moved[-1])
        self._track_latest()
        return moved

    def _set_aside_there(self, step: int | None) -> None:
        """Set aside the checkpoints of later steps at the remote place, or all of the run if `step` is None.

        Raises RunStopped if the remote place does not answer.
        """
        if self.remote is None:
            return
        try:
            if step is None:
                self.remote.set_aside(None)
                return
            for later in self.remote.steps():
                if later > step:
                    self.remote.set_aside(later)
        except (RemoteFailed, OSError) as error:
            raise RunStopped(str(error)) from error

    def _track_latest(self) -> None:
        """Write the newest step where verl and its tools look for it; no run here ever reads it."""
        tracker = self.run_dir / NEWEST_STEP_FILE
        steps = self.steps()
        if steps:
            new_tracker = tracker.with_suffix(".new")
            new_tracker.write_text(str(steps[-1]), encoding="utf-8")
            sync(new_tracker)
            os.replace(new_tracker, tracker)
        else:
            tracker.unlink(missing_ok=True)

    def remove_incomplete(self) -> None:
        """Delete what a killed run left half written or half deleted."""
        for path in self.run_dir.glob("global_step_*.incomplete") if self.run_dir.is_dir() else []:
            shutil.rmtree(path)

    def find_resume(self, mode: str, from_path: str | None) -> Path | None:
        """Return the checkpoint to go on from, or None for a start.

        Args:
            mode: "auto" (the newest checkpoint, if there is one), "latest" (the newest; there must be one),
                "none", or "from_path".
            from_path: with mode "from_path", the `global_step_N` folder to go on from.

        Raises:
            ValueError: if there is no checkpoint where the mode needs one.
        """
        if mode == "from_path":
            folder = Path(str(from_path)).expanduser().absolute()
            if not (folder / STATE_FILE).is_file():
                raise ValueError(
                    f"trainer.resume_from_path={from_path}: no {STATE_FILE} in it. Give a global_step_N "
                    "folder that a run of this trainer wrote."
                )
            return folder
        steps = [] if mode == "none" else self.steps_anywhere()
        if not steps and mode == "latest":
            raise ValueError(
                f"trainer.resume_mode=latest, but {self.run_dir} holds no global_step_N folder. Use "
                "trainer.resume_mode=auto to start from step 0 in that case."
            )
        return self.folder(steps[-1]) if steps else None


def check_whole(folder: Path) -> None:
    """Raise ValueError, with the name of the file, if a checkpoint's folder is damaged."""
    damage = damage_in(folder)
    if damage is not None:
        raise ValueError(
            f"{folder} is damaged: {damage}. Expected the files as the run wrote them. Copy them again, or "
            "take another checkpoint."
        )
    _note_missing_sums(folder)


def _note_missing_sums(folder: Path) -> None:
    if not has_sums(folder):
        print(
            f"note: {folder} has no {SUMS_FILE} (an older version wrote it, or the file is lost): whether "
            "its files are whole can't be told",
            flush=True,
        )


def _delete(folder: Path) -> None:
    """Delete a checkpoint's folder.

    It is renamed first: a folder that is half deleted must not bear a checkpoint's name.
    """
    doomed = folder.with_name(f"{folder.name}.deleted.incomplete")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def store_of(trainer: RunSettings) -> CheckpointStore:
    """Return the checkpoints of a run by its settings.

    Raises ValueError if trainer.remote_dir can't be used.
    """
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    remote = None
    if trainer.remote_dir is not None:
        remote = RemoteStore(trainer.remote_dir, folder.name)
    rewinds = isinstance(trainer, Trainer) and trainer.on_collapse == "rewind"
    return CheckpointStore(folder, trainer.max_ckpt_to_keep, remote, KEEP_BEHIND if rewinds else 0)


class CheckpointWriting:
    """The writing of checkpoints, one at a time.

    Args:
        store: the checkpoints of the run.
        background: whether training goes on while the workers write.
    """

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self.store = store
        self.background = background
        self._step: int | None = None  # step of the checkpoint that is being written
        self._groups: list[WorkerGroup] = []
        self._sealing: Future[None] | None = None  # the adding of its sums, once the rest is written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")

    def save(self, step: int, groups: Mapping[str, WorkerGroup], write_rest: Callable[[Path], None]) -> None:
        """Finish the checkpoint before this one, and begin that of `step`.

        `commit_if_written` gives the new checkpoint its name.

        Args:
            step: number of finished steps.
            groups: folder in the checkpoint -> workers whose model goes there.
            write_rest: writes the rest into the checkpoint's folder.

        Raises:
            RunStopped: if this checkpoint, or the one before it, could not be written.
        """
        self.finish()
        try:
            folder = self.store.begin(step)
            for name, group in groups.items():
                group.save_checkpoint(str(folder / name), self.background)
            write_rest(folder)
        except (CheckpointFailed, OSError) as error:
            raise self._failed(step, error) from error
        self._step = step
        self._groups = list(groups.values())

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises RunStopped if it could not be written.
        """
        self.commit_if_written(wait=True)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Wrap a run, a `with` block, and finish the checkpoint that is being written at its end.

        The checkpoint gets its name, also if the run is stopped (RunStopped). If the run fails or is
        interrupted, it gets its name only if that takes no more than some seconds.

        Raises RunStopped if the checkpoint could not be written, and DiskFailed if the disk took a record of
        the run no more.
        """
        try:
            yield
        except RunStopped:
            self.finish()
            self.store.ended_well = True
            raise
        except OSError as error:
            self._finish_after_a_failure()
            if error.errno not in DISK_ERRORS:
                raise
            raise DiskFailed(f"{error.filename or self.store.run_dir}: {error.strerror}") from error
        except BaseException:
            self._finish_after_a_failure()
            raise
        self.finish()
        self.store.ended_well = True

    def _finish_after_a_failure(self) -> None:
        if self._step is None:
            return
        problem = f"was not whole within {_SECONDS_AFTER_A_FAILURE:g} s, or its processes are busy"
        is_written = threading.Event()
        step = self._step

        def wait() -> None:
            with suppress(BaseException):  # `finish` raises it again
                sealing = self._seal_if_written(step, wait=True)
                assert sealing is not None
                sealing.result()
            is_written.set()

        threading.Thread(target=wait, daemon=True).start()
        if is_written.wait(_SECONDS_AFTER_A_FAILURE):
            try:
                return self.finish()
            except BaseException as error:  # the run's own error is the one that is raised
                problem = f"has no name: {error}"
        print(f"note: the checkpoint of step {step} {problem}; it is not gone on from", flush=True)

    def commit_if_written(self, wait: bool = False) -> None:
        """Give the checkpoint its name if its files are all there; with `wait`, wait until they are.

        Raises RunStopped if the checkpoint could not be written.
        """
        step = self._step
        if step is None:
            return
        try:
            sealing = self._seal_if_written(step, wait)
            if sealing is None or (self.background and not wait and not sealing.done()):
                return
            sealing.result()
            self._step = None
            self._sealing = None
            self.store.commit(step)
        except (CheckpointFailed, OSError) as error:
            self._step = None
            self._sealing = None
            raise self._failed(step, error) from error

    def _seal_if_written(self, step: int, wait: bool) -> Future[None] | None:
        """Return the adding of the sums, which begins when the workers have written their files, or None.

        With `wait`, wait until they have. Raises CheckpointFailed if they could not.
        """
        if self._sealing is None:
            written = [done for group in self._groups for done in group.checkpoint_is_written(wait)]
            if not all(written):
                return None
            self._sealing = self._thread.submit(self.store.seal, step)
        return self._sealing

    def _failed(self, step: int, error: Exception) -> RunStopped:
        return RunStopped(
            f"the checkpoint of step {step} could not be written: {error}. Started again, the run goes on "
            f"from {self.store.origin()}."
        )

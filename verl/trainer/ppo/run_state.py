"""What a run needs to go on after it was killed, and how it gets to disk without ever being half there.

    <run folder>/global_step_N/actor/...          weights, optimizer, schedule, random state (worker's format)
    <run folder>/global_step_N/actor/huggingface  the same weights as a Hugging Face folder
    <run folder>/global_step_N/critic/...
    <run folder>/global_step_N/partial_groups.pkl rows that go on in the next step, if there are any
    <run folder>/global_step_N/prompt_history.npz which prompts were drawn and solved, where that decides
    <run folder>/global_step_N/run_state.json     step, data position, KL coefficient, totals
    <run folder>/latest_checkpointed_iteration.txt the N of the newest one, for verl's tools

A checkpoint is written to `global_step_N.incomplete` and renamed when everything is on disk: whatever bears
the final name is whole. With `trainer.async_checkpoint` the workers take snapshots and write them while
training goes on:

    save(step): workers take snapshots | next step ... commit_if_written() ... | the folder gets its name
                 their threads write  ----------------->
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from verl.config.schema import RunSettings, Trainer
from verl.single_controller.base import WorkerGroup
from verl.trainer.remote import RemoteFailed, RemoteStore, Uploads
from verl.utils.announcing import announced
from verl.utils.durable import sync, sync_tree
from verl.workers.engine.snapshot import CheckpointFailed

State = TypeVar("State", bound="SavedState")

STEP_FOLDER = re.compile(r"global_step_(\d+)")
STATE_FILE = "run_state.json"
KEEP_BEHIND = (
    20  # steps: a run that may go back keeps a checkpoint that is so old, as a collapse is seen late
)
_SECONDS_AFTER_A_FAILURE = 10.0  # that those who write may take; they may be gone, busy, or wait for another


def step_of(folder: Path | None) -> int:
    """Return the step of a checkpoint's folder, `global_step_N`; 0 for None, a run's start."""
    if folder is None:
        return 0
    match = STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else RunState.load(folder).step


class RunStopped(RuntimeError):
    """The run can't go on, for a reason outside of it; started again it resumes from its last checkpoint."""


class SearchesFailed(RunStopped):
    """Too many searches failed: the retrieval server is away."""


class EnvironmentsFailed(SearchesFailed):
    """Too many episodes failed in their environments."""


@dataclass
class SavedState:
    """A run's position and totals, as a checkpoint's folder has them."""

    def save(self, folder: Path) -> None:
        (folder / STATE_FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls: type[State], folder: Path) -> State:
        """What `save` wrote. ValueError if it is of another program's run, or of another version's."""
        found = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        names = {field.name for field in fields(cls)}
        if found.keys() != names:
            raise ValueError(
                f"{STATE_FILE} holds {', '.join(sorted(found))}; expected {', '.join(sorted(names))}. The "
                "checkpoint is of another program (supervised or reinforcement learning) or of another "
                "version; start from its model instead: the folder huggingface inside of it."
            )
        return cls(**found)


@dataclass
class RunState(SavedState):
    """Position and totals of a run; everything in it survives a restart.

    sampler (the data position), kl_controller, running_baseline and health are the `state_dict` of these.
    """

    step: int = 0  # finished training steps
    sampler: dict[str, Any] = field(default_factory=dict)
    kl_controller: dict[str, float] = field(default_factory=dict)
    running_baseline: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0  # up to the last finished step, pauses left out
    seconds_by_phase: dict[str, float] = field(default_factory=dict)  # `timing_s/*` added up
    generated_tokens: int = 0  # that the policy sampled for training
    trained_tokens: int = 0  # that went through the update, of prompts and observations too
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
    """A run folder's checkpoints.

    max_to_keep: how many stay on disk (the newest); None or 0 keeps all. remote: where they are uploaded to,
    once `uploads` is set; those that are not whole there stay. keep_behind: one that is at least so many
    steps old stays besides; 0: none.
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
        self.waits_for_uploads = False  # at the run's end: it was no failure
        self.run_dir = Path(run_dir).expanduser().absolute()  # workers may have another working directory
        self.max_to_keep = max_to_keep
        self.keep_behind = keep_behind
        self.last_written: int | None = None  # step of the newest checkpoint that this object has committed
        self._lock: TextIO | None = None

    def steps_anywhere(self) -> list[int]:
        """Return the steps with a whole checkpoint, here or at the remote place. RemoteFailed."""
        there = self.remote.steps() if self.remote is not None else []
        return sorted({*self.steps(), *there})

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, oldest first."""
        if not self.run_dir.is_dir():
            return []
        found = (STEP_FOLDER.fullmatch(path.name) for path in self.run_dir.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def origin(self) -> str:
        """Where a run goes on from, in words."""
        steps = self.steps()
        return f"step {steps[-1]}" if steps else "its beginning, as it has no checkpoint yet"

    def folder(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}"

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into, until `commit`. OSError: there is no room
        for one as large as the last.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        steps = self.steps()
        need = int(1.1 * (self.last_size or self._size(self.steps())))
        while (free := shutil.disk_usage(self.run_dir).free) < need:
            old = next((old for old in steps[:-1] if self.uploads and old in self.uploads.whole), None)
            if old is None:
                raise OSError(
                    f"{self.run_dir} has {free / 1e6:,.0f} MB free; expected {need / 1e6:,.0f}, 1.1 times "
                    "the last checkpoint. Make room, or lower trainer.max_ckpt_to_keep"
                )
            _delete(self.folder(old))
            steps.remove(old)
        aside = self._unfinished(step)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def commit(self, step: int) -> None:
        """What was written since `begin` becomes the checkpoint of `step`."""
        aside = self._unfinished(step)
        target = self.folder(step)
        sync_tree(aside)
        if target.exists():
            _delete(target)
        os.replace(aside, target)
        self._track_latest()
        sync(self.run_dir)
        self.last_written = step
        self.last_size = self._size([step])
        if self.uploads is not None:
            self.uploads.add(step)
        kept_to_go_back = self._kept_to_go_back(step)
        for old in self.steps()[: -self.max_to_keep] if self.max_to_keep else []:
            if old in kept_to_go_back:
                continue
            if self.remote is None or (self.uploads is not None and old in self.uploads.whole):
                _delete(self.folder(old))

    def _kept_to_go_back(self, step: int) -> set[int]:
        """Return the checkpoints that stay at `step` whatever their number: one that is `keep_behind` steps
        old, and later ones at half that distance, one of which will take its place.
        """
        anchors: list[int] = []
        for old in self.steps() if self.keep_behind else ():
            if not anchors or old - anchors[-1] >= self.keep_behind // 2:
                anchors.append(old)
        oldest = max((anchor for anchor in anchors if anchor <= step - self.keep_behind), default=0)
        return {anchor for anchor in anchors if anchor >= oldest}

    def _size(self, steps: list[int]) -> int:
        """Bytes of the last one's files."""
        paths = self.folder(steps[-1]).rglob("*") if steps else ()
        return sum(
            {(about := path.stat()).st_ino: about.st_size for path in paths if path.is_file()}.values()
        )

    def start_uploads(self, keep: int | None, deadline: float) -> None:
        """Uploads from now on, first what is here and not there. RunStopped: the place is away."""
        if self.remote is None:
            return
        try:
            self.remote.check(self.run_dir)  # it may just have been set aside
            self.uploads = Uploads(self.remote, self.run_dir, keep, deadline)
        except RemoteFailed as error:
            raise RunStopped(str(error)) from error
        there = sorted(self.uploads.whole)
        oldest = there[-keep:][0] if keep and len(there) >= keep else -1  # older ones would be deleted there
        for step in self.steps():
            if step not in there and step > oldest:
                self.uploads.add(step)

    def end_uploads(self) -> None:
        """Waits for them, if the run has ended as it should."""
        uploads = self.uploads
        self.uploads = None
        if uploads is not None:
            with announced(f"uploading to {uploads.store.url}"):
                uploads.close(in_haste=not self.waits_for_uploads)

    def fetch(self, folder: Path) -> None:
        """Makes sure that the checkpoint that `find_resume` gave is here. RemoteFailed."""
        if self.remote is not None and not folder.exists():
            step = int(folder.name.removeprefix("global_step_"))
            with announced(f"downloading the checkpoint of step {step} from {self.remote.url}"):
                self.remote.fetch(step, self.run_dir)

    def _unfinished(self, step: int) -> Path:
        return self.run_dir / f"global_step_{step}.incomplete"

    def lock(self) -> None:
        """Keep other runs out of the folder until `unlock`, or the process's end. ValueError: one is in."""
        self.unlock()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self.run_dir / "run.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.run_dir} is in use by another run. Wait for its end or stop it, or choose another "
                "folder: trainer.default_local_dir (EXPERIMENT_NAME for train_grpo.sh and train_ppo.sh)."
            ) from error

    def unlock(self) -> None:
        """Let other runs into the folder again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_aside(self) -> Path | None:
        """Rename an earlier run's folder to `<folder>.old-K`; returns the new name, None if there is none.

        For a new start (`trainer.resume_mode=none`): nothing that the earlier run wrote is lost.
        """
        self._set_aside_there(None)
        if not (self.run_dir / "metrics.jsonl").exists() and not self.steps():
            return None
        aside = _free_name(self.run_dir)
        os.replace(self.run_dir, aside)
        return aside

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps to `global_step_N.old-K`; returns the new names.

        A run that goes on from an earlier checkpoint (`trainer.resume_mode=from_path`) leaves them behind:
        under their own names they would be taken for its newest ones.
        """
        moved = []
        self._set_aside_there(step)
        for later in self.steps():
            if later > step:
                moved.append(_free_name(self.folder(later)))
                os.replace(self.folder(later), moved[-1])
        self._track_latest()
        return moved

    def _set_aside_there(self, step: int | None) -> None:
        """The same at the remote place: of steps after this one, None: of all. RunStopped: it is away."""
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
        """Writes the newest step where verl and its tools look for it; a run of ours never reads it."""
        tracker = self.run_dir / "latest_checkpointed_iteration.txt"
        steps = self.steps()
        if steps:
            new = tracker.with_suffix(".new")
            new.write_text(str(steps[-1]), encoding="utf-8")
            sync(new)
            os.replace(new, tracker)
        else:
            tracker.unlink(missing_ok=True)

    def remove_incomplete(self) -> None:
        """Delete what a killed run left half written or half deleted."""
        for path in self.run_dir.glob("global_step_*.incomplete") if self.run_dir.is_dir() else []:
            shutil.rmtree(path)

    def find_resume(self, mode: str, from_path: str | None) -> Path | None:
        """The checkpoint to go on from, or None for a start. ValueError: none where the mode needs one.

        mode: "auto" (the newest if there is one), "latest" (there must be one), "none", or "from_path": the
        `global_step_N` folder that this names.
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


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


def _delete(folder: Path) -> None:
    """Renamed first: a folder that is half deleted must not bear a checkpoint's name."""
    doomed = folder.with_name(f"{folder.name}.deleted.incomplete")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def store_of(trainer: RunSettings) -> CheckpointStore:
    """The checkpoints of a run by its settings. ValueError: trainer.remote_dir can't be used."""
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    remote = None
    if trainer.remote_dir is not None:
        remote = RemoteStore(trainer.remote_dir, folder.name)
    rewinds = isinstance(trainer, Trainer) and trainer.on_collapse == "rewind"
    return CheckpointStore(folder, trainer.max_ckpt_to_keep, remote, KEEP_BEHIND if rewinds else 0)


class CheckpointWriting:
    """One checkpoint at a time. background: whether training goes on while the workers write."""

    def __init__(self, store: CheckpointStore, background: bool) -> None:
        self.store = store
        self.background = background
        self._step: int | None = None  # that is being written
        self._groups: list[WorkerGroup] = []

    def save(self, step: int, groups: Mapping[str, WorkerGroup], beside: Callable[[Path], None]) -> None:
        """Begins the checkpoint of `step`, and ends the one before it. `commit_if_written` gives it its name.

        groups: folder in the checkpoint -> whose models go there. beside: writes the rest into the folder.
        RunStopped: this one, or the one before it, could not be written.
        """
        self.finish()
        try:
            folder = self.store.begin(step)
            for name, group in groups.items():
                group.save_checkpoint(str(folder / name), self.background)
            beside(folder)
        except (CheckpointFailed, OSError) as error:
            raise self._failed(step, error) from error
        self._step = step
        self._groups = list(groups.values())

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. RunStopped: as below."""
        self.commit_if_written(wait=True)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """A run within: what is being written at its end gets its name, also if the run is stopped
        (RunStopped), and if it fails or is interrupted, where that takes no more than some seconds.
        RunStopped: it could not be written.
        """
        try:
            yield
        except RunStopped:
            self.finish()
            self.store.waits_for_uploads = True
            raise
        except BaseException:
            self._finish_after_a_failure()
            raise
        self.finish()
        self.store.waits_for_uploads = True

    def _finish_after_a_failure(self) -> None:
        if self._step is None:
            return
        problem = f"was not whole within {_SECONDS_AFTER_A_FAILURE:g} s, or its processes are busy"
        is_written = threading.Event()

        def wait() -> None:
            with suppress(BaseException):  # `finish` raises it again
                for group in self._groups:
                    group.checkpoint_is_written(True)
            is_written.set()

        step = self._step
        threading.Thread(target=wait, daemon=True).start()
        if is_written.wait(_SECONDS_AFTER_A_FAILURE):
            try:
                return self.finish()
            except BaseException as error:  # the run's own error is the one that is raised
                problem = f"has no name: {error}"
        print(f"note: the checkpoint of step {step} {problem}; it is not gone on from", flush=True)

    def commit_if_written(self, wait: bool = False) -> None:
        """Gives the checkpoint its name if its files are all there. RunStopped: it could not be written."""
        step = self._step
        if step is None:
            return
        try:
            written = [done for group in self._groups for done in group.checkpoint_is_written(wait)]
            if all(written):
                self._step = None
                self.store.commit(step)
        except (CheckpointFailed, OSError) as error:
            self._step = None
            raise self._failed(step, error) from error

    def _failed(self, step: int, error: Exception) -> RunStopped:
        return RunStopped(
            f"the checkpoint of step {step} could not be written: {error}. Started again, the run goes on "
            f"from {self.store.origin()}."
        )

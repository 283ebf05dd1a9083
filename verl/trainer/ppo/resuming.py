"""The settings that decide what a run learns: a run goes on with its own, never silently with others.

checkpoint of a run -> learning_settings.json      the same command later -> the same settings, or a stop
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl.checkpoints.run_state import (
    CheckpointWriting,
    DiskFailed,
    EnvironmentsFailed,
    RunState,
    RunStopped,
    SearchesFailed,
    store_of,
)
from verl.config import Config, SFTConfig, load_config
from verl.config.compatibility import RL
from verl.config.keys import as_list, flatten
from verl.config.mixture import sources_of
from verl.config.prompt_selection import FILTER, RETIRE
from verl.records import Recorder
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.stop_request import StopRequest

SETTINGS_FILE = "learning_settings.json"
_MODEL = "actor_rollout_ref.model.path"
_TRAIN_FILES = "data.train_files"
_MIXTURE = "data.mixture"
_WHOLE_FILE = 256 * 1024**2  # bytes; of a larger one the size, the first and the last MiB are compared
DECISIVE = (  # keys, and blocks of keys
    "algorithm",
    FILTER,
    RETIRE,
    "reward_model",
    "custom_reward_function",
    _MODEL,
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.model.target_modules",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type",
    "actor_rollout_ref.rollout.n_agent",
    "actor_rollout_ref.rollout.placement",
    _TRAIN_FILES,
    _MIXTURE,
    "data.train_data_num",
    "do_search",
    "environment.env_class",
    "environment.env_config",
    "max_turns",
    "trainer.async_training.max_staleness",
    "trainer.async_training.repeatable",
)


def learning_settings(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings that decide what a run learns.

    A key with files is compared by what these hold, so that a run may be moved, and a file that was changed
    in its place is noticed.

    Returns:
        `values`: key -> what it is set to; `contents`: key -> digest of the files that it names.
    """
    blocks = tuple(f"{name}." for name in DECISIVE)
    values = {key: value for key, value in flatten(config).items() if f"{key}.".startswith(blocks)}
    if config.data.mixture is None:
        files = as_list(config.data.train_files or [])
        contents = {_TRAIN_FILES: _digest([Path(file).expanduser() for file in files])}
    else:  # data.train_files is not read
        sources = sources_of(config)
        files = [file for source in sources for file in source.files]
        paths = f"{_MIXTURE} paths"
        values |= {_TRAIN_FILES: None, paths: [str(file) for file in files]}
        values[_MIXTURE] = [asdict(replace(source, path=None, files=())) for source in sources]
        contents = {paths: _digest(files)}
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    if (model / "config.json").is_file():
        sizes = sorted((path.name, path.stat().st_size) for path in model.glob("*.safetensors"))
        contents[_MODEL] = _digest([model / "config.json"], str(sizes))
    reward = config.custom_reward_function.path
    if reward is not None:
        contents["custom_reward_function.path"] = _digest([Path(reward).expanduser()])
    return {"values": values, "contents": contents}


def check_learning_settings(settings: Mapping[str, Any], folder: Path, run_dir: Path) -> None:
    """Raise ValueError if the checkpoint in `folder` is of a run with other settings.

    The message names the settings and says what to type. A checkpoint without settings (of an older version,
    or of weights alone) passes.
    """
    if not (folder / SETTINGS_FILE).is_file():
        return
    earlier = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    # An older version had other names for some keys.
    earlier["values"] = {RL.renamed.get(key, key): value for key, value in earlier["values"].items()}
    now = json.loads(json.dumps(settings))
    defaults = flatten(load_config([]))  # for keys that an older version did not have
    differences = []
    for key in sorted({*earlier["values"], *now["values"]}):
        before, present = (side["values"].get(key, defaults.get(key)) for side in (earlier, now))
        digests = [side["contents"].get(key) for side in (earlier, now)]
        if None not in digests:
            if digests[0] != digests[1]:
                change = "what it names was changed since" if before == present else f"now {_typed(present)}"
                differences.append(f"{key}={_typed(before)} ({change})")
        elif before != present:
            differences.append(f"{key}={_typed(before)} (now {_typed(present)})")
    if differences:
        raise ValueError(
            f"the run of {folder} has other settings than this command: {', '.join(differences)}. To go on "
            "with it, type its settings. For a run with these, choose another folder "
            f"(trainer.default_local_dir=..., or EXPERIMENT_NAME=... for train_grpo.sh and train_ppo.sh), or "
            f"type trainer.resume_mode=none: {run_dir} is then set aside, and nothing in it is lost."
        )


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _digest(paths: list[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size <= _WHOLE_FILE:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            digest.update(str(size).encode() + file.read(2**20))
            file.seek(-(2**20), os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()


class CheckpointedRun:
    """A run over worker groups that goes on from its last checkpoint: the base of both programs' trainers."""

    state: Any  # its position and totals
    recorder: Recorder
    total_steps: int

    def __init__(self, config: Config | SFTConfig, stop_request: StopRequest | None) -> None:
        trainer = config.trainer
        self.config = config
        self.stop_request = stop_request or StopRequest()
        self.checkpoints = store_of(trainer)
        self.checkpoint_writing = CheckpointWriting(self.checkpoints, trainer.async_checkpoint)
        self.worker_groups: dict[str, WorkerGroup] = {}
        # The checkpoint that the run goes on from, or None for a start. `_lock_folder` decides it.
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)

    def _lock_folder(self) -> None:
        """Keep other runs out of the folder, and find the newest checkpoint that is whole.

        Raises ValueError if there are checkpoints, and none of them is whole.
        """
        trainer = self.config.trainer
        self.checkpoints.lock()
        if self.checkpoints.remote is not None:
            self.checkpoints.remote.check(self.checkpoints.run_dir)
        self.resume_folder = self.checkpoints.find_whole(trainer.resume_mode, trainer.resume_from_path)

    def _load_checkpoint(self, folder: Path) -> int:
        """Put everything where a checkpoint left it; return its step.

        Raises ValueError if the checkpoint is of another run.
        """
        raise NotImplementedError

    def _save_checkpoint(self) -> None:
        """Begin to write the checkpoint of the last finished step."""
        raise NotImplementedError

    def _resume(self) -> None:
        """Load the checkpoint that `trainer.resume_mode` asks for, and cut the records back to its step.

        Raises RunStopped if the checkpoint is of another run.
        """
        checkpoints = self.checkpoints
        folder = self.resume_folder
        step = 0
        old_run = checkpoints.set_aside() if self.config.trainer.resume_mode == "none" else None
        if old_run is not None:
            checkpoints.lock()
        checkpoints.remove_incomplete()
        if folder is not None:
            try:
                step = self._load_checkpoint(folder)
            except ValueError as error:
                raise RunStopped(f"{folder}: {error}") from error
            for left_behind in checkpoints.set_aside_after(step):
                print(f"a checkpoint of a later step is now {left_behind}")
        self.recorder.start(step, folder)
        if not getattr(self.config.trainer, "val_only", False):
            checkpoints.start_uploads(self.config.trainer.remote_keep, self.config.trainer.upload_deadline)
        if old_run is not None:
            print(f"an earlier run stood in {checkpoints.run_dir}; it is now {old_run}")
        if step >= self.total_steps:
            print(
                f"the run in {checkpoints.run_dir} is finished ({step} steps). For a new one set "
                "trainer.resume_mode=none or another folder; to go on, raise trainer.total_training_steps."
            )

    @contextmanager
    def _finishing_run(self) -> Iterator[None]:
        """Wrap a run, a `with` block, and end it as it should.

        The checkpoint that is being written at the end gets its name. Where the retriever is away,
        environments fail, or the disk takes no more records, a checkpoint keeps the steps that are done.

        Raises RunStopped, with the command that goes on, if one of these has happened.
        """
        resumes = self.config.trainer.resume_mode in ("auto", "latest")
        command = "the same command again" + ("" if resumes else " with trainer.resume_mode=auto")
        try:
            with self.checkpoint_writing.finishing():
                yield
        except DiskFailed as failure:
            step = self.state.step
            try:
                self._keep_finished_steps()
            except RunStopped as error:
                print(f"warning: {error}", flush=True)
            raise RunStopped(
                f"the disk takes no more: after step {step} {failure}. Make room and run {command}: the run "
                f"goes on from {self.checkpoints.origin()}."
            ) from failure
        except SearchesFailed as failure:
            step = self.state.step
            self._keep_finished_steps()
            is_search = not isinstance(failure, EnvironmentsFailed)
            cause = "the retrieval server is away" if is_search else "environments fail"
            raise RunStopped(
                f"{cause}: after step {step} {failure}. {'Start the server' if is_search else 'Mend it'} and "
                f"run {command}: the run goes on from {self.checkpoints.origin()}."
            ) from failure

    def _keep_finished_steps(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one.

        Raises RunStopped if it can't be written.
        """
        step = self.state.step
        val_only = getattr(self.config.trainer, "val_only", False)
        if step and step not in self.checkpoints.steps() and not val_only:
            self._save_checkpoint()
            self.checkpoint_writing.finish()

    def shutdown(self) -> None:
        """End the workers that this trainer started, and close the records; a second call does nothing."""
        groups = self.worker_groups
        self.worker_groups = {}
        try:
            self.recorder.close()
        finally:
            for group in groups.values():
                group.shutdown()
            self.checkpoints.end_uploads()
            self.checkpoints.unlock()


class ResumableRun(CheckpointedRun):
    """A run of reinforcement learning, whose settings must stay the same; `RayPPOTrainer` is one."""

    config: Config
    state: RunState

    def __init__(self, config: Config, stop_request: StopRequest | None) -> None:
        super().__init__(config, stop_request)
        self.state = RunState()
        self.learning_settings = learning_settings(config)

    def _lock_folder(self) -> None:
        """Keep other runs out of the folder, and check that its checkpoint is of a run like this.

        Nothing is written so far. Raises ValueError if the checkpoint is not of a run like this.
        """
        super()._lock_folder()
        if self.resume_folder is None:
            return
        checkpoints = self.checkpoints
        if not self.config.trainer.val_only:
            check_learning_settings(self.learning_settings, self.resume_folder, checkpoints.run_dir)
            return
        step = RunState.load(self.resume_folder).step
        remote_steps = checkpoints.remote.steps() if checkpoints.remote is not None else []
        later = [
            other_step for other_step in sorted({*checkpoints.steps(), *remote_steps}) if other_step > step
        ]
        if later:
            raise ValueError(
                f"trainer.val_only=true on the checkpoint of step {step}, but {checkpoints.run_dir} "
                f"holds step {later[-1]} of a run, whose records would be cut back. Set "
                "trainer.default_local_dir to another folder."
            )

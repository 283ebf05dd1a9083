"""The settings that decide what a run learns: a run goes on with its own, never silently with others.

checkpoint of a run -> learning_settings.json      the same command later -> the same settings, or a stop
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from verl.algos.advantages import RunningBaseline
from verl.algos.kl_and_entropy import FixedKLController
from verl.config import Config, load_config
from verl.config.keys import as_list, flat
from verl.config.mixture import sources_of
from verl.single_controller.base import WorkerGroup
from verl.trainer.ppo.collection import TrajectoryCollector
from verl.trainer.ppo.health import HealthMonitor
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.run_state import (
    CheckpointStore,
    CheckpointWriting,
    EnvironmentsFailed,
    RunState,
    RunStopped,
    SearchesFailed,
)
from verl.utils.dataset.rl_dataset import PromptSampler
from verl.utils.records import Recorder, RunRecorder

FILE_NAME = "learning_settings.json"
_MODEL = "actor_rollout_ref.model.path"
_TRAIN_FILES, _MIXTURE = "data.train_files", "data.mixture"
_WHOLE_FILE = 256 * 1024**2  # bytes; of a larger one the size, the first and the last MiB are compared
_DECISIVE = (  # keys, and blocks of keys
    "algorithm",
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
    _TRAIN_FILES,
    _MIXTURE,
    "data.train_data_num",
    "do_search",
    "environment.env_class",
    "environment.env_config",
    "max_turns",
)


def learning_settings(config: Config) -> dict[str, dict[str, Any]]:
    """`values`: key -> what it is set to; `contents`: key -> digest of the files that it names.

    A key with files is compared by what these hold, so that a run may be moved, and a file that was changed
    in its place is noticed.
    """
    values = {
        key: value for key, value in flat(config).items() if any(_is_of(key, name) for name in _DECISIVE)
    }
    if config.data.mixture is None:
        files = as_list(config.data.train_files or [])
        contents = {_TRAIN_FILES: _digest([Path(file).expanduser() for file in files])}
    else:  # data.train_files is not read
        sources = sources_of(config)
        files, paths = [file for source in sources for file in source.files], f"{_MIXTURE} paths"
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


def save_learning_settings(settings: Mapping[str, Any], folder: Path) -> None:
    """Writes them into a checkpoint's folder."""
    (folder / FILE_NAME).write_text(json.dumps(settings, indent=1), encoding="utf-8")


def check_learning_settings(settings: Mapping[str, Any], folder: Path, run_dir: Path) -> None:
    """Raises ValueError if the checkpoint in `folder` is of a run with other settings; it names them and says
    what to type. A checkpoint without settings (of an older version, or of weights alone) passes.
    """
    if not (folder / FILE_NAME).is_file():
        return
    earlier = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(settings))
    defaults = flat(load_config([]))  # of keys that an older version did not have
    differences = []
    for key in sorted({*earlier["values"], *now["values"]}):
        before, here = (side["values"].get(key, defaults.get(key)) for side in (earlier, now))
        digests = [side["contents"].get(key) for side in (earlier, now)]
        if None not in digests:
            if digests[0] != digests[1]:
                what = "what it names was changed since" if before == here else f"now {_typed(here)}"
                differences.append(f"{key}={_typed(before)} ({what})")
        elif before != here:
            differences.append(f"{key}={_typed(before)} (now {_typed(here)})")
    if differences:
        raise ValueError(
            f"the run of {folder} has other settings than this command: {', '.join(differences)}. To go on "
            "with it, type its settings. For a run with these, choose another folder "
            f"(trainer.default_local_dir=..., or EXPERIMENT_NAME=... for train_grpo.sh and train_ppo.sh), or "
            f"type trainer.resume_mode=none: {run_dir} is then set aside, and nothing in it is lost."
        )


def _is_of(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
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


def take_up(
    checkpoints: CheckpointStore,
    folder: Path | None,
    mode: str,
    load: Callable[[Path], int],
    recorder: Recorder,
) -> None:
    """Takes up the checkpoint in `folder` (None: a start), and cuts the records back to its step.

    mode: `trainer.resume_mode`. load: puts everything where a checkpoint left it, and returns its step.
    RunStopped: the checkpoint is of another run.
    """
    aside = checkpoints.set_aside() if mode == "none" else None
    if aside is not None:
        checkpoints.lock()
    checkpoints.remove_incomplete()
    step = 0
    if folder is not None:
        try:
            step = load(folder)
        except ValueError as error:
            raise RunStopped(f"{folder}: {error}") from error
        for left_behind in checkpoints.set_aside_after(step):
            print(f"a checkpoint of a later step is now {left_behind}")
    recorder.start(step, folder)
    if aside is not None:
        print(f"an earlier run stood in {checkpoints.run_dir}; it is now {aside}")


class ResumableRun:
    """What a trainer's run goes on from; `RayPPOTrainer` is one.

    Attributes:
        state: position and totals. resume_folder: the checkpoint that the run goes on from, None for a start.
    """

    actor_rollout_wg: WorkerGroup
    critic_wg: WorkerGroup
    passes: Passes
    sampler: PromptSampler
    collector: TrajectoryCollector
    kl_controller: FixedKLController
    running_baseline: RunningBaseline
    health: HealthMonitor
    recorder: RunRecorder
    total_steps: int

    def __init__(self, config: Config) -> None:
        trainer = config.trainer
        self.config, self.state = config, RunState()
        self.learning_settings = learning_settings(config)
        self.checkpoints = CheckpointStore(trainer.default_local_dir, trainer.max_ckpt_to_keep)
        self.checkpoint_writing = CheckpointWriting(self.checkpoints, trainer.async_checkpoint)
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)

    def _choose_checkpoint(self) -> None:
        """Finds the checkpoint to go on from, now that no other run can write one, and looks whether it is of
        a run like this. Nothing has been written so far. ValueError: it is of another one.
        """
        trainer, checkpoints = self.config.trainer, self.checkpoints
        self.resume_folder = checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        if self.resume_folder is None:
            return
        if not trainer.val_only:
            check_learning_settings(self.learning_settings, self.resume_folder, checkpoints.run_dir)
            return
        step = RunState.load(self.resume_folder).step
        later = [other for other in checkpoints.steps() if other > step]
        if later:
            raise ValueError(
                f"trainer.val_only=true on the checkpoint of step {step}, but {checkpoints.run_dir} "
                f"holds step {later[-1]} of a run, whose records would be cut back. Set "
                "trainer.default_local_dir to another folder."
            )

    def _save_checkpoint(self) -> None:
        """Begins to write the checkpoint of the last finished step."""
        groups = {"actor": self.actor_rollout_wg}
        if self.passes.values:
            groups["critic"] = self.critic_wg

        def beside(folder: Path) -> None:
            save_learning_settings(self.learning_settings, folder)
            self.collector.save(folder)
            self.state.save(folder)

        self.checkpoint_writing.save(self.state.step, groups, beside)

    def _load_checkpoint(self, folder: Path) -> int:
        """Put everything where the checkpoint in `folder` left it, and return its step. ValueError: it is of
        another run.
        """
        self.state = RunState.load(folder)
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
        if self.state.step == 0:  # weights alone, to start with
            return 0
        self.sampler.load_state_dict(self.state.sampler)
        self.collector.load(folder)
        self.kl_controller.load_state_dict(self.state.kl_controller)
        self.running_baseline.load_state_dict(self.state.running_baseline)
        self.health.load_state_dict(self.state.health)
        if self.passes.values:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        return self.state.step

    @contextmanager
    def _ending_well(self) -> Iterator[None]:
        """A run within: what is being written at its end gets its name, and where the retriever is away, a
        checkpoint keeps the steps that are done.
        """
        try:
            with self.checkpoint_writing.finishing():
                yield
        except SearchesFailed as failure:
            step = self.state.step
            if step and step not in self.checkpoints.steps() and not self.config.trainer.val_only:
                self._save_checkpoint()
                self.checkpoint_writing.finish()
            steps = self.checkpoints.steps()
            origin = f"step {steps[-1]}" if steps else "its beginning, as it has no checkpoint yet"
            resumes = self.config.trainer.resume_mode in ("auto", "latest")
            command = "the same command again" + ("" if resumes else " with trainer.resume_mode=auto")
            is_search = not isinstance(failure, EnvironmentsFailed)
            what = "the retrieval server is away" if is_search else "environments fail"
            raise RunStopped(
                f"{what}: after step {step} {failure}. {'Start the server' if is_search else 'Mend it'} and "
                f"run {command}: the run goes on from {origin}."
            ) from failure

    def _resume(self) -> None:
        """Take up the checkpoint that `trainer.resume_mode` asks for; cut the records back to its step."""
        mode = self.config.trainer.resume_mode
        take_up(self.checkpoints, self.resume_folder, mode, self._load_checkpoint, self.recorder)
        if self.state.step >= self.total_steps:
            print(
                f"the run in {self.checkpoints.run_dir} is finished ({self.state.step} steps). For a new one "
                "set trainer.resume_mode=none or another folder; to go on, raise "
                "trainer.total_training_steps."
            )

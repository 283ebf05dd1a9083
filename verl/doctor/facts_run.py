"""The run that is meant: its settings, what validation says of them, and the files that they name.

overrides -> configuration of its program -> Run(settings, mistakes), models, paths, places
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.doctor.facts import Run
from verl.doctor.facts_places import hub_folder
from verl.trainer.config.checks import as_list
from verl.trainer.config.loading import flat, load_config
from verl.trainer.config.validation import FORMAT_SCORES, TABLES_OF, settings_without_effect, validate
from verl.trainer.ppo.core_algos import estimator_inputs
from verl.trainer.ppo.run_state import CheckpointStore

SFT = "sft_trainer"


def load_run(overrides: Sequence[str], program: str) -> Run:
    """The settings of a command line, and what validation says of them. ValueError: it can't be read."""
    if program == SFT:
        from verl.trainer.config.sft_keys import resolve

        config = load_config(overrides, program, resolve)
    elif program in TABLES_OF:
        config = load_config(overrides, program)
    else:
        names = ", ".join([*TABLES_OF, SFT])
        raise ValueError(f"Found --config-name {program}; expected one of: {names}.")
    mistakes = _mistakes(config, program)
    return replace(
        run_of(config, program), mistakes=mistakes, notes=() if mistakes else _notes(config, program)
    )


def run_of(config: DictConfig, program: str) -> Run:
    """The facts of a resolved configuration that is valid."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return Run(program, flat(plain))


def _mistakes(config: DictConfig, program: str) -> tuple[str, ...]:
    try:
        if program == SFT:
            from verl.trainer.config.sft_keys import validate_sft

            validate_sft(config)
        else:
            with_format = any(config.reward_model[name] for name in FORMAT_SCORES)
            validate(config, format_reward=with_format, config_name=program)
    except ValueError as error:
        return (str(error),)
    return ()


def _notes(config: DictConfig, program: str) -> tuple[str, ...]:
    """Of a valid configuration."""
    if program == SFT:
        from verl.trainer.config.sft_keys import TABLES

        return tuple(TABLES.without_effect(config))
    return tuple(settings_without_effect(config, program))


def model_paths(run: Run) -> dict[str, str]:
    """Setting -> model, of those that the run would load; each model once."""
    keys = ["model.partial_pretrain"]
    if run.program != SFT:
        keys = ["actor_rollout_ref.model.path", "actor_rollout_ref.teacher.path"]
        if _has_critic(run):
            keys.insert(1, "critic.model.path")
    found: dict[str, str] = {}
    for key in keys:
        path = run[key]
        if path is not None and path not in found.values():
            found[key] = path
    return found


def _has_critic(run: Run) -> bool:
    try:
        return "values" in estimator_inputs(run["algorithm.adv_estimator"])
    except ValueError:  # no such estimator, which the check of settings says
        return False


def data_paths(run: Run) -> dict[str, list[str]]:
    """Setting -> files that the run would read."""
    keys = ("data.train_files", "data.val_files", "data.extra_val_files", "custom_reward_function.path")
    files = {key: [str(path) for path in as_list(run.get(key)) if path is not None] for key in keys}
    return {key: paths for key, paths in files.items() if paths}


def look_at_data(run: Run) -> dict[str, dict[str, str | None]]:
    """Setting -> file -> what is wrong with it, None: nothing."""
    return {
        key: {path: _problem_with(Path(path)) for path in paths} for key, paths in data_paths(run).items()
    }


def _problem_with(path: Path) -> str | None:
    if not path.is_file():
        return "there is no such file"
    if not os.access(path, os.R_OK):
        return "it can't be read by this user"
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"version https://"):
        return "it is a git-lfs pointer; fetch the file with `git lfs pull`"
    if path.suffix == ".parquet" and not start.startswith(b"PAR1"):
        return "it is no parquet file"
    return None


def count_checkpoints(run: Run) -> int:
    """Those that are in the run's folder already."""
    folder = Path(run["trainer.default_local_dir"]).expanduser()
    return len(CheckpointStore(folder, None).steps())


def paths_for_workers(run: Run) -> tuple[str, ...]:
    """Folders that processes on every node read: models (not those of the hub), adapters."""
    adapter = run.get("actor_rollout_ref.model.lora_adapter_path")
    folders = [*model_paths(run).values(), *([adapter] if adapter else [])]
    return tuple(dict.fromkeys(str(Path(path).absolute()) for path in folders if Path(path).exists()))


def ray_place(environment: dict[str, str]) -> tuple[str, str]:
    """Where Ray is told to put its files."""
    return "Ray's files", environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"


def places(run: Run, environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """What the run writes to, on every node."""
    found = [("run folder", str(Path(run["trainer.default_local_dir"]).expanduser().absolute()))]
    if run.needs_ray:
        found.append(ray_place(environment))
    if any(not Path(path).exists() for path in model_paths(run).values()):
        found.append(("models from the hub", str(hub_folder(environment))))
    return tuple(found)

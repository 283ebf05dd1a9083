"""What Hydra brings: its grammar, groups, primary files, folders of the user's own, and sweeps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.config import load, load_config
from verl.config.command_line import parse, read_arguments
from verl.config.composing import PRIMARY_FILES
from verl.config.overrides import Folders

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SEARCH_R1 = ["+trainer.val_only=true", "++trainer.seed=4", "trainer.logger=['wandb']"]


@pytest.fixture
def folder(tmp_path):
    """A folder of a user's own, with a primary file and recipes."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\ntrainer: {seed: 11, project_name: mine}\n"
        "critic: {ppo_micro_batch_size: 8}\n"
    )
    (tmp_path / "recipe" / "own.yaml").write_text(
        "# @package _global_\ntrainer: {seed: 12}\nalgorithm.lam: 0.5\n"
        "environment: {skyrl_gym: {sql: {db: a}}}\n"
    )
    (tmp_path / "recipe" / "misspelt.yaml").write_text("# @package _global_\ntrainer: {sede: 12}\n")
    (tmp_path / "recipe" / "bare.yaml").write_text("trainer: {seed: 12}\n")
    return tmp_path


def loaded_by(*arguments: str):
    return read_arguments([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        (["trainer.project_name='a,b'"], "trainer.project_name", "a,b"),
        ([r"trainer.project_name=a\,b"], "trainer.project_name", "a,b"),
        (["trainer.doctor_skip=[a,'b c',\"d\"]"], "trainer.doctor_skip", ["a", "b c", "d"]),
        (["data.mixture=[{path:a.jsonl,n:4}]"], "data.mixture", [{"path": "a.jsonl", "n": 4}]),
        (["trainer.seed=int(3.0)"], "trainer.seed", 3),
        (["trainer.seed=5", "trainer.save_freq=${trainer.seed}"], "trainer.save_freq", 5),
        (["trainer.project_name=${oc.env:RUN_OF}-x"], "trainer.project_name", "ada-x"),
        (["trainer.seed=${oc.decode:${oc.env:SEED_OF}}"], "trainer.seed", 9),
        (["trainer.seed=3", "~trainer.seed"], "trainer.seed", 0),
        (["~trainer.seed=7", "trainer.seed=3"], "trainer.seed", 3),
        (["+recipe=mixture", "~algorithm.kl_ctrl"], "algorithm.kl_ctrl.kl_coef", 0.001),
        (
            ["environment.env_config={a: {x: 1, y: 2}}", "~environment.env_config.a.x"],
            "environment.env_config",
            {"a": {"y": 2}},
        ),
        (
            ["environment.env_config={a: {x: 1}}", "environment.env_config={a: {y: 2}}"],
            "environment.env_config",
            {"a": {"x": 1, "y": 2}},
        ),
    ],
    ids=str,
)
def test_the_grammar_is_hydras(line, key, value, monkeypatch):
    monkeypatch.setenv("RUN_OF", "ada")
    monkeypatch.setenv("SEED_OF", "9")
    config = load_config(line)
    for name in key.split("."):
        config = config[name]
    assert config == value


def test_now_is_the_time_of_the_start():
    name = load_config(["trainer.experiment_name=run-${now:%Y-%m}"]).trainer.experiment_name
    assert re.fullmatch(r"run-\d{4}-\d\d", name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["trainer.project_name=${oc.env:NO_SUCH_VARIABLE}"], "Environment variable 'NO_SUCH_VARIABLE'"),
        (["+recipe=nothing"], "Could not find 'recipe/nothing' .*mixture"),
        (["recipe=mixture"], r"use \+recipe=mixture"),
        (["~environment.env_config.a"], "'environment.env_config.a' does not exist"),
        (["trainer.seed=???"], "asks for a value; expected trainer.seed=<value>"),
        (["hydra.run.dir=x"], "the run's folder is trainer.default_local_dir"),
        (["hydra.job.chdir=true"], "Nothing is written through Hydra"),
        (["trainer.seed=choice(1,2)"], "--multirun for a run of each"),
    ],
    ids=str,
)
def test_what_hydra_can_not_compose_is_said_in_one_line(line, words):
    with pytest.raises(ValueError, match=words) as error:
        load_config(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_the_same_as_a_group_and_as_a_file(recipe):
    program = "sft_trainer" if "sft" in recipe else "ppo_trainer"
    group = load([f"+recipe={recipe}"], program)
    file = load([f"@{ROOT}/configs/{recipe}.yaml"], program)
    assert group.config == file.config
    changed = {key for key, origin in file.origins.items() if origin.endswith(f"{recipe}.yaml")}
    assert changed and changed == {
        key for key, origin in group.origins.items() if origin == f"recipe/{recipe}"
    }


def test_recipes_and_files_come_in_the_order_of_the_line_above_the_environment(folder):
    (folder / "a.yaml").write_text("trainer: {seed: 21}\n")
    line = [f"@{folder}/a.yaml", "+recipe=own"]
    environment = {"VERL__TRAINER__SEED": "5", "VERL__TRAINER__SAVE_FREQ": "6"}
    for arguments, seed in ((line, 12), (line[::-1], 21), ([*line, "trainer.seed=1"], 1)):
        loaded = load(arguments, environment=environment, folders=Folders(directory=str(folder)))
        assert (loaded.config.trainer.seed, loaded.config.trainer.save_freq) == (seed, 6)
    assert load_config(["+recipe=[mixture,megatron]"]).actor_rollout_ref.actor.strategy == "megatron"


def test_a_folder_of_ones_own_has_primary_files_and_recipes_with_old_names(folder):
    loaded = loaded_by("--config-dir", folder, "--config-name", "mine", "+recipe=own")
    assert (loaded.config.trainer.seed, loaded.config.trainer.project_name) == (12, "mine")
    assert loaded.config.critic.ppo_micro_batch_size_per_gpu == 8
    assert loaded.config.algorithm.lam == 0.5
    assert loaded.config.environment.env_config == {"sql": {"db": "a"}}
    assert loaded.origins["trainer.project_name"] == "mine"
    assert loaded.origins["critic.ppo_micro_batch_size_per_gpu"] == "mine (critic.ppo_micro_batch_size)"
    assert loaded.origins["data.prompt_key"] == "default"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+recipe=misspelt"], "'trainer.sede' in 'trainer in recipe/misspelt'.*'trainer.seed'"),
        (["+recipe=bare"], "recipe/bare without a package.*@package _global_"),
        (["--config-name=nothing"], "Found no nothing.yaml in"),
        (["--config-name=sft_trainer"], "expected one of: ppo_trainer"),
        (["--config-path=/no/such"], "Found no folder at --config-path /no/such"),
    ],
    ids=str,
)
def test_a_mistake_in_ones_own_folder_is_said(folder, arguments, words):
    with pytest.raises(ValueError, match=words):
        loaded_by("--config-dir", folder, *arguments)


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_an_edited_primary_file_counts(name, tmp_path):
    for file in PRIMARY_FILES.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    file = tmp_path / f"{name}.yaml"
    text = file.read_text()
    if name == "ppo_trainer":
        file.write_text(re.sub(r"\n  seed: 0 ", "\n  seed: 31 ", text))
    else:
        file.write_text(f"{text}trainer: {{seed: 31}}\n")
    loaded = loaded_by("--config-path", tmp_path, "--config-name", name)
    assert loaded.config.trainer.seed == 31 and loaded.origins["trainer.seed"] == name
    assert loaded.config.actor_rollout_ref.actor.strategy == ("fsdp" if name == "ppo_trainer" else "megatron")
    assert loaded_by("--config-path", tmp_path, "trainer.seed=1").config.trainer.seed == 1


def test_the_megatron_file_derives_from_the_other_one():
    text = yaml.safe_load((PRIMARY_FILES / "ppo_megatron_trainer.yaml").read_text())
    assert text == {
        "defaults": ["ppo_trainer", "_self_"],
        "actor_rollout_ref": {"actor": {"strategy": "megatron"}},
    }


def test_a_sweep_is_as_many_jobs_as_values_combine_to():
    line = ["-m", "trainer.seed=1,2", "+recipe=mixture,agent", "max_turns=3", "@a.yaml"]
    jobs = parse(line, ("ppo_trainer",)).jobs()
    assert len(jobs) == 4 and all(job[:2] == ["max_turns=3", "@a.yaml"] for job in jobs)
    assert jobs[1][2:] == ["trainer.seed=1", "+recipe=agent"]
    for wrong, words in ((["-m", "trainer.seed=1"], "several values"), (["-m", "trainer.sede=1,2"], "sede")):
        with pytest.raises(ValueError, match=words):
            parse(wrong, ("ppo_trainer",)).jobs()


def swept(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--multirun", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)


@pytest.mark.slow
def test_each_job_of_a_sweep_has_a_process_and_a_folder_of_its_own(tmp_path):
    """--print shows what a job's own process composes."""
    done = swept(tmp_path, "--print", "trainer.seed=1,2", "+recipe=mixture", "trainer.project_name=it's")
    assert done.returncode == 0, done.stderr
    jobs = [yaml.safe_load(text) for text in re.findall(r"\ndata:\n.*?\n# \d+ keys", done.stdout, re.DOTALL)]
    assert [job["trainer"]["seed"] for job in jobs] == [1, 2]
    for seed, job in enumerate(jobs, 1):
        trainer = job["trainer"]
        own = f"{tmp_path}/checkpoints/it's/gsm8k/trainer.seed={seed}"
        assert (trainer["default_local_dir"], trainer["experiment_name"]) == (
            own,
            f"gsm8k-trainer.seed={seed}",
        )
        assert trainer["total_training_steps"] == 120 and Path(own).is_dir()


@pytest.mark.slow
def test_a_sweep_says_by_its_exit_status_that_a_job_failed_after_the_others_have_run(tmp_path):
    done = swept(
        tmp_path, "--print", "trainer.seed=-1,2", "hydra.sweep.dir=s", "hydra.sweep.subdir=${hydra.job.num}"
    )
    assert done.returncode == 2
    assert "error: Found trainer.seed=-1" in done.stderr
    assert f"the job in {tmp_path}/s/0 ended with status 2" in done.stderr
    assert f"default_local_dir: {tmp_path}/s/1" in done.stdout

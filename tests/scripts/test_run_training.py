"""scripts/run_training.sh with a stand-in for Python: what it starts, with which settings, and stops."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl.config import load_config, load_sft_config

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, os, pathlib, signal, sys, time
program = sys.argv[2] if sys.argv[1] == "-m" else ""
notes = pathlib.Path(os.environ["NOTES"])
if program in os.environ.get("REAL", "").split():
    os.environ["PYTHONPATH"] = os.environ["SOURCE"]
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
if os.environ.get("LD_PRELOAD"):
    (notes / "preloaded").open("a").write(program + "\\n")
if program == "verl.config":  # all settings are right; those that a run gets are loaded by the tests
    sys.exit()
if program == "verl.preflight.servers":
    sys.exit(print("retrieval"))
if program:
    (notes / program.split(".")[-1]).write_text(json.dumps([os.getpid(), sys.argv[3:]]))
if program.endswith("microworld"):
    time.sleep(1 if "slow" in os.environ.get("STUB", "") else 0)
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir(parents=True)
    for name in ("corpus.jsonl", "train.parquet", "test.parquet", "test_3hop.parquet"):
        (folder / name).touch()
if program.endswith(("mixture", "hops")):
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir(parents=True)
    for name in ("corpus.jsonl", "train.parquet", "test.parquet", "sft_train.parquet"):
        (folder / name).touch()
    (folder / "settings.yaml").write_text(json.dumps({"data.val_files": ["one", "two"]}))
if program.endswith("fsdp_sft_trainer"):
    [setting] = [each for each in sys.argv if each.startswith("trainer.default_local_dir=")]
    model = pathlib.Path(setting.split("=", 1)[1].strip("'")) / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").touch()
if program.endswith("sft_rows"):
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir(parents=True)
    for name in ("sft_train.parquet", "sft_val.parquet"):
        (folder / name).touch()
if program.endswith("server"):
    if "bad" in os.environ.get("STUB", ""):
        sys.exit("error: line 7 is broken")
    print("retrieval server on http://127.0.0.1:1234/retrieve", flush=True)
    time.sleep(300)
if program.endswith(("main_ppo", "verl.rl")):
    def stop(number, frame):
        time.sleep(300 if "deaf" in os.environ["STUB"] else 0.3)  # the rest of a step
        sys.exit(3)
    if "loading" not in os.environ.get("STUB", ""):  # without them it does not handle signals yet
        signal.signal(signal.SIGUSR1, stop)
        signal.signal(signal.SIGUSR2, stop)
    (notes / "folder").write_text(os.getcwd())
    (notes / "running").touch()
    time.sleep(300 if "wait" in os.environ.get("STUB", "") else 0)
    [setting] = [each for each in sys.argv if each.startswith("trainer.default_local_dir=")]
    folder = pathlib.Path(setting.split("=", 1)[1].strip("'"))
    if not os.environ.get("STUB") and folder.is_dir():
        (folder / "summary.json").touch()
        (folder / "latest_checkpointed_iteration.txt").write_text("130")
        (notes / "runs").open("a").write(folder.name + "\\n")
    sys.exit({"fail": 3, "refuse": 2}.get(os.environ.get("STUB", ""), 0))
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A checkout under a path with odd characters, with the scripts and the stand-in for Python."""
    repository = tmp_path / "it's my (work), 1"
    (repository / "bin").mkdir(parents=True)
    (repository / "notes").mkdir()
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, repository / name)
    for name in ("train_sft.sh", "train_grpo.sh", "train_ppo.sh"):
        shutil.copy(ROOT / name, repository)
    for name in ("base_model", "base_model_plain"):
        (repository / "data_prep" / name).mkdir(parents=True)
        (repository / "data_prep" / name / "config.json").write_text("{}")
    (repository / "bin" / "stand_in.py").write_text(STAND_IN)
    python = repository / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "$(dirname "$0")/stand_in.py" "$@"\n')
    python.chmod(0o755)
    return repository


SETTINGS = "verl.config"
SERVERS = "verl.preflight.servers"


def start(repository: Path, *flags: str, script: str = "train_grpo.sh", cwd=None, **variables: str):
    """Start a script; REAL names the programs that the stand-in runs as they are, instead of `verl.config`
    that finds no mistake and `verl.preflight.servers` that wants a search server.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATA_DIR", "BASE_MODEL", "SEED", "RETRIEVER_URL", "EXPERIMENT_NAME")
    }
    environment |= {"VIRTUAL_ENV": "active", "NOTES": str(repository / "notes"), "SOURCE": str(ROOT)}
    environment |= variables
    environment["PATH"] = f"{repository / 'bin'}:{environment['PATH']}"
    return subprocess.Popen(
        ["bash", str(repository / script), *flags],
        cwd=cwd or repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )


def heed_signals() -> None:
    """A shell cannot trap what was ignored when it began, as hang-ups are below nohup and some CI runners."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(repository: Path, *flags: str, **options) -> tuple[int, str]:
    """Exit status and stderr."""
    process = start(repository, *flags, **options)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def note(repository: Path, program: str) -> tuple[int, list[str]] | None:
    """(process id, arguments) of a program that was started, else None."""
    path = repository / "notes" / program
    return tuple(json.loads(path.read_text())) if path.exists() and path.read_text() else None


def settings(repository: Path):
    found = note(repository, "main_ppo")
    assert found is not None
    with contextlib.chdir(repository):
        return load_config(found[1])


def called(repository: Path):
    """Return the folder in which the run was started, and its settings as they are read there."""
    found = note(repository, "main_ppo")
    assert found is not None
    cwd = (repository / "notes" / "folder").read_text()
    with contextlib.chdir(cwd):
        return cwd, load_config(found[1])


def sft_settings(repository: Path):
    with contextlib.chdir(repository):
        return load_sft_config(note(repository, "fsdp_sft_trainer")[1])


def test_without_arguments_a_world_is_made_served_and_trained_on(repository):
    assert run(repository, SEED="4", REAL=f"{SETTINGS} {SERVERS}", LD_PRELOAD="libm.so.6") == (0, "")
    assert (repository / "notes" / "preloaded").read_text() == "verl.trainer.main_ppo\n"  # not the server
    config = settings(repository)
    assert config.data.train_files == "data/microworld/seed4/train.parquet"
    assert config.data.extra_val_files == "data/microworld/seed4/test_3hop.parquet"
    assert config.actor_rollout_ref.model.path == "data_prep/base_model"
    assert (config.trainer.seed, config.algorithm.adv_estimator) == (4, "grpo")
    assert config.trainer.default_local_dir == "verl_checkpoints/microworld-seed4-base_model-grpo-seed4"
    assert config.retriever.url == "http://127.0.0.1:1234/retrieve"
    pid, flags = note(repository, "server")
    assert flags[flags.index("--corpus_path") + 1] == "data/microworld/seed4/corpus.jsonl"
    assert not psutil.pid_exists(pid)


def test_packages_that_a_run_needs_are_read_from_its_files_and_overrides(repository):
    def extras(*arguments: str) -> str:
        command = f'source "{ROOT}/scripts/run_training.sh"; more_extras "$@"'
        run = ["bash", "-euc", command, "more_extras", *arguments]
        return subprocess.run(run, cwd=repository, capture_output=True, text=True, check=True).stdout

    assert extras("--config", "configs/search_r1_grpo_72b.yaml", "max_turns=3") == ",megatron,vllm"
    assert extras("@configs/search_r1_grpo_32b.yaml") == ",vllm"
    assert extras("configs/search_r1_grpo.yaml", "actor_rollout_ref.actor.strategy=megatron") == ",megatron"


def test_an_override_on_the_command_line_comes_last(repository):
    assert run(repository, "max_turns=7", "trainer.seed=9", script="train_ppo.sh")[0] == 0
    config = settings(repository)
    assert (config.max_turns, config.trainer.seed, config.algorithm.adv_estimator) == (7, 9, "gae")


def test_rows_of_ones_own_are_not_validated_on_the_worlds_extra_questions(repository):
    assert run(repository, "data.train_files=my.parquet", "data.val_files=my_test.parquet")[0] == 0
    data = settings(repository).data
    assert (data.train_files, data.val_files, data.extra_val_files) == ("my.parquet", "my_test.parquet", None)


def test_folders_may_have_any_name_and_are_relative_to_the_caller(repository, tmp_path):
    data = tmp_path / "it's (mine), a=b"
    model = tmp_path / "my model"
    for folder in (data, model):
        folder.mkdir()
    for file in (data / "train.parquet", data / "test.parquet", data / "corpus.jsonl", model / "config.json"):
        file.touch()
    assert run(repository, cwd=tmp_path, DATA_DIR=data.name, BASE_MODEL="my model") == (0, "")
    config = settings(repository)
    assert config.data.val_files == f"{data}/test.parquet"
    assert config.actor_rollout_ref.model.path == config.critic.model.path == str(model)
    assert config.data.max_start_length == 2048  # another model than ours: Search-R1's settings


def test_paths_of_the_caller_are_relative_to_the_caller_and_ours_to_the_repository(repository, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "more.yaml").write_text("custom_reward_function: {path: reward.py}\n")
    (tmp_path / "reward.py").touch()
    flags = ["data.train_files=mine/rows.parquet", "@more.yaml"]
    assert run(repository, *flags, cwd=tmp_path / "mine" / "..") == (0, "")
    cwd, config = called(repository)
    assert Path(cwd) == tmp_path
    assert config.data.train_files == "mine/rows.parquet"
    assert config.custom_reward_function.path == "reward.py"
    ours = f"{repository}/verl_checkpoints/microworld-seed0-base_model-grpo-seed0"
    assert config.trainer.default_local_dir == f"{ours}-train_files-rows.parquet-more"
    assert config.data.val_files == f"{repository}/data/microworld/seed0/test.parquet"
    assert config.actor_rollout_ref.model.path == f"{repository}/data_prep/base_model"


def test_a_recipe_of_the_repository_is_found_from_elsewhere(repository, tmp_path):
    assert run(repository, "--config", "configs/search_r1_grpo.yaml", cwd=tmp_path) == (0, "")
    assert called(repository)[1].data.max_start_length == 2048


def test_rows_may_be_jsonl(repository, tmp_path):
    for name in ("train", "test", "sft_train", "sft_val"):
        (tmp_path / f"{name}.jsonl").touch()
    (tmp_path / "corpus.jsonl").touch()
    assert run(repository, DATA_DIR=str(tmp_path)) == (0, "")
    data = settings(repository).data
    assert (data.train_files, data.val_files) == (f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl")
    assert run(repository, DATA_DIR=str(tmp_path), script="train_sft.sh") == (0, "")
    data = sft_settings(repository).data
    assert (data.train_files, data.val_files) == (f"{tmp_path}/sft_train.jsonl", f"{tmp_path}/sft_val.jsonl")
    (tmp_path / "train.parquet").touch()
    status, errors = run(repository, DATA_DIR=str(tmp_path))
    assert status == 2 and "holds train.parquet and train.jsonl. Remove the one" in errors
    for path in tmp_path.glob("train.*"):
        path.unlink()
    status, errors = run(repository, DATA_DIR=str(tmp_path))
    assert "holds no train.parquet and no train.jsonl" in errors and "search-r1 rows" in errors


def test_the_servers_that_a_run_asks_are_said_with_its_recipe_and_nothing_is_started(repository, tmp_path):
    tests = {"verifiers": [{"name": "code", "label": "[]"}]}
    row = {"prompt": "Add.", "env_class": "single_turn", "reward_model": {"ground_truth": tests}}
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "more.yaml").write_text("max_turns: 1")
    flags = ["--servers", "--config", f"{tmp_path}/more.yaml"]
    process = start(repository, *flags, DATA_DIR=str(tmp_path), REAL=f"{SETTINGS} {SERVERS}")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "code\n"), errors
    assert not (repository / "verl_checkpoints").exists() and note(repository, "main_ppo") is None
    process = start(repository, "--servers", script="train_sft.sh")
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", 0)
    assert not (repository / "data").exists()


def shell(command: str, *arguments: str | Path, **variables: str) -> str:
    """Return what a command prints that has the script's functions."""
    program = f"source {ROOT}/scripts/run_training.sh; {command}"
    return subprocess.check_output(
        ["bash", "-c", program, "bash", *arguments], env=os.environ | variables, text=True
    )


def test_rows_to_validate_on_may_have_the_name_of_others(tmp_path):
    (tmp_path / "validation.parquet").touch()
    validation = f"data.val_files='{tmp_path}/validation.parquet'"
    assert shell("rl_overrides", DATA_DIR=str(tmp_path)).splitlines()[1] == validation
    (tmp_path / "test.jsonl").touch()
    assert (
        shell("rl_overrides", DATA_DIR=str(tmp_path)).splitlines()[1]
        == f"data.val_files='{tmp_path}/test.jsonl'"
    )


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("hub/models--Qwen--Qwen2.5-3B/snapshots/3aab1f1954e9cc14eb9509a215f9e5ca08227a9b", "Qwen2.5-3B"),
        ("Qwen/Qwen2.5-3B", "Qwen2.5-3B"),
        ("models/mine/", "mine"),
        ("runs/mine/global_step_7/actor/huggingface", "mine"),
    ],
)
def test_a_run_is_named_after_its_model(path, label):
    assert shell('model_label "$1"', path) == f"{label}\n"


def test_supervised_training_makes_demonstrations_and_starts_no_server(repository):
    assert run(repository, "trainer.save_freq=7", SEED="4", script="train_sft.sh") == (0, "")
    config = sft_settings(repository)
    assert config.data.train_files == "data/microworld/seed4/sft_train.parquet"
    assert config.data.val_files == "data/microworld/seed4/sft_val.parquet"
    assert config.trainer.test_freq > 0
    assert config.model.partial_pretrain == "data_prep/base_model_plain"
    assert (config.trainer.seed, config.trainer.save_freq, config.data.segments_key) == (4, 7, "segments")
    run_dir = "verl_checkpoints/microworld-seed4-base_model_plain-sft-seed4"
    assert config.trainer.default_local_dir == run_dir
    assert note(repository, "server") is None and note(repository, "main_ppo") is None


def test_a_small_models_folder_gets_the_tiny_models_settings_and_its_runs_name(repository):
    model = repository / "verl_checkpoints" / "microworld-seed4-base_model_plain-sft-seed4" / "huggingface"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    for size, max_start_length in ((5_000_000, 64), (64_000_000, 2048)):
        with (model / "model.safetensors").open("wb") as file:
            file.truncate(size)
        assert run(repository, SEED="4", BASE_MODEL=str(model)) == (0, "")
        config = settings(repository)
        assert config.data.max_start_length == max_start_length
        assert config.trainer.experiment_name == "microworld-seed4-base_model_plain-sft-seed4-grpo-seed4"


@pytest.mark.parametrize(
    "flags, variables, url",
    [
        ([], {"RETRIEVER_URL": "http://a:1/retrieve,http://b/x"}, "http://a:1/retrieve,http://b/x"),
        (["retriever.url=http://c/x"], {}, "http://c/x"),
        (["+retriever.url=http://c/x"], {"RETRIEVER_URL": "http://a:1"}, "http://c/x"),
        (["do_search=false"], {}, "http://127.0.0.1:8000/retrieve"),
        (["trainer.dry_run=true"], {}, "http://127.0.0.1:8000/retrieve"),
    ],
)
def test_no_server_is_started_beside_a_users_own_or_without_search(repository, flags, variables, url):
    assert run(repository, *flags, REAL=SERVERS, **variables)[0] == 0
    assert note(repository, "server") is None
    assert settings(repository).retriever.url == url


def test_the_status_is_the_runs_and_the_server_is_stopped(repository):
    assert run(repository, STUB="fail")[0] == 3
    assert not psutil.pid_exists(note(repository, "server")[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_the_server(repository, number):
    process = start(repository, STUB="wait")
    deadline = time.monotonic() + 30
    while note(repository, "main_ppo") is None:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    for program in ("server", "main_ppo"):
        assert not psutil.pid_exists(note(repository, program)[0])


def test_the_server_ends_with_a_script_that_is_killed(repository):
    process = start(repository, STUB="wait")
    wait_until_running(repository, process)
    server, run_itself = (psutil.Process(note(repository, name)[0]) for name in ("server", "main_ppo"))
    process.kill()
    try:
        server.wait(timeout=30)
    finally:
        for left in (server, run_itself):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.communicate(timeout=30)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_usr1_and_a_first_ctrl_c_are_for_the_run_which_ends_as_it_likes(repository, number):
    process = start(repository, STUB="wait")
    wait_until_running(repository, process)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert not psutil.pid_exists(note(repository, "server")[0])


def test_a_second_ctrl_c_ends_the_run_and_the_server_at_once(repository):
    process = start(repository, STUB="wait deaf")
    wait_until_running(repository, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted: the run is ended at once; the same command goes on" in errors
    for program in ("server", "main_ppo"):
        assert not psutil.pid_exists(note(repository, program)[0])


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "interrupted: no step of this run was begun\n"),
        (signal.SIGUSR1, 3, "stopped: asked to stop before the first step; the same command begins again\n"),
    ],
)
@pytest.mark.parametrize("program", ["main_ppo", "microworld"])
def test_a_signal_while_it_loads_is_answered_with_a_line_and_no_folder_is_left(
    repository, number, status, line, program
):
    process = start(repository, STUB="wait loading" if program == "main_ppo" else "slow world")
    deadline = time.monotonic() + 30
    while not (repository / "notes" / ("running" if program == "main_ppo" else program)).exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (status, line)
    assert list((repository / "verl_checkpoints").glob("*")) == []
    if program == "main_ppo":
        assert not psutil.pid_exists(note(repository, "server")[0])


def wait_until_running(repository, process):
    deadline = time.monotonic() + 30
    while not (repository / "notes" / "running").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("overrides", "label"),
    [
        ([], ""),
        (
            ["trainer.total_training_steps=3", "data.val_batch_size=8", "actor_rollout_ref.actor.optim.lr=1"],
            "",
        ),
        (
            ["algorithm.adv_estimator=rloo", "+reward_model.search_cost=0.1"],
            "-adv_estimator-rloo-search_cost-0.1",
        ),
        (["custom_reward_function.path={folder}/my reward.py"], "-path-myreward.py"),
    ],
)
def test_a_run_is_called_after_the_overrides_that_decide_what_it_learns(
    repository, tmp_path, overrides, label
):
    """Else the second of two runs goes on with the first one's weights, or finds it done."""
    (tmp_path / "my reward.py").write_text("def compute_score(*arguments): return 0\n")
    assert run(repository, *(override.format(folder=tmp_path) for override in overrides))[0] == 0
    name = settings_of_the_script(repository)["trainer.experiment_name"]
    assert name == f"'microworld-seed0-base_model-grpo-seed0{label}'"


@pytest.mark.parametrize(
    ("line", "label"),
    [
        (["--config", "configs/agent.yaml"], "-agent"),
        (["--config=configs/agent.yaml", "max_turns=2"], "-agent-max_turns-2"),
        (["--config", "configs/microworld_grpo.yaml"], ""),  # the settings of a run without --config
        (["@configs/agent.yaml"], "-agent"),
        (["@", "configs/agent.yaml"], "-agent"),
        (["+recipe=agent"], "-agent"),
    ],
)
def test_a_run_is_called_after_its_files_of_settings(repository, line, label):
    """Otherwise --config configs/agent.yaml finds the quickstart's run, which has other settings."""
    assert run(repository, *line)[0] == 0
    settings_given = [argument for argument in note(repository, "main_ppo")[1] if "=" in argument]
    name = dict(argument.split("=", 1) for argument in settings_given)["trainer.experiment_name"]
    assert name == f"'microworld-seed0-base_model-grpo-seed0{label}'"


def settings_of_the_script(repository):
    settings = [argument for argument in note(repository, "main_ppo")[1] if not argument.startswith("@")]
    return dict(argument.split("=", 1) for argument in settings)


def test_the_mixture_is_made_and_gets_a_supervised_start_once(repository, tmp_path):
    for number, flags in enumerate((["--config", "configs/mixture.yaml"], ["--config=configs/mixture.yaml"])):
        assert run(repository, *flags, "max_turns=4", SEED="4") == (0, "")
        config = settings(repository)
        start = note(repository, "fsdp_sft_trainer")
        assert (config.max_turns, config.trainer.seed, config.data.max_response_length) == (4, 4, 64)
        assert config.data.val_files == ["one", "two"]
        assert config.trainer.experiment_name.startswith("mixture-seed4-start-grpo-seed4")
        assert config.actor_rollout_ref.model.path == "verl_checkpoints/mixture-seed4-start/huggingface"
        if number == 1:  # neither was made again
            assert start is None and note(repository, "mixture") is None
            continue
        sft = sft_settings(repository)
        assert sft.data.train_files.endswith("data/mixture/seed4/sft_train.parquet")
        assert sft.model.partial_pretrain == f"{repository}/data_prep/base_model"
        assert sft.optim.name == "muon"
        for name in ("fsdp_sft_trainer", "mixture"):
            (repository / "notes" / name).unlink()


def test_three_hops_go_on_from_the_run_on_one_and_two_which_is_made_once(repository):
    first = "microworld-seed4-base_model-grpo-seed4"
    for times in (1, 2):
        assert run(repository, "--config", "configs/hops.yaml", SEED="4") == (0, "")
        config = settings(repository)
        runs = (repository / "notes" / "runs").read_text().split()
        assert runs == [first, *[config.trainer.experiment_name] * times]
        assert config.trainer.experiment_name.startswith("hops-seed4-")
        model = f"verl_checkpoints/{first}/global_step_130/actor/huggingface"
        assert (config.actor_rollout_ref.model.path, config.data.val_files) == (model, ["one", "two"])
    (repository / "own").mkdir()  # a model of one's own: no run before
    (repository / "own" / "config.json").touch()
    assert run(repository, "--config", "configs/hops.yaml", SEED="5", BASE_MODEL="own") == (0, "")
    assert settings(repository).actor_rollout_ref.model.path == str(repository / "own")
    assert (repository / "notes" / "runs").read_text().split()[3:] == ["hops-seed5-own-grpo-seed5"]


def test_a_config_file_takes_the_place_of_the_settings_and_is_relative_to_the_caller(repository, tmp_path):
    (tmp_path / "mine.yaml").write_text("max_turns: 9\n")
    assert run(repository, "--config", "mine.yaml", cwd=tmp_path) == (0, "")
    _, config = called(repository)
    assert (config.max_turns, config.data.max_start_length) == (9, 256)
    status, errors = run(repository, "--config", "other.yaml", REAL=SETTINGS)
    assert status == 2 and "Found no file at @other.yaml" in errors
    status, errors = run(repository, "--config")
    assert status == 2 and "expected one such as --config configs/mixture.yaml" in errors


@pytest.mark.parametrize("line", [["--doctor", "max_turns=7"], ["max_turns=7", "--doctor"]])
def test_doctor_checks_the_run_that_would_be_started(repository, line):
    assert run(repository, *line, SEED="4") == (0, "")
    assert note(repository, "main_ppo") is None
    found = note(repository, "preflight")
    assert found is not None and "max_turns=7" in found[1] and "--doctor" not in found[1]
    assert "data.train_files='data/microworld/seed4/train.parquet'" in found[1]


def test_rl_runs_the_driver_as_an_actor_and_supervised_training_has_none(repository):
    assert run(repository, "--rl", "max_turns=7", SEED="4") == (0, "")
    found = note(repository, "rl")
    assert found is not None and "max_turns=7" in found[1] and "--rl" not in found[1]
    status, errors = run(repository, "--rl", script="train_sft.sh")
    assert status == 2 and "expected train_grpo.sh or train_ppo.sh" in errors


def test_a_server_that_does_not_start_is_said_with_its_log(repository):
    status, errors = run(repository, STUB="bad")
    assert status == 2
    assert "the retrieval server did not start on data/microworld" in errors and "line 7 is broken" in errors
    assert note(repository, "main_ppo") is None


@pytest.mark.parametrize(
    ("script", "files", "missing"),
    [
        ("train_grpo.sh", (), "no train.parquet"),
        ("train_grpo.sh", ("train.parquet", "test.parquet"), "no corpus.jsonl"),
        ("train_sft.sh", (), "no sft_train.parquet"),
    ],
)
def test_a_data_folder_that_lacks_a_file_is_a_mistake_of_the_user(repository, script, files, missing):
    (repository / "nothing").mkdir()
    for name in files:
        (repository / "nothing" / name).touch()
    status, errors = run(repository, script=script, DATA_DIR="nothing")
    assert status == 2 and f"holds {missing}" in errors


@pytest.mark.parametrize("script", ["train_grpo.sh", "train_sft.sh"])
@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("trainer.sede=1", "error: Found the unknown key 'trainer.sede'"),
        ("trainer.seed=x", "error: Found trainer.seed=x; expected a whole number"),
        ("--help", "0.01"),
        ("--print", "0.01"),
    ],
)
def test_a_mistake_and_help_are_answered_before_anything_is_made(repository, script, argument, answer):
    before = {path for path in repository.rglob("*") if path.name != "__pycache__"}
    lr = "optim.lr=0.01" if "sft" in script else "actor_rollout_ref.actor.optim.lr=0.01"
    process = start(repository, lr, argument, script=script, REAL=SETTINGS)
    out, errors = process.communicate(timeout=60)
    assert answer in (errors if "=" in argument else out)
    assert process.returncode == (2 if "=" in argument else 0)
    assert {path for path in repository.rglob("*") if path.name != "__pycache__"} == before


VARIABLES = ("SEED", "BASE_MODEL", "DATA_DIR", "RETRIEVER_URL", "EXPERIMENT_NAME")


@pytest.mark.parametrize("script", ["train_grpo.sh", "train_ppo.sh", "train_sft.sh"])
def test_help_begins_with_the_usage_and_the_variables(repository, script):
    out, _ = start(repository, "--help", script=script).communicate(timeout=60)
    beginning = out.partition("settings: ")[0]
    assert beginning.startswith(f"usage: bash {script} [--config FILE] [--doctor]")
    assert [name for name in (*VARIABLES, "--help KEY") if f"\n  {name} " not in beginning] == []


def test_help_of_a_key_is_about_that_key_alone(repository):
    process = start(repository, "trainer.seed=7", "--help", "trainer.seed", REAL=SETTINGS)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "usage:" not in out
    assert "trainer.seed=7\n" in out and out.count("\n") < 6


def test_help_makes_no_environment(repository):
    line = 'cd "$0" && env -u VIRTUAL_ENV -u CONDA_PREFIX bash train_grpo.sh --help'
    done = subprocess.run(["bash", "-c", line, repository], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 0 and done.stdout.startswith("usage: ") and "train_grpo.sh makes it" in done.stdout
    )
    assert not (repository / ".venv").exists()


def test_a_run_that_is_refused_leaves_no_folder(repository):
    assert run(repository, STUB="refuse")[0] == 2
    assert list((repository / "verl_checkpoints").glob("*")) == []

"""scripts/run_training.sh with a stand-in for Python: what it starts, with which settings, and stops."""

from __future__ import annotations

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

from verl.trainer.config.loading import load_config
from verl.trainer.config.sft_keys import load_sft_config, validate_sft

ROOT = Path(__file__).parents[2]
STAND_IN = """
import json, os, pathlib, signal, sys, time
program = sys.argv[2] if sys.argv[1] == "-m" else ""
notes = pathlib.Path(os.environ["NOTES"])
if program:
    (notes / program.split(".")[-1]).write_text(json.dumps([os.getpid(), sys.argv[3:]]))
if program.endswith("microworld"):
    folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir(parents=True)
    for name in ("corpus.jsonl", "train.parquet", "test.parquet", "test_3hop.parquet"):
        (folder / name).touch()
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
if program.endswith("main_ppo"):
    def stop(number, frame):
        time.sleep(0.3)  # the rest of a step
        sys.exit(3)
    signal.signal(signal.SIGUSR1, stop)
    (notes / "running").touch()
    time.sleep(300 if "wait" in os.environ.get("STUB", "") else 0)
    sys.exit(3 if "fail" in os.environ.get("STUB", "") else 0)
"""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A checkout under a path with odd characters, with the scripts and the stand-in for Python."""
    repository = tmp_path / "it's my (work), 1"
    (repository / "bin").mkdir(parents=True)
    (repository / "notes").mkdir()
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    for name in ("train_sft.sh", "train_grpo.sh", "train_ppo.sh"):
        shutil.copy(ROOT / name, repository)
    (repository / "bin" / "stand_in.py").write_text(STAND_IN)
    python = repository / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$(dirname "$0")/stand_in.py" "$@"\n')
    python.chmod(0o755)
    return repository


def start(repository: Path, *flags: str, script: str = "train_grpo.sh", cwd=None, **variables: str):
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATA_DIR", "BASE_MODEL", "SEED", "RETRIEVER_URL", "EXPERIMENT_NAME")
    }
    environment |= {"VIRTUAL_ENV": "active", "NOTES": str(repository / "notes"), **variables}
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
    return load_config(found[1])


def test_without_arguments_a_world_is_made_served_and_trained_on(repository):
    assert run(repository, SEED="4") == (0, "")
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


def test_an_override_on_the_command_line_comes_last(repository):
    assert run(repository, "max_turns=7", "trainer.seed=9", script="train_ppo.sh")[0] == 0
    config = settings(repository)
    assert (config.max_turns, config.trainer.seed, config.algorithm.adv_estimator) == (7, 9, "gae")


def test_folders_may_have_any_name_and_are_relative_to_the_caller(repository, tmp_path):
    data, model = tmp_path / "it's (mine), a=b", tmp_path / "my model"
    for folder in (data, model):
        folder.mkdir()
    for name in ("train.parquet", "test.parquet", "corpus.jsonl"):
        (data / name).touch()
    assert run(repository, cwd=tmp_path, DATA_DIR=data.name, BASE_MODEL="my model") == (0, "")
    config = settings(repository)
    assert config.data.val_files == f"{data}/test.parquet"
    assert config.actor_rollout_ref.model.path == config.critic.model.path == str(model)
    assert config.data.max_start_length == 2048  # another model than ours: Search-R1's settings


def test_supervised_training_makes_demonstrations_and_starts_no_server(repository):
    assert run(repository, "trainer.save_freq=7", SEED="4", script="train_sft.sh") == (0, "")
    config = load_sft_config(note(repository, "fsdp_sft_trainer")[1])
    assert config.data.train_files == "data/microworld/seed4/sft_train.parquet"
    assert config.data.val_files == "data/microworld/seed4/sft_val.parquet"
    assert config.trainer.test_freq > 0
    assert config.model.partial_pretrain == "data_prep/base_model_plain"
    assert (config.trainer.seed, config.trainer.save_freq, config.data.segments_key) == (4, 7, "segments")
    run_dir = "verl_checkpoints/microworld-seed4-base_model_plain-sft-seed4"
    assert config.trainer.default_local_dir == run_dir
    assert note(repository, "server") is None and note(repository, "main_ppo") is None


def test_supervised_training_on_rows_of_ones_own(repository, tmp_path):
    status, errors = run(repository, DATA_DIR=str(tmp_path), script="train_sft.sh")
    assert (status, errors.count("\n")) == (1, 1) and "holds no sft_train.parquet" in errors
    (tmp_path / "sft_train.parquet").touch()
    variables = {"DATA_DIR": str(tmp_path), "BASE_MODEL": "Qwen/Qwen2.5-3B"}
    assert run(repository, script="train_sft.sh", **variables) == (0, "")
    config = load_sft_config(note(repository, "fsdp_sft_trainer")[1])
    validate_sft(config)
    assert config.data.val_files is None and config.model.partial_pretrain == "Qwen/Qwen2.5-3B"
    assert config.data.max_length == 4096 and config.model.enable_gradient_checkpointing


def test_a_small_models_folder_gets_the_tiny_models_settings_and_its_runs_name(repository):
    model = repository / "verl_checkpoints" / "microworld-seed4-base_model_plain-sft-seed4" / "huggingface"
    model.mkdir(parents=True)
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
    assert run(repository, *flags, **variables)[0] == 0
    assert note(repository, "server") is None
    assert settings(repository).retriever.url == url


def test_the_status_is_the_runs_and_the_server_is_stopped(repository):
    assert run(repository, STUB="fail")[0] == 3
    assert not psutil.pid_exists(note(repository, "server")[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


def test_usr1_is_for_the_run_which_ends_as_it_likes(repository):
    process = start(repository, STUB="wait")
    deadline = time.monotonic() + 30
    while not (repository / "notes" / "running").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert not psutil.pid_exists(note(repository, "server")[0])


@pytest.mark.parametrize("line", [["--doctor", "max_turns=7"], ["max_turns=7", "--doctor"]])
def test_doctor_checks_the_run_that_would_be_started(repository, line):
    assert run(repository, *line, SEED="4") == (0, "")
    assert note(repository, "main_ppo") is None
    found = note(repository, ["verl", "doctor"][-1])
    assert found is not None and "max_turns=7" in found[1] and "--doctor" not in found[1]
    assert "data.train_files='data/microworld/seed4/train.parquet'" in found[1]


def test_doctor_checks_a_supervised_run_by_its_own_keys(repository):
    assert run(repository, "--doctor", "optim.lr=1e-4", script="train_sft.sh") == (0, "")
    assert note(repository, "fsdp_sft_trainer") is None
    _, arguments = note(repository, "doctor")
    assert arguments[:2] == ["--config-name", "sft_trainer"]
    assert load_sft_config(arguments[2:]).optim.lr == 1e-4


def test_a_server_that_does_not_start_is_said_with_its_log(repository):
    status, errors = run(repository, STUB="bad")
    assert status == 1
    assert "the retrieval server did not start on data/microworld" in errors and "line 7 is broken" in errors
    assert note(repository, "main_ppo") is None


def test_a_folder_without_rows_or_without_a_corpus_is_said(repository, tmp_path):
    status, errors = run(repository, DATA_DIR=str(tmp_path))
    assert (status, errors.count("\n")) == (1, 1) and "holds no train.parquet" in errors
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    status, errors = run(repository, DATA_DIR=str(tmp_path))
    assert (status, errors.count("\n")) == (1, 1) and "holds no corpus.jsonl" in errors

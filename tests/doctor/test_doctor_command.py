"""The command and the start of a run: exit codes, JSON, chosen checks, recorded facts, and no false alarm."""

import json
import os
import subprocess
import sys
import tempfile
import time

import pytest
from doctor_facts import BASE_MODEL, ROOT, facts_with, machine_with

from data_prep.microworld import write_world
from verl.doctor.collect import collect
from verl.doctor.command import main
from verl.doctor.facts import Place, to_json
from verl.doctor.facts_run import load_run
from verl.doctor.registry import chosen, diagnose
from verl.doctor.start import start_is_sound
from verl.trainer.config import load_config
from verl.trainer.main_ppo import run as train

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Ray as on a machine of one's own: a cluster that somebody else has started here is not seen."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: sockets are below it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_world(3, folder, num_train=32, num_test=8, num_3hop=2)
    return folder


@pytest.fixture(scope="module")
def url(world, serve_documents):
    documents = [json.loads(line) for line in (world / "corpus.jsonl").open(encoding="utf-8")]
    with serve_documents(documents) as address:
        yield f"{address}/retrieve"


def quickstart(kind: str) -> list[str]:
    """The settings of `bash train_grpo.sh` (or ppo), as scripts/run_training.sh has them."""
    script = f"source scripts/run_training.sh; settings_for tiny {kind}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def for_everybody(world, url):
    return [
        *quickstart("grpo"),
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={BASE_MODEL}",
        f"critic.model.path={BASE_MODEL}",
        "algorithm.adv_estimator=grpo",
        f"retriever.url={url}",
    ]


@pytest.fixture
def overrides(for_everybody, tmp_path):
    return [*for_everybody, f"trainer.default_local_dir={tmp_path}/run"]


def test_the_quickstart_on_this_machine_has_no_findings(overrides, capsys):
    assert main(overrides) == 0
    note, count = capsys.readouterr().out.splitlines()
    looked = int(count.split()[0])
    assert count == f"{looked} checks of this run on 1 machine(s): 0 errors, 0 warnings"
    assert note.startswith(f"note: {len(chosen()) - looked} checks had nothing to look at, without ")
    assert "without --index_path: index" in note and "without a run on Ray: shared-paths, ray-disk, " in note
    assert "retriever" not in note and "settings" not in note


def test_what_has_no_effect_is_said(overrides, capsys):
    assert main(["--quick", *overrides, "trainer.max_restarts=2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "warning: [no-effect] trainer.max_restarts=2 has no effect: the run is one process"
    )


def test_ppo_and_several_processes_on_this_machine_have_no_findings(overrides):
    line = [*overrides, *quickstart("ppo"), "algorithm.adv_estimator=gae", "trainer.device=cpu"]
    line += ["trainer.n_gpus_per_node=2"]
    assert diagnose(collect(load_run(line, "ppo_trainer"), quick=True)) == []


def test_without_a_run_the_machine_alone_is_looked_at(capsys):
    assert main([]) == 0
    note, count = capsys.readouterr().out.splitlines()[-2:]
    assert "checks of this machine: 0 errors" in count and int(count.split()[0]) < len(chosen())
    without_run = note.partition("without a run's settings (key=value): ")[2].partition(";")[0].split(", ")
    assert {"settings", "model", "data", "retriever", "ray-resources"} <= set(without_run)
    assert "without a Ray cluster at RAY_ADDRESS: " in note and "ray-address" not in note


def test_without_a_run_a_stale_ray_address_is_an_error(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert main([]) == 2
    first, *_, count = capsys.readouterr().out.splitlines()
    assert first.startswith("error: [ray-address] RAY_ADDRESS=127.0.0.1:9: no Ray head node answers there")
    assert " checks of this machine: 1 errors, " in count


def test_errors_end_with_2_and_json_says_the_same(overrides, capsys):
    line = [*overrides, "retriever.url=http://127.0.0.1:9/retrieve", "retriever.timeout=0.3"]
    assert main(line) == 2
    assert capsys.readouterr().out.startswith("error: [retriever] retriever.url=http://127.0.0.1:9/retrieve")
    assert main(["--json", "--only", "retriever,home", *line]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["checks"] == ["home", "retriever"] and (told["errors"], told["warnings"]) == (1, 0)
    assert told["findings"][0]["check"] == "retriever" and told["findings"][0]["do"]
    assert main(["--skip", "retriever", *line]) == 0


def test_warnings_alone_end_with_0(overrides, capsys, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/where")
    assert main([*overrides, "trainer.logger=[console,wandb]"]) == 0
    assert capsys.readouterr().out.startswith("warning: [wandb-key]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.n_gpus_per_node=3", "trainer.device=cpu", f"{ACTOR}.strategy=megatron",
          "critic.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"],
         "error: [settings] tensor_model_parallel_size=2"),
        (["trainer.seed=-1"], "error: [settings] Found trainer.seed=-1"),
        ([f"{ACTOR}.ppo_mini_batch_size=1000"], "ppo_mini_batch_size=1000"),
        ([f"{ACTOR}.ppo_mini_batch_size=50"], "warning: [batches] a step has 128"),
        (["data.max_prompt_length=99999"], "error: [lengths]"),
        (["data.train_files=/no/such.parquet"], "error: [data] data.train_files=/no/such"),
        (["actor_rollout_ref.model.path=/no/such/model"], "error: [model] actor_rollout_ref.model."),
        (["retriever.corpus_path=/no/such.jsonl"], "error: [corpus] retriever.corpus_path="),
        (["trainer.default_local_dir=/proc/run"], "error: [writable] run folder: /proc/run"),
        (["trainer.n_gpus_per_node=8"], "asks for 8 GPUs, the Ray that it would start on this machine"),
        (["trainer.nnodes=2", "trainer.device=cpu"], "error: [ray-address] trainer.nnodes=2, and"),
    ],
)  # fmt: skip
def test_a_run_that_can_not_work_is_told_why_in_one_line(overrides, settings, said):
    (finding,) = diagnose(collect(load_run([*overrides, *settings], "ppo_trainer"), quick=True))
    assert said in finding.line


def test_what_can_not_be_read_is_one_line(capsys):
    assert main(["trainer.sede=1"]) == 2
    assert "The nearest known key is 'trainer.seed'" in capsys.readouterr().err
    assert main(["--config-name", "nothing", "a=1"]) == 2
    assert "expected one of: ppo_trainer" in capsys.readouterr().err
    assert main(["--only", "retreiver"]) == 2
    assert "did you mean retriever" in capsys.readouterr().err


def test_supervised_runs_are_looked_at_too(tmp_path, capsys):
    line = ["--config-name", "sft_trainer", "--quick", f"model.partial_pretrain={BASE_MODEL}"]
    line += ["data.train_files=/no/such.parquet", f"trainer.default_local_dir={tmp_path}/run"]
    assert main(line) == 2
    out = capsys.readouterr().out
    assert out.startswith("error: [data] data.train_files=/no/such.parquet") and "1 errors, 0 warnings" in out


def test_facts_of_another_machine_can_be_judged(tmp_path, capsys):
    ill = facts_with(here=machine_with(places=(Place("home", "~", "Disk quota exceeded", 0, 10**9),)))
    (tmp_path / "facts.json").write_text(json.dumps(to_json(ill)))
    assert main(["--facts", str(tmp_path / "facts.json")]) == 0
    assert "can't be written (Disk quota exceeded)" in capsys.readouterr().out
    assert main(["--save_facts", str(tmp_path / "here.json"), "--only", "home"]) == 0
    assert main(["--facts", str(tmp_path / "here.json"), "--only", "home"]) == 0
    assert main(["--facts", str(tmp_path / "none.json")]) == 2


def test_passwords_in_addresses_are_neither_said_nor_kept(overrides, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hunter2@mirror.example")
    line = [*overrides, "retriever.url='http://me:hunter2@127.0.0.1:9/a,http://you:hunter2@[::1]:9/b'"]
    line += ["retriever.timeout=0.3", "--quick", "--save_facts", str(tmp_path / "facts.json")]
    assert main(line) == main(["--json", *line]) == 2
    said = capsys.readouterr()
    kept = (tmp_path / "facts.json").read_text()
    assert "hunter2" not in said.out + said.err + kept and "http://127.0.0.1:9/a" in said.out
    assert "https://mirror.example" in kept


def test_a_file_without_facts_is_one_line(tmp_path, capsys):
    for number, text in enumerate(["[]", "{}", '{"here": 3}', "facts"]):
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        assert main(["--facts", str(file)]) == 2
        assert f"{file} holds no facts that --save_facts wrote" in capsys.readouterr().err


def test_the_list_names_every_check(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == chosen()


def test_the_start_of_a_run_ends_with_2_at_an_error_and_goes_on_at_a_warning(overrides, capsys, tmp_path):
    line = [*overrides, "retriever.url=http://127.0.0.1:9/retrieve", "retriever.timeout=0.3"]
    assert train(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: [retriever]") and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    uneven = load_config([*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=50"])
    assert start_is_sound(uneven, "ppo_trainer")
    assert capsys.readouterr().err.startswith("warning: [batches]")


def test_the_start_leaves_out_what_doctor_skip_names(overrides, capsys):
    line = [*overrides, "retriever.url=http://127.0.0.1:9/retrieve", "retriever.timeout=0.3"]
    assert start_is_sound(load_config([*line, "trainer.doctor_skip=[retriever]"]), "ppo_trainer")
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="no check named 'retrever'"):
        start_is_sound(load_config([*line, "trainer.doctor_skip=[retrever]"]), "ppo_trainer")


def test_a_trouble_of_the_doctors_own_does_not_stop_a_run(overrides, capsys, monkeypatch):
    monkeypatch.setattr("verl.doctor.start.collect", lambda *_, **__: 1 / 0)
    assert start_is_sound(load_config(overrides), "ppo_trainer")
    assert "the run goes on: ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr("verl.doctor.start.collect", lambda *_, **__: int("a word in /proc"))
    assert start_is_sound(load_config(overrides), "ppo_trainer")
    assert "the run goes on: ValueError" in capsys.readouterr().err


def test_the_quick_part_is_quick(overrides):
    config = load_config(overrides)
    assert start_is_sound(config, "ppo_trainer")
    started = time.process_time()
    assert start_is_sound(config, "ppo_trainer")
    assert time.process_time() - started < 0.5


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(overrides):
    command = [sys.executable, "-m", "verl.doctor", "--json", *overrides]
    variables = dict(os.environ, HF_HUB_OFFLINE="1")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and json.loads(done.stdout)["findings"] == [], done.stdout + done.stderr

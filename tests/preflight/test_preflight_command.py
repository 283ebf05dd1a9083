"""The command and the start of a run: exit statuses, JSON, chosen checks, and no false alarm."""

import json
import tempfile

import pytest
from huggingface_hub import constants
from preflight_cases import BASE_MODEL, ROOT

from data_prep.microworld import write_world
from search_r1.search.probe import RetrievalProbe
from verl.preflight import machine_checks
from verl.preflight.__main__ import main
from verl.preflight.preflight import LOGIN_CHECKS, choose, passes_quick_checks
from verl.trainer.config import load_config
from verl.trainer.main_ppo import run as train

DOWN = ["retriever.url=http://127.0.0.1:9/retrieve", "retriever.timeout=0.3"]


@pytest.fixture(autouse=True)
def machine_of_ones_own(monkeypatch):
    """No cluster that somebody else has started here is seen, nor how full the home folder is."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_checks, "HOME_BYTES", 0)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: sockets are below it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.fixture(scope="module")
def for_everybody(tmp_path_factory, serve_documents):
    """The settings of `bash train_grpo.sh` in a small world with its server."""
    world = tmp_path_factory.mktemp("world")
    write_world(3, world, num_train=32, num_test=8, num_3hop=2)
    documents = [json.loads(line) for line in (world / "corpus.jsonl").open(encoding="utf-8")]
    with serve_documents(documents) as address:
        yield [
            *quickstart("grpo"),
            f"data.train_files={world}/train.parquet",
            f"data.val_files={world}/test.parquet",
            f"actor_rollout_ref.model.path={BASE_MODEL}",
            f"critic.model.path={BASE_MODEL}",
            "algorithm.adv_estimator=grpo",
            f"retriever.url={address}/retrieve",
        ]


def quickstart(kind: str) -> list[str]:
    return [f"@{ROOT}/configs/microworld_{kind}.yaml"]


@pytest.fixture
def overrides(for_everybody, tmp_path):
    return [*for_everybody, f"trainer.default_local_dir={tmp_path}/run"]


def test_the_quickstart_on_this_machine_has_no_findings(overrides, capsys):
    assert main(overrides) == 0
    expected = f"{len(choose())} checks of this run on 1 machine: 0 errors, 0 warnings\n"
    assert capsys.readouterr().out == expected


def test_errors_end_with_2_and_json_says_the_same(overrides, capsys):
    line = [*overrides, *DOWN]
    assert main(line) == 2
    assert capsys.readouterr().out.startswith("error: [retriever] retriever.url=http://127.0.0.1:9/retrieve")
    assert main(["--json", "--only", "retriever,home", *line]) == 2
    told = json.loads(capsys.readouterr().out)
    assert set(told["checks"]) == {"home", "retriever"} and (told["errors"], told["warnings"]) == (1, 0)
    finding = told["findings"][0]
    assert (finding["check"], finding["level"]) == ("retriever", "error") and finding["do"]
    assert main(["--skip", "retriever", *line]) == 0


def test_warnings_alone_end_with_0(overrides, capsys):
    assert main(["--quick", *overrides, "trainer.max_restarts=2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("warning: [no-effect] trainer.max_restarts=2 has no effect: the run is one")


def test_a_primary_file_of_ones_own_is_read_as_the_trainer_reads_it(overrides, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {max_restarts: 2}\n")
    line = ["--quick", f"--config-dir={tmp_path}", "--config-name", "mine", *overrides]
    assert main(line) == 0
    assert "trainer.max_restarts=2 has no effect" in capsys.readouterr().out


def test_passwords_in_addresses_are_not_said(overrides, capsys):
    line = [*overrides, "retriever.url='http://me:hunter2@127.0.0.1:9/a,http://you:hunter2@[::1]:9/b'"]
    line += ["retriever.timeout=0.3", "--quick"]
    assert main(line) == main(["--json", *line]) == 2
    told = capsys.readouterr()
    assert "hunter2" not in told.out + told.err and "http://127.0.0.1:9/a" in told.out


def test_the_list_names_every_check(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == choose()


def test_the_start_of_a_run_ends_with_2_at_an_error_and_goes_on_at_a_warning(overrides, capsys, tmp_path):
    assert train([*overrides, *DOWN]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: [retriever]") and len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    uneven = load_config([*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=50"])
    assert passes_quick_checks(uneven)
    assert capsys.readouterr().err.startswith("warning: [batches]")


def test_the_start_leaves_out_what_doctor_skip_names(overrides, capsys):
    def start(skipped: str) -> bool:
        config = load_config([*overrides, *DOWN, f"trainer.doctor_skip=[{skipped}]"])
        return passes_quick_checks(config, RetrievalProbe())

    assert start("retriever") and capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="no check named 'retrever'"):
        start("retrever")


@pytest.fixture
def job_elsewhere(overrides, monkeypatch):
    """A job of GPUs and servers that this machine has not, with a Ray cluster that is over."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    sizes = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
    ]
    return [*overrides, *DOWN, *sizes, "trainer.device=cuda"]


def test_a_login_node_finds_no_fault_with_what_the_job_alone_has(job_elsewhere, monkeypatch, capsys):
    folder = next(word for word in job_elsewhere if word.startswith("data.train_files="))
    corpus = folder.removeprefix("data.train_files=").replace("train.parquet", "corpus.jsonl")
    monkeypatch.setenv("RETRIEVAL_ARGS", f"--corpus_path {corpus} --topk 3")
    assert main(["--login", *job_elsewhere]) == 0
    assert capsys.readouterr().out == f"{len(LOGIN_CHECKS)} checks of this job: 0 errors, 0 warnings\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--corpus_path /nowhere.jsonl",
            "[retrieval-flags] RETRIEVAL_ARGS='--corpus_path /nowhere.jsonl': --c",
        ),
        (f"--corpus_path {__file__} --index_pth x", "unrecognized arguments: --index_pth x"),
        (
            f"--corpus_path {__file__} --retriever_name e5 --index_path /none",
            "--index_path: /none does not exist",
        ),
        (
            f"--corpus_path {__file__} --reranker_model org/ranker",
            "--reranker_model=org/ranker is not in the ca",
        ),
    ],
)
def test_a_login_node_looks_at_the_flags_of_the_jobs_servers(
    flags, words, job_elsewhere, monkeypatch, capsys
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("RETRIEVAL_ARGS", flags)
    assert main(["--login", "--only", "retrieval-flags,hub-offline", *job_elsewhere]) == 2
    first, last = capsys.readouterr().out.splitlines()
    assert words in first and last.endswith("1 errors, 0 warnings")


def test_a_login_node_looks_at_the_environment_of_the_jobs_servers(job_elsewhere, monkeypatch, capsys):
    monkeypatch.setenv("RETRIEVAL_ARGS", f"--corpus_path {__file__}")
    monkeypatch.setenv("RETRIEVAL_ENV", "/none/.venv")
    assert main(["--login", "--only", "retrieval-flags", *job_elsewhere]) == 2
    assert "setup_environment retrieval,dense /none/.venv" in capsys.readouterr().out

"""`search-r1 prepare`: a job's models come from a hub, and the job then runs without any network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from outside_servers import hub_of_files, put_into_cache

from data_prep import job, wiki18
from data_prep.microworld import write_world
from verl.utils import hub

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"
SETTINGS = [
    *("trainer.device=cpu", "trainer.total_training_steps=1", "trainer.val_before_train=false"),
    *("trainer.test_freq=-1", "trainer.save_freq=-1", "data.val_data_num=2", "do_search=false"),
    *("data.max_prompt_length=512", "data.max_start_length=256", "data.max_obs_length=64"),
    *("data.max_response_length=16", "data.train_batch_size=2", "actor_rollout_ref.rollout.name=native"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"),
    *("actor_rollout_ref.rollout.n_agent=1", "critic.model.path=org/critic"),
]


def no_namespace() -> bool:
    unshare = shutil.which("unshare")
    return unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(no_namespace(), reason="unshare -rn makes no network namespace here")
def test_a_prepared_job_runs_without_a_network(tmp_path):
    write_world(3, tmp_path / "world", num_train=8, num_test=2, num_3hop=2)
    ranker = tmp_path / "ranker"
    shutil.copytree(BASE_MODEL, ranker)
    prepared = tmp_path / "prepared.sh"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "BASE_MODEL": "org/policy",
        "DATA_DIR": str(tmp_path / "world"),
        "TRAIN_COMMAND": f"bash {ROOT}/train_ppo.sh",
        "RETRIEVAL_ARGS": f"--corpus_path {tmp_path}/world/corpus.jsonl --reranker_model org/ranker",
    }
    overrides = [*SETTINGS, f"trainer.default_local_dir={tmp_path}/run"]
    with hub_of_files({"org/policy": BASE_MODEL, "org/critic": BASE_MODEL, "org/ranker": ranker}) as url:
        result = subprocess.run(
            ["bash", f"{ROOT}/scripts/prepare_job.sh", "--out", str(prepared), *overrides],
            env=environment | {"HF_ENDPOINT": url},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    cached = {folder.name for folder in (tmp_path / "hf" / "hub").glob("models--*")}
    assert cached == {"models--org--policy", "models--org--critic", "models--org--ranker"}
    environment.pop("HF_HOME")  # the file says where they are
    training = subprocess.run(
        ["unshare", "-rn", "bash", "-c", 'source "$0"; exec $TRAIN_COMMAND "$@"', prepared, *overrides],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert training.returncode == 0, training.stdout[-2000:] + training.stderr[-2000:]
    assert "step 1/1" in training.stdout


@pytest.fixture
def hub_here(tmp_path, monkeypatch):
    """A hub with two models that this process asks, and an empty cache, which it returns."""
    few = tmp_path / "few"
    few.mkdir()
    (few / "config.json").write_text("{}")
    (few / "pytorch_model.bin").write_bytes(bytes(64))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    with hub_of_files({"org/old": few, "org/new": BASE_MODEL}) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield tmp_path / "cache"


def test_models_come_with_the_weights_that_they_have(hub_here, tmp_path, capsys):
    job.fetch_models({"--encoder": "org/old", "--model": "org/new", "--tokenizer": str(BASE_MODEL)})
    assert [path.stat().st_size for path in hub_here.glob("models--org--old/snapshots/*/*.bin")] == [64]
    assert list(hub_here.glob("models--org--new/snapshots/*/model.safetensors"))
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "--encoder=org/old",
        "--model=org/new",
    ]


def test_a_model_that_the_hub_does_not_give_any_more_is_taken_from_the_cache_and_the_next_one_is_fetched(
    hub_here, tmp_path, capsys
):
    job.fetch_models({"--encoder": "org/old"})
    (tmp_path / "few" / "config.json").unlink()
    job.fetch_models({"--encoder": "org/old", "--model": "org/new"})
    assert list(hub_here.glob("models--org--new/snapshots/*/model.safetensors"))
    assert "answers 404 for org/old" in capsys.readouterr().err


def test_a_model_that_does_not_fit_on_the_disk_is_not_begun(hub_here, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"org/new needs .* MB, and .* has 1.0 kB free; export HF_HOME="):
        job.fetch_models({"--model": "org/new"})
    assert not list(hub_here.glob("models--org--new/snapshots/*/model.safetensors"))


def test_the_index_and_the_corpus_of_wikipedia_are_known_by_their_files(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(wiki18, "fetch", lambda name, folder: fetched.append((name, folder)))
    flags = (
        f"--corpus_path={tmp_path}/w/wiki-18.jsonl --index_path {tmp_path}/w/bm25,{tmp_path}/e5_Flat.index"
    )
    (tmp_path / "e5_Flat.index").touch()
    job.fetch_retrieval_files([*flags.split(), "--topk", "3"])
    assert fetched == [("corpus", tmp_path / "w"), ("bm25", tmp_path / "w")]


def test_a_job_reads_where_its_models_are_and_what_the_user_has_set(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "a cache"))
    put_into_cache(tmp_path / "a cache", "org/new", BASE_MODEL)
    own = tmp_path / "modules.sh"
    own.write_text("export FROM_SITE=yes\n")
    prepared = tmp_path / "prepared.sh"
    prepared.write_text(job.job_setup(str(own)))
    show = 'source "$0"; echo "$FROM_SITE $HF_HUB_OFFLINE $HF_HUB_CACHE"'
    result = subprocess.run(["bash", "-c", show, prepared], capture_output=True, text=True, check=True)
    assert result.stdout == f"yes 1 {tmp_path}/a cache\n"
    assert hub.local_folder("org/new") is not None

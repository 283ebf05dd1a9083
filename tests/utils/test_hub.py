"""A hub that is silent, that refuses or that is absent: programs take what is cached, after two seconds."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from outside_servers import KINDS, SilentServer, hub_of_files, put_into_cache, server_that_is_away

from data_prep.hub import fetch_file, fetch_model
from verl.config.loading import load_config
from verl.preflight.preflight import dry_run
from verl.utils import hub, outside
from verl.utils.hub import use_cache_if_hub_is_away

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"
sys.path.append(str(ROOT / "tests" / "search"))  # its cross-encoder


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A hub's cache with a model for training and one for retrieval."""
    from tiny_cross_encoder import save_model

    folder = tmp_path_factory.mktemp("hub")
    put_into_cache(folder / "cache", "org/policy", BASE_MODEL)
    put_into_cache(folder / "cache", "org/ranker", save_model(folder / "ranker", 1))
    return folder / "cache"


@pytest.fixture
def asked(cache, monkeypatch):
    """asked(url, seconds): lets this process ask the hub at an address, with the cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # what a test sets is taken back

    def ask(url: str, seconds: float = 0.2) -> None:
        monkeypatch.setattr(outside, "ANSWER_SECONDS", seconds)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )

    return ask


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cached_is_used_and_what_is_nowhere_is_named(kind, asked, capsys):
    with server_that_is_away(kind) as url:
        asked(url, seconds=2.0)
        begun = time.monotonic()
        with pytest.raises(
            ValueError,
            match=f"--model=org/other is not in the hub's cache, and {url} .*"
            "; on a machine with network: hf download org/other",
        ):
            use_cache_if_hub_is_away({"--model": "org/other"})
        assert not hub.is_offline()
        use_cache_if_hub_is_away({"--model": "org/policy", "--reranker_model": "org/ranker"})
        assert time.monotonic() - begun < 2 * 5
    assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {url} ") and line.endswith("; the cache is used")
    use_cache_if_hub_is_away({"--model": "org/policy"})  # asks no more, and says no more
    assert capsys.readouterr().err == ""


def evaluate() -> None:
    assert fetch_model("org/policy").name == "0" * 40


def plan() -> None:
    settings = [
        "trainer.device=cpu",
        "algorithm.adv_estimator=grpo",
        "data.train_files=x",
        "data.val_files=x",
    ]
    dry_run(load_config([*settings, "actor_rollout_ref.model.path=org/policy"]))


def rerank() -> None:
    from search_r1.search import launch

    parser = argparse.ArgumentParser()
    launch.add_backend_arguments(parser)
    flags = ["--retriever_name", "google", "--reranker_model", "org/ranker", "--device", "cpu"]
    launch.open_retriever(parser.parse_args(flags)).close()


def encode() -> None:
    from search_r1.search.dense.encoder import text_encoder

    assert text_encoder("org/ranker")(["w1 w2"]).shape == (1, 32)


@pytest.mark.parametrize("program", [evaluate, plan, rerank, encode])
def test_a_program_asks_a_silent_hub_once(program, asked, monkeypatch):
    monkeypatch.setenv("GOOGLE_API_KEY", "key")
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine")
    server = SilentServer()
    asked(server.url)
    try:
        program()
    finally:
        server.close()
    assert len(server.connections) == 1


def test_a_data_set_of_a_silent_hub_is_named_and_what_is_there_is_taken(asked, tmp_path, capsys):
    server = SilentServer()
    asked(server.url)
    (tmp_path / "rows.jsonl").write_text("{}")
    try:
        with pytest.raises(ValueError, match="rows.jsonl of org/rows can't be had from the hub"):
            fetch_file("org/rows", "rows.jsonl")
    finally:
        server.close()
    assert len(server.connections) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_hub_that_answers_is_left_to_the_load(asked, tmp_path, capsys, monkeypatch):
    with hub_of_files({"org/new": BASE_MODEL}) as url:
        asked(url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        fetched = fetch_model("org/new")
        with pytest.raises(ValueError, match="answers 404 for org/unknown .*; .* hf download org/unknown"):
            fetch_model("org/unknown")
    assert {file.name for file in BASE_MODEL.glob("*.json")} <= {file.name for file in fetched.iterdir()}
    assert capsys.readouterr().err.count("note:") == 0 and not hub.is_offline()

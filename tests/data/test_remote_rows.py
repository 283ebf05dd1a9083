"""Rows that lie elsewhere are copied once for each version, and the run sees local files."""

from pathlib import Path

import fsspec
import pytest

from verl.config.loading import load
from verl.data.remote_rows import fetch_rows, with_local_rows


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """fsspec's store in memory, which stands for any other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = fsspec.filesystem("memory")
    store.pipe("/rows/train.jsonl", b"first")
    yield store
    store.rm("/rows", recursive=True)


def test_all_files_of_a_run_are_local_copies_and_others_stay(elsewhere):
    elsewhere.pipe("/rows/more.jsonl", b"more")
    url = "memory://rows/train.jsonl"
    arguments = [f"data.train_files={url}", "data.val_files=[mine.parquet,'memory://rows/*.jsonl']"]
    arguments.append(f"trainer.evals=[{{files: '{url}', every: 5}}]")
    loaded = load(arguments)
    config = with_local_rows(loaded).config
    assert Path(config.data.train_files).read_bytes() == b"first"
    mine, more, train = config.data.val_files
    assert mine == "mine.parquet" and Path(more).read_bytes() == b"more" and Path(train).name == "train.jsonl"
    assert config.trainer.evals == [{"files": config.data.train_files, "every": 5}]
    local = load([f"data.train_files={train}"])
    assert with_local_rows(local) is local
    plan = load([f"data.train_files={url}", "trainer.dry_run=true"])
    assert with_local_rows(plan) is plan


def test_mixtures_and_demonstrations_are_fetched_too(elsewhere):
    url = "memory://rows/train.jsonl"
    config = with_local_rows(load([f"data.mixture=[{{path: '{url}', ratio: 2}}]"])).config
    assert Path(config.data.mixture[0]["path"]).is_file() and config.data.mixture[0]["ratio"] == 2
    config = with_local_rows(
        load([f"data.train_files={url}"], "sft_trainer", program_name="sft_trainer")
    ).config
    assert Path(config.data.train_files).is_file()


def test_a_file_is_copied_again_when_it_has_changed_and_its_last_copy_serves_when_nobody_answers(
    elsewhere, monkeypatch, capsys
):
    url = "memory://rows/train.jsonl"
    [first] = fetch_rows(url)
    assert fetch_rows(url) == [first]
    elsewhere.pipe("/rows/train.jsonl", b"second, longer")
    [second] = fetch_rows(url)
    assert second.read_bytes() == b"second, longer" and first.read_bytes() == b"first"

    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(type(elsewhere), "ukey", fail)
    assert fetch_rows(url) == [second]
    assert "does not answer (no route to host); its last copy is taken" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"memory://rows/other.jsonl, which can't be fetched \(no route"):
        fetch_rows("memory://rows/other.jsonl")


def test_a_missing_file_and_a_missing_package_are_named(elsewhere):
    with pytest.raises(ValueError, match="Found no rows at memory://rows/none.jsonl"):
        fetch_rows("memory://rows/none.jsonl")
    with pytest.raises(ValueError, match="Found no rows at .*no file fits"):
        fetch_rows("memory://rows/none*.jsonl")


def test_no_signature_and_no_password_of_an_address_is_shown(elsewhere, monkeypatch):
    def fail(*_, **__):
        raise OSError("403 for https://me:secret@host/rows.jsonl?X-Amz-Signature=secret")

    monkeypatch.setattr(type(elsewhere), "ukey", fail)
    with pytest.raises(ValueError, match=r"https://host/rows.jsonl\)") as raised:
        fetch_rows("memory://me:secret@rows/train.jsonl?X-Amz-Signature=secret")
    assert "secret" not in str(raised.value)

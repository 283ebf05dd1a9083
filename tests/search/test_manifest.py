"""An index is used with the corpus that it was built from, and with no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_r1.search import corpus as corpus_module
from search_r1.search import manifest as manifest_module
from search_r1.search.corpus import Corpus
from search_r1.search.manifest import Manifest, check_manifest, write_manifest

TEXTS = [f"passage number {k}" for k in range(1000)]


def write_corpus(path: Path, texts: list[str]) -> Corpus:
    path.write_text("".join(json.dumps({"id": str(k), "contents": t}) + "\n" for k, t in enumerate(texts)))
    return Corpus.open(path)


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write_corpus(tmp_path / "corpus.jsonl", TEXTS)


@pytest.fixture
def index(tmp_path, corpus) -> Path:
    """A folder with two files and its manifest."""
    folder = tmp_path / "bm25"
    (folder / "sub").mkdir(parents=True)
    (folder / "postings.bin").write_bytes(b"12345")
    (folder / "sub" / "terms.txt").write_text("terms")
    (folder / "write.lock").write_text("")
    command = ["python", "-m", "search_r1.search.index_builder", "--corpus_path", "corpus.jsonl"]
    of = corpus.fingerprint() | {"sha256": corpus.sha256(), "name": "corpus.jsonl"}
    write_manifest(folder, Manifest("bm25", of, {"k1": 0.9}, {"command": command}))
    return folder


def test_an_index_of_another_corpus_is_refused_with_both_named_and_the_command(tmp_path, index):
    other = write_corpus(tmp_path / "other.jsonl", TEXTS[:-1])
    with pytest.raises(ValueError) as caught:
        check_manifest(index, other)
    message = str(caught.value)
    assert "corpus.jsonl (1,000 documents" in message
    assert f"{tmp_path / 'other.jsonl'} (999 documents" in message
    assert f"index_builder --corpus_path {tmp_path / 'other.jsonl'} --overwrite`" in message


def test_a_letter_that_the_quick_look_misses_is_found_by_the_full_one(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "FINGERPRINT_BLOCKS", 4)
    monkeypatch.setattr(corpus_module, "FINGERPRINT_BLOCK_BYTES", 100)
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    index = tmp_path / "index"
    index.mkdir()
    write_manifest(index, Manifest("bm25", corpus.fingerprint() | {"sha256": corpus.sha256()}, {}, {}))
    changed = write_corpus(tmp_path / "corpus.jsonl", [*TEXTS[:100], "passage numbel 100", *TEXTS[101:]])
    assert check_manifest(index, changed) is not None
    with pytest.raises(ValueError, match="was built for the corpus"):
        check_manifest(index, changed, full=True)


@pytest.mark.parametrize("damage, message", [("missing", "is missing"), ("cut", "has 2 bytes")])
def test_an_index_that_lost_bytes_is_refused(index, corpus, damage, message):
    part = index / "sub" / "terms.txt"
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(b"te")
    with pytest.raises(ValueError, match=f"not whole, sub/terms.txt {message}, expected 5"):
        check_manifest(index, corpus)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_is_found_in_a_small_index_at_once_and_in_a_large_one_with_verify(
    index, corpus, monkeypatch
):
    flip(index / "postings.bin")
    with pytest.raises(ValueError, match=r"the index is damaged, postings\.bin is damaged: its sum"):
        check_manifest(index, corpus)
    monkeypatch.setattr(manifest_module, "SMALL_INDEX", 0)
    check_manifest(index, corpus)
    with pytest.raises(ValueError, match=r"postings\.bin is damaged"):
        check_manifest(index, corpus, full=True)


def test_a_manifest_that_says_something_else_than_was_written_is_damaged(index, corpus):
    path = index / "manifest.json"
    path.write_text(path.read_text().replace("0.9", "0.8"))
    with pytest.raises(ValueError, match="its sum is another"):
        check_manifest(index, corpus)


def test_an_index_of_an_older_version_has_no_sums(index, corpus, capsys):
    path = index / "manifest.json"
    values = json.loads(path.read_text())
    del values["crc32"], values["built"]["sums"]
    path.write_text(json.dumps(values))
    check_manifest(index, corpus, full=True)
    assert "has no sums (an older version built it)" in capsys.readouterr().err


def test_damaged_offsets_of_a_corpus_are_found_again(corpus):
    sidecar = corpus.path.with_name("corpus.jsonl.offsets.npy")
    expected = corpus.rows([3, 500])
    flip(sidecar)
    assert Corpus.open(corpus.path).rows([3, 500]) == expected

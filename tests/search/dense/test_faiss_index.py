"""FAISS files: Search-R1's and our own, read, and built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dense_parts import DIMENSION, HashEncoder, assert_is_top, make_corpus, true_top

faiss = pytest.importorskip("faiss")
pytest.importorskip("torch")

from search_r1.search.dense import faiss_index  # noqa: E402
from search_r1.search.dense.dense_retriever import DenseRetriever  # noqa: E402
from search_r1.search.dense.faiss_index import FaissIndex, build_index, read_mapped  # noqa: E402

CORPUS = make_corpus(1200)
VECTORS = HashEncoder().encode_queries(list(CORPUS.iter_contents()))
QUERIES = HashEncoder().encode_queries([f"word{i} word{i % 5}" for i in range(40)])


def no_progress(stage: str, done: int, total: int) -> None:
    pass


def write_as_search_r1(path: Path, faiss_type: str, vectors: np.ndarray = VECTORS) -> Path:
    """As its index_builder.py does."""
    index = faiss.index_factory(vectors.shape[1], faiss_type, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def search_file(path: Path, queries: np.ndarray, k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return FaissIndex(read_mapped(path), path, False, None, 1, lambda line: None).search(queries, k)


@pytest.mark.parametrize("faiss_type", ["Flat", "HNSW32", "IVF8,Flat"])
def test_search_r1s_files_give_what_faiss_finds(tmp_path: Path, faiss_type: str) -> None:
    path = write_as_search_r1(tmp_path / f"e5_{faiss_type}.index", faiss_type)
    retriever = DenseRetriever(CORPUS, path, HashEncoder())
    scores, rows = search_file(path, QUERIES, 5)
    assert_is_top(
        VECTORS, QUERIES, 5, np.array(scores), np.array(rows)
    )  # 64 of 8 lists and 64 candidates: all
    documents, found_scores = retriever.batch_search(["word3 word3", ""], 4)
    assert [len(row) for row in documents] == [len(row) for row in found_scores] == [4, 4]
    assert retriever.batch_search([], 4) == ([], [])
    retriever.close()


def test_flat_gives_the_same_bits_in_any_batch_and_ties_by_row(tmp_path: Path) -> None:
    vectors = np.repeat(VECTORS[:300], 4, axis=0)
    path = write_as_search_r1(tmp_path / "f.index", "Flat", vectors)
    scores, rows = search_file(path, QUERIES, 6)
    for number in range(len(QUERIES)):
        alone_scores, alone_rows = search_file(path, QUERIES[number : number + 1], 6)
        assert np.array_equal(alone_rows[0], rows[number])
        assert np.array_equal(alone_scores[0], scores[number])
    assert np.array_equal(np.array(rows), true_top(vectors, QUERIES, 6)[1])


def test_missing_hits_are_left_out_and_never_the_last_document(tmp_path: Path) -> None:
    path = write_as_search_r1(tmp_path / "ivf.index", "IVF32,Flat")
    retriever = DenseRetriever(CORPUS, path, HashEncoder(), faiss_nprobe=1)
    documents, scores = retriever.batch_search(["word1", "word2"], 900)
    assert all(0 < len(row) < 900 for row in documents)
    assert [len(row) for row in documents] == [len(row) for row in scores]
    found = [[document.row for document in row] for row in documents]
    assert all(len(set(row)) == len(row) for row in found)
    assert retriever.describe()["nprobe"] == 1


@pytest.mark.parametrize("keep", [0, 3, 40, 5000])
def test_a_file_that_is_not_whole_is_one_clear_error(tmp_path: Path, keep: int) -> None:
    path = write_as_search_r1(tmp_path / "f.index", "Flat")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"can't read .*cat part_"):
        DenseRetriever(CORPUS, path, HashEncoder())


@pytest.mark.parametrize("faiss_type", ["Flat", "HNSW16", "IVF8,Flat", "IVF8,SQ8", "PCA16,IVF8,Flat"])
def test_built_files_are_faisss_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faiss_type: str) -> None:
    monkeypatch.setattr(faiss_index, "ADD_ROWS", 500)
    path = tmp_path / "built.index"
    build_index(VECTORS, path, faiss_type, False, no_progress)
    index = faiss.read_index(str(path))
    assert (index.ntotal, index.d, index.metric_type) == (1200, DIMENSION, faiss.METRIC_INNER_PRODUCT)
    rows = np.array(search_file(path, VECTORS[:50], 10)[1])
    expected = true_top(VECTORS, VECTORS[:50], 10)[1]
    overlap = np.mean(
        [len(set(a) & set(b)) / 10 for a, b in zip(rows.tolist(), expected.tolist(), strict=True)]
    )
    assert overlap > (0.25 if "PCA" in faiss_type else 0.95)
    if faiss_type == "Flat":
        by_search_r1 = write_as_search_r1(tmp_path / "theirs.index", "Flat")
        assert path.read_bytes() == by_search_r1.read_bytes()

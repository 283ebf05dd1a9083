"""Building the exact index (resume, checks, sources of vectors) and the retriever over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_parts import DIMENSION, HashEncoder, make_corpus

torch = pytest.importorskip("torch")

from search_r1.search.corpus import Corpus  # noqa: E402
from search_r1.search.dense import embeddings  # noqa: E402
from search_r1.search.dense.dense_retriever import DenseRetriever  # noqa: E402
from search_r1.search.dense.embeddings import FILES, map_vectors, write_embeddings  # noqa: E402
from search_r1.search.manifest import Manifest, write_manifest  # noqa: E402


def no_progress(stage: str, done: int, total: int) -> None:
    pass


def build(
    corpus: Corpus, folder: Path, *encoders: HashEncoder, dtype: str = "float16", source: Path | None = None
) -> dict:
    folder.mkdir(exist_ok=True)
    used: Any = list(encoders or [HashEncoder()])
    parameters = write_embeddings(corpus, folder, used, dtype, no_progress, source)
    write_manifest(folder, Manifest("exact", corpus.fingerprint(), parameters, {}))
    return parameters


def stored(folder: Path, dtype: str = "float32") -> np.ndarray:
    return map_vectors(folder / FILES[dtype], dtype, DIMENSION)


def test_index_finds_each_passage_by_its_own_text(tmp_path: Path) -> None:
    corpus = make_corpus(300)
    build(corpus, tmp_path / "index", dtype="float32")
    lines: list[str] = []
    retriever = DenseRetriever(corpus, tmp_path / "index", HashEncoder(), report=lines.append)
    texts = list(corpus.iter_contents())
    documents, scores = retriever.batch_search(texts[::7], 3)
    assert [row[0].row for row in documents] == list(range(0, 300, 7))
    assert documents[1][0].contents == texts[7]
    assert all(isinstance(score, float) for row in scores for score in row)
    assert "28.8 kB, memory-mapped" in lines[0]
    json.dumps(retriever.describe())
    retriever.close()
    retriever.close()


@pytest.mark.parametrize("num_encoders", [1, 3])
def test_vectors_are_in_the_order_of_the_corpus_with_any_number_of_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_encoders: int
) -> None:
    monkeypatch.setattr(embeddings, "CPU_WINDOW", 64)
    corpus = make_corpus(1000)
    build(corpus, tmp_path, *(HashEncoder() for _ in range(num_encoders)), dtype="float32")
    expected = HashEncoder().encode_queries(list(corpus.iter_contents()))
    assert np.array_equal(stored(tmp_path), expected)


def test_a_stopped_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "CPU_WINDOW", 50)
    corpus = make_corpus(500)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "a", HashEncoder(fail_after=300))
    with (tmp_path / "a" / "embeddings.f16").open("ab") as file:
        file.write(b"half a row")
    encoder = HashEncoder()
    build(corpus, tmp_path / "a", encoder)
    assert encoder.num_passages < 450
    build(corpus, tmp_path / "b")
    assert (tmp_path / "a/embeddings.f16").read_bytes() == (tmp_path / "b/embeddings.f16").read_bytes()


def test_vectors_of_search_r1s_flat_file_are_taken_over(tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    corpus = make_corpus(120)
    path = tmp_path / "e5_Flat.index"
    vectors = HashEncoder().encode_queries(list(corpus.iter_contents()))
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(vectors)
    faiss.write_index(index, str(path))
    encoder = HashEncoder()
    build(corpus, tmp_path / "index", encoder, source=path, dtype="float32")
    assert encoder.num_passages == 0
    assert np.array_equal(stored(tmp_path / "index"), vectors)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    build(make_corpus(50), tmp_path / "index")
    with pytest.raises(ValueError, match="50 vectors, the corpus 51"):
        DenseRetriever(make_corpus(51), tmp_path / "index", HashEncoder())
    with pytest.raises(ValueError, match="vectors of 25 values"):
        DenseRetriever(make_corpus(50), tmp_path / "index", HashEncoder(dimension=25))
    with pytest.raises(ValueError, match="no manifest"):
        DenseRetriever(make_corpus(50), tmp_path, HashEncoder())

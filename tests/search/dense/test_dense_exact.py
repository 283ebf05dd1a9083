"""Exact search: always the true top k, the same bits in any batch, ties by row."""

from __future__ import annotations

import numpy as np
import pytest
from dense_parts import assert_is_top

torch = pytest.importorskip("torch")

from search_r1.search.dense import half_products, scan  # noqa: E402
from search_r1.search.dense.scan import VectorScan, copy_to  # noqa: E402

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(7)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


CASES = {
    "random": unit(draw(3000, 48)),
    "odd width": unit(draw(700, 37)),
    "one direction, as e5's": unit(draw(2000, 32) * 0.2 + draw(1, 32)),
    "one huge dimension": unit(draw(2000, 32) * np.where(np.arange(32) == 5, 40, 1)),
    "lengths from 1e-3 to 1e3": draw(2000, 32)
    * np.float32(10) ** RANDOM.integers(-3, 4, (2000, 1)).astype("f4"),
    "all equal": np.repeat(unit(draw(1, 32)), 9000, axis=0),
    "few different": unit(draw(5, 32))[RANDOM.integers(0, 5, 9000)],
    "zero vectors": np.where(RANDOM.random((1500, 1)) < 0.9, 0, draw(1500, 32)).astype(np.float32),
    "all zero": np.zeros((100, 32), np.float32),
    "one row": draw(1, 16),
    "ascending, worst order for a threshold": unit(draw(1, 32))
    * np.linspace(0.1, 1, 6000, dtype="f4")[:, None],
}


def searches(vectors: np.ndarray) -> dict[str, VectorScan]:
    return {
        "as they are": VectorScan([torch.from_numpy(vectors)]),
        "float16 on one device": VectorScan(copy_to([CPU], vectors)),
        "float16 on three": VectorScan(copy_to([CPU] * 3, vectors)),
    }


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CPU_CHUNK_ROWS", 700)


@pytest.mark.parametrize("case", CASES)
def test_every_search_gives_the_true_top(case: str) -> None:
    vectors = CASES[case].astype(np.float16).astype(np.float32)
    queries = np.concatenate([draw(6, vectors.shape[1]), vectors[:6], 0 * vectors[:1], 1e-4 * vectors[:1]])
    for name, search in searches(vectors).items():
        for k in (1, 3, 100, 5000):
            scores, rows = search.search(queries, k)
            assert (np.diff(scores, axis=1) <= 0).all(), name
            assert_is_top(vectors, queries, min(k, len(vectors)), scores, rows)
        search.close()


@pytest.mark.parametrize("can_widen", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_query_alone_gets_the_true_top(case: str, can_widen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "ALONE_CHUNKS", 2)
    monkeypatch.setattr("search_r1.search.dense.half_products.can_widen", lambda: can_widen)
    vectors = CASES[case].astype(np.float16).astype(np.float32)
    for name, search in searches(vectors).items():
        for query in (draw(1, vectors.shape[1]), vectors[:1]):
            for k in (1, 100):
                scores, rows = search.search(query, k)
                assert_is_top(vectors, query, min(k, len(vectors)), scores, rows)
        assert (search._pool is not None) == (can_widen and name != "as they are")
        search.close()


def test_float16_is_widened_as_numpy_does_it() -> None:
    if not half_products.can_widen():
        pytest.skip("this CPU has no instruction for it")
    bits = np.arange(1 << 16, dtype=np.uint16)
    rows = bits[np.isfinite(bits.view(np.float16))][:, None]
    products = np.empty(len(rows), np.float32)
    half_products.half_products(rows, np.ones(1, np.float32), products)
    assert np.array_equal(products, rows[:, 0].view(np.float16).astype(np.float32))


def test_equal_vectors_come_in_the_order_of_their_rows() -> None:
    vectors = CASES["few different"].astype(np.float16).astype(np.float32)
    for search in searches(vectors).values():
        scores, rows = search.search(vectors[:4], 50)
        for query in range(4):
            same = np.flatnonzero((vectors == vectors[query]).all(axis=1))
            assert rows[query].tolist() == same[:50].tolist()


def test_a_query_gets_the_same_bits_in_any_batch() -> None:
    vectors = CASES["random"].astype(np.float16).astype(np.float32)
    queries = draw(600, 48)
    for search in searches(vectors).values():
        scores, rows = search.search(queries, 10)
        for number in (0, 11, 12, 511, 512, 599):
            alone_scores, alone_rows = search.search(queries[number : number + 1], 10)
            assert np.array_equal(alone_rows[0], rows[number])
            assert np.array_equal(alone_scores[0], scores[number])


def test_what_float16_or_a_search_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="values that float16 can't hold: search on the CPU"):
        copy_to([CPU], np.full((3, 16), 1e5, np.float32))
    with pytest.raises(ValueError, match="not a finite number"):
        VectorScan([torch.ones(3, 16)]).search(np.full((1, 16), np.nan, np.float32), 3)

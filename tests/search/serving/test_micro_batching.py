"""Micro-batching: who goes into a batch, when it leaves, what is refused, dropped, and what fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from server_parts import EchoRetriever, echo

from search_r1.search.search_backend import Document
from search_r1.search.serving import batching
from search_r1.search.serving.batching import (
    Batcher,
    BatchSettings,
    QueryAnswer,
    Refusal,
    ResultCache,
    Ticket,
)
from search_r1.search.serving.metrics import Metrics

Scenario = Callable[[Batcher, EchoRetriever], Coroutine[Any, Any, None]]


def play(scenario: Scenario, **settings: Any) -> None:
    """Runs a scenario on an event loop with a Batcher over an EchoRetriever."""

    async def run() -> None:
        retriever = EchoRetriever()
        batcher = Batcher(retriever, BatchSettings(**settings), Metrics())
        try:
            await asyncio.wait_for(scenario(batcher, retriever), timeout=30)
            assert (batcher.num_queries, batcher.num_documents) == (0, 0)
            assert not batcher._open or not retriever.gate.is_set()
        finally:
            retriever.gate.set()
            assert batcher.close(10)

    asyncio.run(run())


def ask(batcher: Batcher, *queries: str, topk: int = 2) -> Ticket:
    return batcher.submit(list(queries), topk, time.monotonic())


def found(ticket: Ticket) -> list[list[bytes]]:
    return [list(hits.documents) for hits in ticket.hits if hits is not None]


def expected(*queries: str, topk: int = 2) -> list[list[bytes]]:
    return [[echo(query, place).json for place in range(topk)] for query in queries]


async def entered(retriever: EchoRetriever) -> None:
    """Waits until the backend is at work."""
    while not retriever.entered.is_set():
        await asyncio.sleep(0.001)
    retriever.entered.clear()


def test_a_lone_request_leaves_at_once_though_batches_may_be_held_for_seconds():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        for number in range(3):
            started = time.monotonic()
            ticket = ask(batcher, f"q{number}")
            await ticket.future
            assert time.monotonic() - started < 0.5
            assert found(ticket) == expected(f"q{number}")

    play(scenario, max_wait_ms=5000)


def test_what_arrives_while_the_backend_is_busy_goes_in_one_batch_and_each_gets_its_own_answer():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        first = ask(batcher, "first")
        await entered(retriever)
        tickets = [ask(batcher, f"a{n}", f"b{n}") for n in range(10)]
        retriever.gate.set()
        await asyncio.gather(first.future, *[ticket.future for ticket in tickets])
        assert [len(queries) for queries, _ in retriever.calls] == [1, 20]
        for n, ticket in enumerate(tickets):
            assert found(ticket) == expected(f"a{n}", f"b{n}")

    play(scenario)


def test_equal_queries_of_one_request_of_several_and_in_flight_are_searched_once():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        tickets = [ask(batcher, "same", "same", "other")]
        await entered(retriever)
        tickets += [ask(batcher, "same"), ask(batcher, "new", "same"), ask(batcher, "new")]
        retriever.gate.set()
        await asyncio.gather(*[ticket.future for ticket in tickets])
        assert retriever.searched == ["same", "other", "new"]
        assert found(tickets[0]) == expected("same", "same", "other")
        assert found(tickets[2]) == expected("new", "same")

    play(scenario, cache_size=0)


def test_a_large_request_is_split_and_a_small_one_does_not_wait_behind_it():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        blocker = ask(batcher, "blocker")
        await entered(retriever)
        queries = [f"q{n}" for n in range(500)]
        large = ask(batcher, *queries)
        small = ask(batcher, "small")
        retriever.gate.set()
        await asyncio.gather(blocker.future, large.future, small.future)
        assert max(len(queries) for queries, _ in retriever.calls) == 100
        assert "small" in retriever.calls[1][0]
        assert found(large) == expected(*queries)

    play(scenario, max_batch=100)


def test_a_full_queue_refuses_with_a_time_to_come_back_and_serves_on():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        tickets = [ask(batcher, "0"), ask(batcher, *"123456789")]
        for queries in (["x"], ["x"] * 11):
            with pytest.raises(Refusal, match="10 queries are open") as refused:
                ask(batcher, *queries)
            assert (refused.value.status, refused.value.retry_after) == (503, 1)
        retriever.gate.set()
        await asyncio.gather(*[ticket.future for ticket in tickets])
        await ask(batcher, "x").future
        cached = ask(batcher, *"0123456789", "x")
        assert cached.future.done()

    play(scenario, max_queue=10)


def test_the_queue_is_bounded_in_documents(monkeypatch):
    monkeypatch.setattr(batching, "MAX_OPEN_DOCUMENTS", 5)

    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        tickets = [ask(batcher, "a"), ask(batcher, "b")]
        with pytest.raises(Refusal):
            ask(batcher, "c")
        retriever.gate.set()
        await asyncio.gather(*[ticket.future for ticket in tickets])
        await ask(batcher, "c").future

    play(scenario)


def test_a_request_past_its_deadline_ends_though_the_backend_hangs_and_its_queries_are_not_searched():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        stuck = ask(batcher, "stuck")
        await entered(retriever)
        late = ask(batcher, "late", "stuck")
        for ticket in (stuck, late):
            with pytest.raises(Refusal, match="within 0.2 s"):
                await ticket.future
        assert batcher.num_queries == 0
        fresh = ask(batcher, "fresh")
        retriever.gate.set()
        await fresh.future
        assert retriever.searched == ["stuck", "fresh"]

    play(scenario, request_timeout_s=0.2)


def test_a_dropped_request_is_not_searched_unless_another_one_waits_for_it():
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        blocker = ask(batcher, "blocker")
        await entered(retriever)
        gone = ask(batcher, "shared", "alone")
        other = ask(batcher, "shared")
        for _ in range(2):
            batcher.drop(gone, ConnectionError("gone"))
        assert isinstance(gone.future.exception(), ConnectionError)
        retriever.gate.set()
        await asyncio.gather(blocker.future, other.future)
        assert retriever.searched == ["blocker", "shared"]
        assert found(other) == expected("shared")

    play(scenario)


def test_a_query_that_the_backend_chokes_on_fails_alone_and_is_logged_once(caplog):
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.gate.clear()
        blocker = ask(batcher, "blocker")
        await entered(retriever)
        good = [ask(batcher, f"q{n}") for n in range(40)]
        bad = ask(batcher, "fine", "poison")
        retriever.gate.set()
        await asyncio.gather(blocker.future, *[ticket.future for ticket in good])
        with pytest.raises(Refusal, match="the search failed"):
            await bad.future
        for n, ticket in enumerate(good):
            assert found(ticket) == expected(f"q{n}")

    play(scenario)
    assert len(caplog.records) == 1
    assert "poison" in caplog.text and "choked" in caplog.text


def test_a_backend_that_gives_too_few_answers_is_an_error_and_nobody_gets_anothers_documents(caplog):
    async def scenario(batcher: Batcher, retriever: EchoRetriever) -> None:
        retriever.batch_search = lambda queries, topk: ([], [])  # type: ignore[method-assign]
        with pytest.raises(Refusal, match="the search failed"):
            await ask(batcher, "q").future

    play(scenario)
    assert "0 answers to 1 queries" in caplog.text


def hits(size: int) -> QueryAnswer:
    return QueryAnswer.of([Document(b"x" * size)], [1.5])


def test_the_cache_drops_the_least_recently_used_entry():
    cache = ResultCache(max_entries=2)
    cache.put("a", 1, hits(1))
    cache.put("b", 1, hits(1))
    assert cache.get("a", 1) is not None
    cache.put("c", 1, hits(1))
    assert [cache.get(query, 1) is not None for query in "abc"] == [True, False, True]
    assert cache.get("a", 2) is None


def test_scores_that_are_no_numbers_in_json_become_null():
    written = QueryAnswer.of([Document(b"{}")] * 3, [float("nan"), float("inf"), 0.1])
    assert written.write(True) == (
        b'[{"document":{},"score":null},{"document":{},"score":null},{"document":{},"score":0.1}]'
    )
    assert written.write(False) == b"[{},{},{}]"
    assert QueryAnswer.of([], []).write(True) == b"[]"

"""Search engines on the web, played by a stand-in: formats, limits, faults, cache, keys."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator

import pytest
from search_engine_stand_in import KEY, StandIn, serve_stand_in

from search_r1.search.launch import add_backend_arguments
from search_r1.search.online import online_retriever as online_retriever
from search_r1.search.online.online_retriever import OnlineRetriever, online_engine
from search_r1.search.search_backend import RetrievalUnavailable

PATHS = {"serpapi": "/search", "google": "/customsearch/v1"}


@pytest.fixture
def engine(monkeypatch) -> Iterator[StandIn]:
    monkeypatch.setattr(online_retriever, "FIRST_PAUSE", 0.02)
    for name in ("SERPAPI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("GOOGLE_CSE_ID", "an-engine")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serve_stand_in() as stand_in:
        yield stand_in


def parse(*flags: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_backend_arguments(parser)
    return parser.parse_args([str(flag) for flag in flags])


@pytest.fixture
def start(engine) -> Iterator[Callable[..., OnlineRetriever]]:
    """start(kind, rate, timeout, flags...): a backend that talks to the stand-in."""
    opened: list[OnlineRetriever] = []

    def start(kind: str, rate: float = 1000, timeout: float = 5, *flags: object) -> OnlineRetriever:
        arguments = parse("--search_url", engine.address + PATHS[kind], *flags)
        opened.append(OnlineRetriever(online_engine(kind, arguments), rate, timeout))
        return opened[-1]

    yield start
    for retriever in opened:
        retriever.close()


def contents(retriever: OnlineRetriever, query: str, topk: int = 3) -> list[str]:
    [found], [scores] = retriever.batch_search([query], topk)
    assert len(found) == len(scores) <= topk
    assert scores == sorted(scores, reverse=True)
    return [document.contents for document in found]


def test_serpapi_gives_the_answer_box_then_pages_then_related_questions(start, engine):
    retriever = start("serpapi")
    [found], [scores] = retriever.batch_search(["who made it?"], 14)
    engine.num_results = 10
    assert found[0].fields == {
        "contents": '"Amber Harbor (film)"\nTomas Weld\nAmber Harbor is a film by Tomas Weld.',
        "title": "Amber Harbor (film)",
        "url": "https://example.org/film",
        "kind": "answer_box",
    }
    assert found[1].contents == '"T0"\nwho made it? 0'
    assert found[11].fields["kind"] == "related_question"
    assert found[11].contents == '"Who is Tomas Weld?"\nA director.'
    assert [document.fields["title"] for document in found[12:]] == ["T10", "T11"], "the second page"
    assert scores[:2] == [1.0, 0.5]
    assert found[0].row is None
    assert engine.requests[0]["parameters"] == {
        "engine": "google",
        "q": "who made it?",
        "api_key": KEY,
        "output": "json",
    }


def test_google_gives_titles_and_snippets_page_by_page(start, engine):
    retriever = start("google")
    assert contents(retriever, "amber & harbor?", 2) == [
        '"T0"\namber & harbor? snippet 0',
        '"T1"\namber & harbor? snippet 1',
    ]
    contents(retriever, "b", 12)
    first, second = (request["parameters"] for request in engine.requests[1:])
    assert (first["cx"], first["num"], second["start"]) == ("an-engine", "10", "11")


def test_answers_come_in_the_order_of_the_queries_and_equal_ones_are_asked_once(start, engine):
    retriever = start("serpapi")
    queries = [f"q{number % 7}" for number in range(30)]
    found, _ = retriever.batch_search(queries, 1)
    assert [row[0].contents for row in found] == [f'"T0"\n{query} 0' for query in queries]
    assert sorted(engine.queries) == [f"q{number}" for number in range(7)]
    assert retriever.batch_search([], 3) == ([], [])


@pytest.mark.parametrize(
    "fault",
    [
        (500, {}, b"oops"),
        (503, {}, b""),
        (429, {}, b'{"error": "too many"}'),
        (200, {}, b"<html>not json"),
        (200, {"Content-Type": "application/json"}, b'{"search_metadata": {"status": "Succ'),
        0.0,
    ],
    ids=["500", "503", "429", "garbage", "half", "closed"],
)
@pytest.mark.parametrize("kind", ["serpapi", "google"])
def test_a_fault_is_tried_again(start, engine, kind, fault):
    engine.faults += [fault, fault]
    assert len(contents(start(kind), "x", 2)) == 2
    assert len(engine.requests) == 3


def test_a_retry_after_beyond_the_deadline_is_not_waited_for(start, engine):
    engine.faults.append(
        (429, {"Retry-After": "3600"}, b'{"error": "Your account has run out of searches."}')
    )
    began = time.monotonic()
    with pytest.raises(RetrievalUnavailable, match="serpapi: 429 Your account has run out of searches"):
        start("serpapi").batch_search(["x"], 3)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_tried_again(start, engine, status):
    engine.faults.append((status, {}, b'{"error": {"code": 1, "message": "no quota for you"}}'))
    with pytest.raises(RetrievalUnavailable, match=f"google: {status} no quota for you"):
        start("google").batch_search(["x"], 3)
    assert len(engine.requests) == 1


def test_a_query_that_the_engine_does_not_accept_leaves_the_others_alone(start, engine, capsys):
    engine.faults.append((400, {}, b'{"error": "query too long"}'))
    retriever = start("serpapi")
    assert retriever.batch_search(["bad"], 3) == ([[]], [[]])
    assert "no answer to the query 'bad': serpapi: 400 query too long" in capsys.readouterr().err
    assert len(contents(retriever, "bad")) == 3, "and it is not kept"


def test_a_hanging_engine_costs_no_more_than_the_deadline(start, engine):
    engine.faults += [30.0] * 8
    began = time.monotonic()
    with pytest.raises(RetrievalUnavailable, match="serpapi: ReadTimeout"):
        start("serpapi", timeout=0.5).batch_search(["x", "y"], 3)
    assert time.monotonic() - began < 1.5


def test_requests_keep_to_the_rate(start, engine):
    retriever = start("serpapi", rate=20)
    retriever.batch_search([f"q{number}" for number in range(40)], 1)
    times = [request["time"] for request in engine.requests]
    assert 0.8 < times[-1] - times[0] < 2.5, "20 at once, then 20 a second"


@pytest.mark.parametrize("kind", ["serpapi", "google"])
def test_a_key_is_never_printed_logged_or_described(start, engine, caplog, capsys, kind):
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="httpx")
    retriever = start(kind)
    contents(retriever, "x")
    told = [json.dumps(retriever.describe())]
    reply = json.dumps({"error": f"key {KEY} is over its limit"}).encode()
    for status in (400, 403):
        engine.faults.append((status, {}, reply))
        try:
            retriever.batch_search([f"y{status}"], 3)
        except RetrievalUnavailable as error:
            told.append(str(error))
    told += [caplog.text, *capsys.readouterr()]
    assert "***" in told[1]
    assert KEY not in "".join(told)


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("google", [], "the environment lacks GOOGLE_API_KEY"),
        ("serpapi", ["--search_rate", "0"], "--search_rate: found 0.0, expected more than 0"),
        ("serpapi", ["--search_timeout", "nan"], "--search_timeout: found nan"),
        ("serpapi", ["--search_url", "serpapi.com"], "--search_url: found 'serpapi.com', expected http"),
    ],
)
def test_wrong_flags_are_said_before_anything_starts(monkeypatch, kind, flags, message):
    monkeypatch.setenv("SERPAPI_API_KEY", KEY)
    monkeypatch.delenv("GOOGLE_API_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        online_engine(kind, parse(*flags))

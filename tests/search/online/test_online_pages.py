"""Fetching the pages that an engine found: the right paragraphs, bounds, and no way into the own network."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from search_engine_stand_in import KEY, StandIn, serve_stand_in

from search_r1.search.online import pages as pages_module
from search_r1.search.online.pages import NotFetched, best_text, fetch_page, public_address
from search_r1.search.online.retriever import GoogleSearch, OnlineRetriever

HTML = """<!doctype html><html><head><title>T</title><style>p { color: red }</style>
<script>var hidden = "snippet 0 in a script that nobody should read as text";</script></head>
<body><nav><p>snippet 0: a menu, not a text, however many words of it match</p></nav>
<p>An opening paragraph about something else entirely, which is rather long.</p>
<p>Here stands the film&#39;s <b>snippet</b> 0, in a paragraph with more words than the engine showed.
<p>A closing paragraph, of which nothing was quoted by anybody at all.</p></body></html>"""


@pytest.fixture
def site() -> Iterator[StandIn]:
    with serve_stand_in() as stand_in:
        yield stand_in


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as client:
        yield client


def soon() -> float:
    return time.monotonic() + 3


@pytest.fixture
def google(site) -> Iterator[OnlineRetriever]:
    engine = GoogleSearch(KEY, "an-engine", site.address + "/customsearch/v1")
    retriever = OnlineRetriever(engine, rate=1000, read_pages=True)
    yield retriever
    retriever.close()


@pytest.fixture
def allowed(site, monkeypatch) -> None:
    """Pages of the stand-in may be fetched."""
    monkeypatch.setattr(pages_module, "PORTS", (int(site.address.rsplit(":", 1)[1]),))
    monkeypatch.setattr(pages_module, "public_address", lambda host, port: "127.0.0.1")


def test_google_reads_the_pages_it_found(site, google, allowed):
    site.pages["0"] = ("text/html; charset=utf-8", HTML.encode())
    site.pages["1"] = ("application/pdf", b"%PDF")
    [[first, second, third]], _ = google.batch_search(["film's"], 3)
    assert first.contents == (
        '"T0"\nHere stands the film\'s snippet 0, in a paragraph with more words than the engine showed.'
    )
    assert second.contents == '"T1"\nfilm\'s snippet 1'
    assert second.fields["page"] == "not a page but application/pdf"
    assert third.fields["page"] == "status 404"


def test_pages_of_the_own_network_are_not_fetched(site, google, monkeypatch):
    site.pages["0"] = ("text/html", HTML.encode())
    [[first]], _ = google.batch_search(["film's"], 1)
    assert first.contents == '"T0"\nfilm\'s snippet 0'
    assert "not the address of a web page" in first.fields["page"]
    monkeypatch.setattr(pages_module, "PORTS", (int(site.address.rsplit(":", 1)[1]),))
    [[first]], _ = google.batch_search(["film's"], 1)
    assert "127.0.0.1, which is not a public address" in first.fields["page"]
    assert {request["path"] for request in site.requests} == {"/customsearch/v1"}


@pytest.mark.parametrize(
    "host",
    [
        *["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.5", "169.254.169.254", "0.0.0.0", "100.64.0.1"],
        *["224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"],
        *["2002:a00:1::1", "localhost", "2130706433", "0x7f.1", "no.such.host.invalid"],
    ],
)
def test_only_public_addresses_are_gone_to(host):
    with pytest.raises(NotFetched):
        public_address(host, 80)


def test_a_name_with_one_private_address_is_refused(monkeypatch):
    def resolve(*_: object, **__: object) -> list:
        return [(2, 1, 6, "", (ip, 80)) for ip in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(NotFetched, match="10.0.0.1, which is not a public address"):
        public_address("rebinding.example", 80)


def test_the_connection_goes_to_the_address_that_was_checked(site, client, allowed):
    """A name server may give another address the second time; it is asked once."""
    port = int(site.address.rsplit(":", 1)[1])
    site.pages["0"] = ("text/html", HTML.encode())
    html = fetch_page(client, f"http://pages.example:{port}/page/0", soon())
    assert html == HTML
    assert site.requests[0]["headers"]["host"] == f"pages.example:{port}"


def test_a_redirect_is_checked_as_the_first_address_was(site, client, monkeypatch):
    port = int(site.address.rsplit(":", 1)[1])
    monkeypatch.setattr(pages_module, "PORTS", (port,))
    real = public_address
    monkeypatch.setattr(
        pages_module,
        "public_address",
        lambda host, p: "127.0.0.1" if host == "pages.example" else real(host, p),
    )
    site.faults.append((302, {"Location": f"http://127.0.0.1:{port}/page/secret"}, b""))
    with pytest.raises(NotFetched, match="127.0.0.1, which is not a public address"):
        fetch_page(client, f"http://pages.example:{port}/page/0", soon())
    assert len(site.requests) == 1


def test_a_long_page_is_read_to_a_bound_and_a_slow_one_to_a_deadline(site, client, allowed, monkeypatch):
    monkeypatch.setattr(pages_module, "MAX_BYTES", 100_000)
    site.pages["long"] = ("text/html", b"x" * 5_000_000)
    assert len(fetch_page(client, site.address + "/page/long", soon())) == 100_000
    site.faults.append(20.0)
    began = time.monotonic()
    with pytest.raises(NotFetched, match="ReadTimeout"):
        fetch_page(client, site.address + "/page/long", time.monotonic() + 0.3)
    assert time.monotonic() - began < 2


def test_the_text_is_the_paragraphs_that_share_words_with_the_snippet():
    assert best_text(HTML, "quite different matters") is None
    assert best_text("", "x") is None
    assert best_text(
        "<p>unclosed <b>tags of a page about amber harbors everywhere", "amber harbors"
    ).startswith("unc")
    two = "<p>Amber harbors are named first in this text.</p><p>nothing here of interest, but long enough</p>"
    two += "<p>Much later amber is named again with its harbors.</p>"
    assert best_text(two, "amber harbors named").split("\n") == [
        "Amber harbors are named first in this text.",
        "Much later amber is named again with its harbors.",
    ]
    many = "".join(f"<p>amber harbors number {n} {'x' * 300}</p>" for n in range(50))
    assert len(best_text(many, "amber harbors")) < 2_100

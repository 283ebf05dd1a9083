"""The pages for people: documents stay text."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser

import httpx
import pytest
from server_parts import http

DOCUMENTS = [
    {
        "id": "1",
        "contents": '"<img src=x onerror=alert(1)>"\n<script>alert(2)</script> harbor </p></li><b>bold</b>',
    },
    {"id": "<i>2</i>", "contents": "harbor without a title", "<svg onload=alert(3)>": "<u>x</u>"},
    {"id": "3", "contents": '"Tomas Weld"\nA director.'},
]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def client(serve_documents) -> Iterator[httpx.Client]:
    with serve_documents(DOCUMENTS) as address, http(address) as client:
        yield client


def test_the_page_never_makes_html_of_what_the_server_sends(client):
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", client.get("/").text
    )


class Elements(HTMLParser):
    """Names of the elements inside the list of results, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = self._inside or tag == "ol"
        if self._inside:
            self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "ol"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data


def browse(url: str, folder: str) -> str:
    """The page as it stands after its script has run in a browser."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --dump-dom"
    flags += " --disable-background-networking --disable-component-update --virtual-time-budget=5000"
    command = [str(BROWSER), *flags.split(), f"--user-data-dir={folder}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome")
def test_in_a_browser_hostile_documents_are_shown_as_text(client, tmp_path):
    page = browse(f"{client.base_url}/?q=harbor&topk=3", str(tmp_path))
    found = Elements(page)
    assert found.names.count("li") == 2
    assert set(found.names) <= {"ol", "li", "div", "h2", "span", "p", "mark", "details", "summary", "pre"}
    assert "<img src=x onerror=alert(1)>" in found.text
    assert "<script>alert(2)</script>" in found.text
    assert "Document <i>2</i>" in found.text
    assert "<svg onload=alert(3)>" in found.text
    assert "2 documents in" in page

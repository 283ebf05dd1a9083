"""The pages that a search engine found: fetched, and the paragraphs around what the engine quoted.

    url -> address checked -> at most MAX_BYTES of text/html in PAGE_SECONDS -> paragraphs -> the best of them

An address comes from outside, so what it may lead to is bounded: only http(s) on the usual ports, only hosts
whose addresses are public, at each redirect again, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import time
from html.parser import HTMLParser

import httpx

PAGE_SECONDS = 5.0
MAX_BYTES = 2 * 2**20
MAX_REDIRECTS = 3
MAX_TEXT_CHARS = 2_000
MIN_PARAGRAPH_CHARS = 40
PORTS = (80, 443)
# Addresses inside which another one, perhaps a private one, is written.
TUNNELS = [ipaddress.ip_network(net) for net in ("64:ff9b::/96", "2002::/16", "2001::/32")]
SKIPPED_TAGS = frozenset(
    ("script", "style", "noscript", "template", "nav", "header", "footer", "aside", "form", "svg", "select")
)
PARAGRAPH_TAGS = frozenset(("p", "li", "td", "dd", "blockquote", "pre", "h1", "h2", "h3", "h4"))


class NotFetched(Exception):
    """Why a page was not fetched."""


def fetch_page(client: httpx.Client, url: str, deadline: float) -> str:
    """The HTML of a page. `client` must not follow redirects. Raises NotFetched."""
    deadline = min(deadline, time.monotonic() + PAGE_SECONDS)
    for _ in range(MAX_REDIRECTS + 1):
        try:
            parsed = httpx.URL(url)
            response, content = _get(client, parsed, deadline)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise NotFetched(f"{type(error).__name__}: {error}") from None
        if response.has_redirect_location:
            url = str(parsed.join(response.headers["location"]))
            continue
        if response.status_code != 200:
            raise NotFetched(f"status {response.status_code}")
        kind = response.headers.get("content-type", "")
        if "html" not in kind:
            raise NotFetched(f"not a page but {kind or 'something without a type'}")
        charset = re.search(r"charset=[\"']?([\w-]+)", f"{kind} {content[:2048]!r}")
        with contextlib.suppress(LookupError, UnicodeError):  # no such encoding, or none for web pages
            return content.decode(charset[1] if charset else "utf-8", "replace")
        return content.decode("utf-8", "replace")
    raise NotFetched(f"more than {MAX_REDIRECTS} redirects")


def _get(client: httpx.Client, url: httpx.URL, deadline: float) -> tuple[httpx.Response, bytes]:
    """One request, and the beginning of its reply until MAX_BYTES or the deadline."""
    if url.scheme not in ("http", "https") or not url.host or url.port not in (None, *PORTS):
        raise NotFetched(f"not the address of a web page: {url}")
    request = client.build_request(
        "GET",
        # Connects to the address that was checked, whatever the name resolves to a moment later.
        url.copy_with(host=public_address(url.host, url.port or (443 if url.scheme == "https" else 80))),
        headers={"Host": url.netloc.decode("ascii"), "Accept": "text/html", "Accept-Encoding": "identity"},
        timeout=max(0.001, deadline - time.monotonic()),
        extensions={"sni_hostname": url.host},
    )
    content = bytearray()
    response = client.send(request, stream=True)
    with contextlib.closing(response):
        for chunk in response.iter_bytes(65536):
            content += chunk
            if len(content) > MAX_BYTES or time.monotonic() > deadline:
                break
    return response, bytes(content[:MAX_BYTES])


def public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses must be public. Raises NotFetched."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NotFetched(f"{host} has no address ({error})") from None
    addresses = [ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in infos]
    for address in addresses:
        if not address.is_global or address.is_multicast or any(address in tunnel for tunnel in TUNNELS):
            raise NotFetched(f"{host} is at {address}, which is not a public address")
    return str(addresses[0])


class _Paragraphs(HTMLParser):
    """Collects the texts of the paragraphs of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._skipped: list[str] = []  # open tags whose content is not text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED_TAGS:
            self._skipped.append(tag)
        elif tag in PARAGRAPH_TAGS:
            self.finish()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipped:
            del self._skipped[self._skipped.index(tag) :]
        elif tag in PARAGRAPH_TAGS:
            self.finish()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._pieces.append(data)

    def finish(self) -> None:
        text = " ".join("".join(self._pieces).split())
        self._pieces.clear()
        if len(text) >= MIN_PARAGRAPH_CHARS:
            self.paragraphs.append(text)


def best_text(html: str, snippet: str) -> str | None:
    """The paragraphs of a page that share most words with the snippet, in their order; None if none does."""
    parser = _Paragraphs()
    with contextlib.suppress(AssertionError):  # html.parser's word for a broken "<![": what came before stays
        parser.feed(html)
        parser.close()
    parser.finish()
    wanted = _words(snippet)
    shares = [(len(_words(text) & wanted), -place) for place, text in enumerate(parser.paragraphs)]
    chosen, length = [], 0
    for share, place in sorted(shares, reverse=True):
        text = parser.paragraphs[-place]
        if share * 3 < len(wanted) or length >= MAX_TEXT_CHARS:
            break
        chosen.append((-place, text[: MAX_TEXT_CHARS - length]))
        length += len(text)
    return "\n".join(text for _, text in sorted(chosen)) or None


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))

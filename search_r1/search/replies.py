"""Read what retrieval servers answer: documents, refusals, and why a request failed, as text for people.

    bytes of a reply --parse_reply--> per query: documents, or a SearchError that says what is wrong with them

The replies of all Search-R1's servers are understood: documents with or without scores, as objects or plain
strings.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
from collections.abc import Mapping
from typing import TypedDict

SHOWN_CHARS = 200  # the most characters of a server's text in an error


class FoundDocument(TypedDict):
    """A document as the agent sees it.

    Attributes:
        contents: A line with the `"Title"`, then the text.
        score: None if the server gave none.
    """

    contents: str
    score: float | None


class SearchError(RuntimeError):
    """The error of a search that got no usable answer until its deadline, or was refused.

    It says what the server said.
    """


def without_surrogates(text: str) -> str:
    """Return the text with "?" for each half of a surrogate pair.

    No tokenizer and no file takes such a half.
    """
    return text.encode("utf-8", "replace").decode()


def parse_document(item: object) -> FoundDocument:
    """Return a document from what servers send.

    That is `{"document": ..., "score": s}`, the document alone, or a string. Raises SearchError for a
    document without a text.
    """
    score = None
    if isinstance(item, dict) and "document" in item:
        score = item.get("score")
        item = item["document"]
    contents = item.get("contents") if isinstance(item, dict) else item
    if not isinstance(contents, str):
        actual = f"fields {sorted(item)}" if isinstance(item, dict) else f"a {type(item).__name__}"
        raise SearchError(f"the reply has a document without 'contents' (text): found {actual}")
    number = None
    with contextlib.suppress(OverflowError):  # JSON has integers of any length
        number = float(score) if isinstance(score, int | float) else None
    return {"contents": without_surrogates(contents), "score": number}


def parse_reply(body: bytes, num_queries: int) -> list[list[FoundDocument] | SearchError]:
    """Return for each query its documents, or a SearchError that says what is wrong with one of them.

    Raises SearchError for a reply of another form.
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        start = body[:SHOWN_CHARS].decode("utf-8", "replace").strip()
        raise SearchError(f"the reply is not JSON; it begins with {start!r}") from None
    result = reply.get("result") if isinstance(reply, dict) else None
    if not isinstance(result, list) or not all(isinstance(documents, list) for documents in result):
        raise SearchError("the reply has no 'result' list of lists: is this /retrieve?")
    if len(result) != num_queries:
        raise SearchError(f"the reply has {len(result)} lists for {num_queries} queries")
    parsed: list[list[FoundDocument] | SearchError] = []
    for documents in result:
        try:
            parsed.append([parse_document(item) for item in documents])
        except SearchError as error:
            parsed.append(error)
    return parsed


def wants_single_query(status: int, body: bytes) -> bool:
    """Return whether a reply is the refusal of a server that takes one `query` a request, as SkyRL's does."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return status == 422 and any(item["loc"] == ["body", "query"] for item in json.loads(body)["detail"])
    return False


def error_text(body: bytes) -> str:
    """Return in one line what a server says is wrong.

    That is `detail` (FastAPI), `error` (SerpAPI), `error.message` (Google), or the start of the body.
    """
    try:
        reply = json.loads(body)
        while isinstance(reply, dict) and (
            names := [n for n in ("detail", "error", "message") if n in reply]
        ):
            reply = reply[names[0]]
        text = str(reply)
    except (ValueError, RecursionError):
        text = body[: 4 * SHOWN_CHARS].decode("utf-8", "replace")
    return without_surrogates(" ".join(text.split())[:SHOWN_CHARS]) or "no text"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, or None if there is none that is a number."""
    with contextlib.suppress(ValueError):
        seconds = float(headers.get("retry-after", ""))
        return max(0.0, seconds) if seconds < float("inf") else None
    return None


def reason_of(error: BaseException) -> str:
    """Return the text of the deepest cause: "refused the connection" rather than "All attempts failed".

    Of several attempts, as to each address of a name, a refused one is taken, because there is such a
    machine.
    """
    while True:
        attempts = getattr(error, "exceptions", ())
        refused = [attempt for attempt in attempts if isinstance(attempt, ConnectionRefusedError)]
        cause = error.__cause__ or error.__context__ or next(iter([*refused, *attempts[-1:]]), None)
        if cause is None:
            break
        error = cause
    if isinstance(error, ConnectionRefusedError):
        return "refused the connection"
    if isinstance(error, socket.gaierror):  # its numbers are no errno
        is_unknown = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return f"the host name {'is not known' if is_unknown else f'does not resolve ({error.strerror})'}"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno:
        return os.strerror(error.errno)
    return without_surrogates(" ".join(str(error).split())) or type(error).__name__

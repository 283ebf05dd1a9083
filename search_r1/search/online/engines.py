"""How each search engine is asked, and what its replies mean.

    engine.request(query, page, topk) -> httpx.Request -> reply -> engine.parse(reply) -> [Page]

An engine answers ten results a page; a query that wants more takes several pages. Formats: SerpAPI's "Google
Search Engine Results API", cse.list of Google's Custom Search JSON API, and any engine that answers with
JSON, described by a small file:

    {
      "url": "https://search.example/api?q={query}&count={topk}",
      "headers": {"Authorization": "Bearer ${EXAMPLE_KEY}"},
      "results": "web.results",
      "title": "title", "text": "description", "link": "url", "score": "rank.score"
    }

`{query}` and `{topk}` are filled in; `${NAME}` is taken from the environment, in url, headers and body.
`body` (an object) makes it a POST of JSON. `results` is where the list is, the others where a result has its
fields: names with dots between them, a number for a place in a list. Only url, results and text are needed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

PAGE_SIZE = 10
MAX_PAGES = 10  # Google answers no more than 100 results
NAMES = ("url", "method", "headers", "body", "results", "title", "text", "link", "score")
NEEDED = ("url", "results", "text")
VARIABLE = re.compile(r"\$\{(\w+)\}")

Page = dict[str, Any]
"""What an engine found: `contents` (first line the title in quotation marks, then text), title, url, ..."""


class BadReply(ValueError):
    """A reply that is JSON but not what this engine sends; asking again may help."""


class SerpApi:
    """SerpAPI: the answer box, then the organic results, then the related questions."""

    name = "serpapi"
    max_pages = MAX_PAGES

    def __init__(self, key: str, engine: str = "google", url: str | None = None) -> None:
        self.about = {
            "engine": engine,
            "url": url or "https://serpapi.com/search",
        }
        self.secrets = [key]

    def request(self, query: str, page: int, topk: int) -> httpx.Request:
        parameters = {"q": query, "api_key": self.secrets[0], "output": "json"}
        parameters["engine"] = self.about["engine"]
        if page:
            parameters["start"] = str(page * PAGE_SIZE)
        return httpx.Request("GET", self.about["url"], params=parameters)

    def parse(self, reply: Any) -> list[Page]:
        """What was found, best first. Raises BadReply."""
        if not isinstance(reply, dict):
            raise BadReply(f"found a JSON {type(reply).__name__}, expected an object")
        status = (reply.get("search_metadata") or {}).get("status")
        if "error" in reply and status != "Success":  # "no results" is an error with the status Success
            raise BadReply(str(reply["error"])[:200])
        box = reply.get("answer_box") or {}
        box = box[0] if isinstance(box, list) else box
        if not isinstance(box, dict):
            raise BadReply("answer_box: expected an object")
        texts = [box.get(name) for name in ("answer", "result", "snippet")]  # mostly one is filled
        text = "\n".join(str(text) for text in texts if isinstance(text, (str, int, float)))
        pages = [make_page(box.get("title") or "Answer", text, box.get("link"), kind="answer_box")]
        for item in _items(reply, "organic_results"):
            pages.append(make_page(item.get("title"), item.get("snippet"), item.get("link"), kind="organic"))
        for item in _items(reply, "related_questions"):
            answer = item.get("snippet") or item.get("answer")
            pages.append(make_page(item.get("question"), answer, item.get("link"), kind="related_question"))
        return [page for page in pages if page is not None]


class GoogleSearch:
    """Google's Custom Search JSON API: titles and snippets."""

    name = "google"
    max_pages = MAX_PAGES

    def __init__(self, key: str, engine_id: str, url: str | None = None) -> None:
        self.about = {"cx": engine_id, "url": url or "https://www.googleapis.com/customsearch/v1"}
        self.secrets = [key]

    def request(self, query: str, page: int, topk: int) -> httpx.Request:
        parameters = {"key": self.secrets[0], "cx": self.about["cx"], "q": query, "num": str(PAGE_SIZE)}
        if page:
            parameters["start"] = str(1 + page * PAGE_SIZE)
        return httpx.Request("GET", self.about["url"], params=parameters)

    def parse(self, reply: Any) -> list[Page]:
        """What was found, best first. Raises BadReply."""
        if not isinstance(reply, dict) or ("items" not in reply and "searchInformation" not in reply):
            raise BadReply("found neither items nor searchInformation in the reply")
        pages = [
            make_page(item.get("title"), item.get("snippet"), item.get("link"))
            for item in _items(reply, "items")
        ]
        return [page for page in pages if page is not None]


class JsonEngine:
    """An engine that a template describes."""

    name = "json"
    max_pages = 1

    def __init__(self, template: dict[str, Any], url: str | None = None) -> None:
        """`url`: instead of the template's. Raises ValueError for a wrong template and a missing variable."""
        self._template = template | ({"url": url} if url else {})
        _check(self._template)
        names = VARIABLE.findall(
            json.dumps([self._template.get(part) for part in ("url", "headers", "body")])
        )
        missing = sorted(name for name in set(names) if not os.environ.get(name))
        if missing:
            raise ValueError(f"--search_template: it wants ${{{missing[0]}}}, which the environment lacks")
        self.secrets = [os.environ[name] for name in names]
        # With the names of the variables, not their values.
        self.about = {"template": json.dumps(self._template), "url": self._template["url"]}

    @classmethod
    def read(cls, path: str | Path, url: str | None = None) -> JsonEngine:
        """Raises ValueError for a file that can't be read."""
        try:
            template = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--search_template: can't read {path} ({error})") from None
        if not isinstance(template, dict):
            raise ValueError(
                f"--search_template: {path} holds a {type(template).__name__}, expected an object"
            )
        return cls(template, url)

    def request(self, query: str, page: int, topk: int) -> httpx.Request:
        template = self._template
        url = _environment(template["url"]).replace("{query}", quote(query, safe=""))
        headers = {name: _environment(value) for name, value in template.get("headers", {}).items()}
        body = template.get("body")
        method = template.get("method", "GET" if body is None else "POST")
        filled = {} if body is None else {"json": _fill(body, query, topk)}
        return httpx.Request(method, url.replace("{topk}", str(topk)), headers=headers, **filled)

    def parse(self, reply: Any) -> list[Page]:
        """What was found, best first. Raises BadReply."""
        template = self._template
        results = _at(reply, template["results"])
        if results is None:
            results = []  # many engines leave the list out when there is nothing
        if not isinstance(results, list):
            raise BadReply(f"{template['results']}: found a JSON {type(results).__name__}, expected a list")
        pages = []
        for result in results:
            title, text, link, score = (
                _at(result, template[name]) if name in template else None
                for name in ("title", "text", "link", "score")
            )
            page = make_page(title, text, link)
            if page is not None:
                if isinstance(score, (int, float)) and not isinstance(score, bool):
                    page["score"] = float(score)
                pages.append(page)
        return pages


Engine = SerpApi | GoogleSearch | JsonEngine


def make_page(title: Any, text: Any, url: Any, **more: Any) -> Page | None:
    """The JSON of a page; None for one without text."""
    if not isinstance(text, str) or not text.strip():
        return None
    title = " ".join(str(title or "").split())
    return {"contents": f'"{title}"\n{text.strip()}', "title": title, "url": str(url or ""), **more}


def _items(reply: dict[str, Any], name: str) -> list[dict[str, Any]]:
    items = reply.get(name) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadReply(f"{name}: expected a list of objects")
    return items


def _check(template: dict[str, Any]) -> None:
    unknown = sorted(set(template) - set(NAMES))
    if unknown:
        raise ValueError(f"--search_template: found {unknown[0]!r}, expected only {', '.join(NAMES)}")
    for name in NEEDED:
        if name not in template:
            raise ValueError(f"--search_template: {name!r} is missing")
    for name in template:
        kind = {"headers": dict, "body": dict}.get(name, str)
        if not isinstance(template[name], kind):
            expected = "an object" if kind is dict else "a text"
            raise ValueError(f"--search_template: {name}: found {template[name]!r}, expected {expected}")
    if not template["url"].startswith(("http://", "https://")):
        raise ValueError(f"--search_template: url: found {template['url']!r}, expected http(s)://...")
    if "{query}" not in template["url"] + json.dumps(template.get("body")):
        raise ValueError("--search_template: {query} stands neither in url nor in body")


def _environment(text: str) -> str:
    return VARIABLE.sub(lambda match: os.environ[match[1]], text)


def _fill(value: Any, query: str, topk: int) -> Any:
    """The body of a request: "{topk}" alone becomes a number."""
    if isinstance(value, dict):
        return {name: _fill(inner, query, topk) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, query, topk) for inner in value]
    if value == "{topk}":
        return topk
    if isinstance(value, str):  # the query last: what it says is not filled in again
        return _environment(value).replace("{topk}", str(topk)).replace("{query}", query)
    return value


def _at(value: Any, path: str) -> Any:
    """The JSON value at a path such as "web.results.0"; None where nothing is. "" is all of it."""
    for name in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value

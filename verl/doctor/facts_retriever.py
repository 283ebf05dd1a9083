"""The retrieval servers as one machine sees them, the corpus that is meant, and an index for a server.

The one place of the doctor that knows the search side (`search_r1`): it asks with the trainer's own client,
so that proxies, keys and addresses count as in training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from search_r1.search.backend_plan import holds
from search_r1.search.client import SearchClient, SearchError
from search_r1.search.corpus import file_identity
from search_r1.search.manifest import check_files, read_manifest
from search_r1.search.transport.addresses import parse_urls
from verl.doctor.facts import Corpus, Index, Server
from verl.doctor.facts_network import is_own, port_holder, resolve
from verl.doctor.proxies import proxy_for, without_password

HEALTH_SECONDS = 2.0
QUESTION = "is anybody there?"


@dataclass(frozen=True)
class Question:
    """How the run asks: `retriever.url`, `topk`, `use_proxy`; `timeout`: seconds for one server."""

    urls: str | Sequence[str]
    topk: int = 1
    use_proxy: bool = False
    timeout: float = 10.0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Question:
        """From the run's settings, dotted."""
        return cls(
            settings["retriever.url"],
            settings["retriever.topk"],
            settings["retriever.use_proxy"],
            min(10.0, settings["retriever.timeout"]),
        )


def look_at_servers(question: Question) -> tuple[Server, ...]:
    """Asks each server for its health and one search, all at once. ValueError for an address that is none."""
    urls = parse_urls(question.urls)
    with ThreadPoolExecutor(len(urls)) as pool:
        return tuple(pool.map(lambda url: _look_at_server(url, question), urls))


def _look_at_server(url: str, question: Question) -> Server:
    host, problem = urlsplit(url).hostname or "", None
    addresses = resolve(host)
    client = SearchClient([url], question.topk, question.timeout, use_proxy=question.use_proxy)
    with client:
        try:
            client.batch_search([QUESTION])
        except SearchError as error:
            problem = str(error)
    holder, health = None, _health(url, question.use_proxy)
    by_proxy = question.use_proxy and proxy_for(url, os.environ) is not None
    if problem is not None and not by_proxy and any(map(is_own, addresses)):
        holder = port_holder(urlsplit(url).port or 80)
    return Server(without_password(url), problem, health, holder, addresses)


def _health(url: str, use_proxy: bool) -> dict[str, Any]:
    """What GET /health beside /retrieve says; {} where there is no such thing (Search-R1's own servers)."""
    split = urlsplit(url)
    address = urlunsplit(split._replace(path=split.path.rstrip("/").rpartition("/")[0] + "/health", query=""))
    try:
        verify = split.scheme == "https"  # certificates take a tenth of a second to load
        with httpx.Client(trust_env=use_proxy, timeout=HEALTH_SECONDS, verify=verify) as client:
            reply = client.get(address)
            said = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def look_at_corpus(path: str) -> Corpus:
    """The corpus that the run means: a jsonl file, or a packed one that was unpacked beside itself."""
    try:
        return Corpus(path, file_identity(path))
    except OSError as error:
        return Corpus(path, problem=error.strerror or str(error))


def look_at_index(path: str) -> Index:
    """An index by its files: size, what it is, whether it is whole."""
    folder = Path(path)
    try:
        kind = holds(folder)
        if kind in ("nothing", "begun", "lfs", "unknown"):
            return Index(path, problem=_PROBLEMS[kind])
        manifest = read_manifest(folder)
        if manifest is not None:
            check_files(folder, manifest)
    except (OSError, ValueError) as error:
        return Index(path, problem=str(error))
    files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
    return Index(path, sum(file.stat().st_size for file in files), on_gpu=kind in ("exact", "faiss"))


_PROBLEMS = {
    "nothing": "nothing is there",
    "begun": "its build was begun and not finished; start the index builder again with the same flags",
    "lfs": "it is a git-lfs pointer; fetch the file with `git lfs pull`",
    "unknown": "it is no index that the server knows",
}

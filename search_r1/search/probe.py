"""Look at the search side for the checks before a run: servers, the corpus that is meant, an index.

Servers are asked with the trainer's own client, so that proxies, keys and addresses count as in training.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from search_r1.search.backend_plan import DESCRIPTIONS, index_kind, plan_backends
from search_r1.search.client import SearchClient, SearchError, parse_urls
from search_r1.search.corpus import file_identity
from search_r1.search.dense.embeddings import open_embeddings
from search_r1.search.dense.faiss_gpus import check_copy_fits, problem_of
from search_r1.search.dense.faiss_header import read_faiss_header
from search_r1.search.launch import build_server_parser, models_of
from search_r1.search.manifest import check_files, read_manifest
from search_r1.search.memory import visible_gpus

HEALTH_SECONDS = 2.0
SEARCH_SECONDS = 10.0


@dataclass(frozen=True)
class ServerState:
    """One retrieval server as this machine sees it.

    Attributes:
        url: The address without user and password.
        problem: Why a search got no documents.
        addresses: What its host's name resolves to.
        health: What GET /health says. It is {} for a server without it, such as Search-R1's own.
    """

    url: str
    problem: str | None
    addresses: tuple[str, ...]
    health: dict[str, Any] = field(default_factory=dict)

    @property
    def is_here(self) -> bool:
        """Return whether the server is on this machine."""
        return any(map(_is_own, self.addresses))

    @property
    def corpus(self) -> dict[str, Any] | None:
        """Return `file_identity` of its corpus, or None if the server does not give it in our words."""
        corpus = self.health.get("corpus")
        is_ours = isinstance(corpus, dict) and {"num_bytes", "sample_sha256"} <= corpus.keys()
        return corpus if is_ours else None


@dataclass(frozen=True)
class IndexState:
    """An index as this machine's retrieval server would search it.

    Attributes:
        num_bytes: The bytes of its files.
        on_gpus: Whether it is searched on the GPUs here, a FAISS index with --faiss_gpu.
        problem: Why it does not fit there, or "".
    """

    num_bytes: int
    on_gpus: bool
    problem: str = ""


class RetrievalProbe:
    """The view of the search side that the program hands to the preflight. Each machine of a run uses it."""

    def servers(
        self, urls: str | Sequence[str], topk: int, timeout: float, use_proxy: bool
    ) -> list[ServerState]:
        """Ask each server for its health and one search, all at once.

        Raises ValueError for what is no address.
        """

        def look(url: str) -> ServerState:
            split = urlsplit(url)
            problem = None
            with SearchClient([url], topk, min(SEARCH_SECONDS, timeout), use_proxy=use_proxy) as client:
                try:
                    client.batch_search(["is anybody there?"])
                except SearchError as error:
                    problem = str(error)
            shown = split._replace(netloc=split.netloc.rpartition("@")[2]).geturl()
            return ServerState(shown, problem, _resolve(split.hostname or ""), _health(url, use_proxy))

        addresses = parse_urls(urls)
        with ThreadPoolExecutor(len(addresses)) as pool:
            return list(pool.map(look, addresses))

    corpus = staticmethod(file_identity)

    def problem_of_flags(self, flags: Sequence[str], python: str) -> str | None:
        """Return why a server with these flags would not start, as its own environment says, or None.

        Args:
            flags: The flags of retrieval_launch.sh.
            python: The Python of the server's environment, in which packages may be missing.
        """
        check = "from search_r1.search.launch import main; raise SystemExit(main(is_installed=True))"
        try:
            result = subprocess.run([python, "-c", check, *flags], capture_output=True, text=True)
        except OSError as error:
            make = f"source scripts/setup.sh && setup_environment retrieval,dense {Path(python).parents[1]}"
            return f"RETRIEVAL_ENV has no Python that runs ({error.strerror}); make it: {make}"
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"{python} ended with status {result.returncode}"]
            return lines[-1].removeprefix("error: ")
        arguments = build_server_parser().parse_args(flags)
        for plan in plan_backends(arguments.retriever_name, arguments.index_path, arguments.retriever_model):
            try:
                if plan.index_path is not None:
                    self.index(str(plan.index_path))
            except (OSError, ValueError) as error:
                return f"--index_path {plan.index_path}: {error}"
        return None

    def models_of_flags(self, flags: Sequence[str]) -> dict[str, str]:
        """Return the models that a server with these flags loads, by what names them.

        Raises ValueError for flags that can't work.
        """
        parser = build_server_parser()
        parser.exit_on_error = False
        try:
            arguments, _ = parser.parse_known_args(flags)
        except argparse.ArgumentError as error:
            raise ValueError(str(error)) from None
        return models_of(arguments)

    def index(self, path: str) -> IndexState:
        """Return where this machine's retrieval server would search an index, and whether it fits there.

        Raises ValueError if the index is not whole, or if there is none.
        """
        folder = Path(path)
        kind = index_kind(folder)
        if kind in ("nothing", "begun", "lfs", "unknown"):
            raise ValueError(f"it {DESCRIPTIONS[kind]}")
        manifest = read_manifest(folder)
        if manifest is not None:
            check_files(folder, manifest)
        files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        gpus = visible_gpus() if kind in ("exact", "faiss") else []
        if not gpus:
            return IndexState(num_bytes, on_gpus=False)
        try:
            if kind == "exact":
                from search_r1.search.dense.scan import check_parts_fit

                num_rows, dimension = open_embeddings(folder)[1].shape
                check_parts_fit(num_rows, dimension, gpus)
                return IndexState(num_bytes, on_gpus=True)
            header = read_faiss_header(folder)
            if problem_of(header, len(gpus)):  # the server would search it on the CPU
                return IndexState(num_bytes, on_gpus=False)
            check_copy_fits(folder, header, gpus)
        except ValueError as problem:
            return IndexState(num_bytes, on_gpus=True, problem=str(problem))
        return IndexState(num_bytes, on_gpus=True)


def _health(url: str, use_proxy: bool) -> dict[str, Any]:
    split = urlsplit(url)
    address = urlunsplit(split._replace(path=split.path.rstrip("/").rpartition("/")[0] + "/health", query=""))
    try:
        verify = split.scheme == "https"  # certificates take a tenth of a second to load
        with httpx.Client(trust_env=use_proxy, timeout=HEALTH_SECONDS, verify=verify) as client:
            reply = client.get(address)
            health = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return health if isinstance(health, dict) else {}


def _resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of a name, or () for one that is not known."""
    with contextlib.suppress(OSError, UnicodeError):
        return tuple(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None)))
    return ()


def _is_own(address: str) -> bool:
    """Return whether an IP address is one of this machine's. Nobody else can listen there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        with contextlib.suppress(OSError):
            probe.bind((address, 0))
            return True
        return False

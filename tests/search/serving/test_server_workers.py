"""--workers: several processes on one port that are restarted, counted and stopped together."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from server_parts import http, post, read_address, start_process, write_corpus
from test_metrics import samples

from search_r1.search.client import SearchClient


@contextlib.contextmanager
def two_workers(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """The parent and the address, when both workers are ready."""
    with start_process("--corpus_path", str(write_corpus(folder)), "--workers", "2") as process:
        address = read_address(process)
        wait_for_workers(address, 2)
        yield process, address


def metrics(address: str) -> dict[str, float]:
    with contextlib.suppress(httpx.TransportError), http(address) as client:
        return samples(client.get("/metrics").text)
    return {}


def wait_for_workers(address: str, number: int, seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while metrics(address).get("search_r1_ready_workers") != number:
        assert time.monotonic() < give_up
        time.sleep(0.1)


def workers(process) -> list[psutil.Process]:
    """The server processes (not the helper that multiprocessing keeps for its own use)."""
    children = psutil.Process(process.pid).children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.alone
def test_two_workers_share_the_port_and_the_numbers_and_stop_on_sigterm(tmp_path):
    with two_workers(tmp_path) as (process, address):
        for _ in range(20):
            with http(address) as client:
                assert post(client, {"queries": ["film"]}).status_code == 200
        assert metrics(address)["search_r1_requests_total|status=200"] == 20
        children = workers(process)
        assert len(children) == 2
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "ready: bm25, 3 documents, 2 processes\n")
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_killed_under_load_is_restarted_and_no_search_is_lost(tmp_path):
    with two_workers(tmp_path) as (process, address):
        stop = threading.Event()
        wrong = []
        answered = [0]

        def ask(number: int) -> None:
            with SearchClient(address, topk=1, timeout=30, cache_size=0) as search:
                while not stop.is_set():
                    for word, place in (("film", "Amber"), ("town", "Orlen")):
                        contents = search.batch_search([word])[0][0]["contents"]
                        answered[0] += 1
                        if place not in contents:
                            wrong.append((number, contents))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        killed = workers(process)[0]
        os.kill(killed.pid, signal.SIGKILL)
        time.sleep(1.0)
        wait_for_workers(address, 2)
        before = answered[0]
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join(40)
        assert wrong == [] and answered[0] > before
        assert killed.pid not in [child.pid for child in workers(process)]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "died" in errors and errors.count("\n") == 2


@pytest.mark.slow
@pytest.mark.alone
def test_a_process_that_can_not_load_any_more_ends_the_server(tmp_path):
    with two_workers(tmp_path) as (process, _):
        for file in tmp_path.glob("corpus.jsonl*"):
            file.unlink()
        workers(process)[0].kill()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "died with exit status -9; another is started" in errors and "there is no file" in errors

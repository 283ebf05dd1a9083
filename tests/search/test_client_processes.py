"""The search client and real servers in processes of their own: killed, full, started again."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_servers import ServerProcess

from search_r1.search.client import SearchClient, SearchError

NUM_DOCUMENTS = 400
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Document i has a word of its own, word<i>."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [{"id": str(i), "contents": f'"Title {i}"\nword{i} is number {i}.'} for i in range(NUM_DOCUMENTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def servers(corpus) -> Iterator[list[ServerProcess]]:
    both = [ServerProcess(corpus), ServerProcess(corpus)]
    try:
        for server in both:
            server.start(wait=False)
        for server in both:
            while not server.is_ready():
                time.sleep(0.05)
        yield both
    finally:
        for server in both:
            server.kill()


class Load:
    """Threads that search all the time, and note what went wrong: wrong answers, errors, slow searches."""

    def __init__(self, client: SearchClient, num_threads: int = 6) -> None:
        self.client = client
        self.wrong = []
        self.num_answers = 0
        self.slowest = 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(num_threads)]

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            numbers = [draw.randrange(NUM_DOCUMENTS) for _ in range(draw.choice([1, 5, 40]))]
            begin = time.monotonic()
            try:
                found = self.client.batch_search([f"word{i}" for i in numbers], topk=1)
            except SearchError as error:
                found = [[{"contents": str(error), "score": None}]] * len(numbers)
            seconds = time.monotonic() - begin
            texts = [documents[0]["contents"] for documents in found]
            right = [f'"Title {i}"\nword{i} is number {i}.' for i in numbers]
            with self._lock:
                self.num_answers += len(numbers)
                self.slowest = max(self.slowest, seconds)
                self.wrong += [pair for pair in zip(texts, right, strict=True) if pair[0] != pair[1]]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_under_load_a_killed_server_costs_no_query_and_no_wrong_answer(servers):
    moments = random.Random()
    with SearchClient([server.url for server in servers], cache_size=0) as client:
        with Load(client) as load:
            for number in range(4):
                victim = servers[number % 2]
                time.sleep(moments.uniform(0.2, 0.8))
                victim.kill()
                time.sleep(moments.uniform(0.2, 0.8))
                victim.start()
            time.sleep(0.5)
        statistics = client.statistics()
    assert not load.wrong
    assert load.num_answers > 500 and statistics["failed_requests"] > 0 and statistics["failed"] == 0
    assert load.slowest < 5


def test_a_full_server_is_asked_again_until_every_query_is_answered(corpus):
    """A queue of 60 for up to 6 x 40 queries at a time, which the server is slow to take out of it."""
    server = ServerProcess(corpus, "--max_queue", "60", "--max_wait_ms", "50", "--cache_size", "0")
    try:
        server.start()
        with SearchClient(server.url, cache_size=0) as client:
            with Load(client) as load:
                time.sleep(3)
            statistics = client.statistics()
    finally:
        server.kill()
    assert statistics["failed_requests"] > 0  # 503
    assert not load.wrong and load.num_answers > 100

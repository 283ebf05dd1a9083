"""A small world and its retrieval server, for tests of whole runs."""

import json
from pathlib import Path

import pytest

from data_prep.microworld import write_world


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(7, folder, num_train=64, num_test=20, num_3hop=4)
    return folder


@pytest.fixture(scope="session")
def url(world, serve_documents):
    documents = [json.loads(line) for line in (world / "corpus.jsonl").open(encoding="utf-8")]
    with serve_documents(documents, topk=2) as address:
        yield f"{address}/retrieve"


@pytest.fixture
def with_picture() -> None:
    """The runs of a test that asks for this draw curves.png."""


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch) -> None:
    """Runs in this process draw no curves.png, which takes a second each."""
    if "with_picture" not in request.fixturenames:
        monkeypatch.setattr("verl.records.recorder.draw_curves", lambda *_: None)

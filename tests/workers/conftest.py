"""Fixtures for tests of workers; this file's folder is importable, so `tiny_training` is too."""

import pytest
from tiny_training import write_model

from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A Hugging Face folder with a tiny random model (tied embeddings) and tokenizer."""
    return write_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def make_group():
    """make_group(worker class, its arguments): an initialised group of one worker in this process."""
    groups = []

    def make(worker_class, *args, **kwargs):
        groups.append(LocalWorkerGroup(ClassWithInitArgs(worker_class, *args, device="cpu", **kwargs)))
        groups[-1].init_model()
        return groups[-1]

    yield make
    for group in groups:
        group.shutdown()

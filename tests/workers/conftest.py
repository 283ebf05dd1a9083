"""Fixtures for tests of workers; this file's folder is importable, so `tiny_training` is too."""

import pytest
from tiny_training import write_model

from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup


@pytest.fixture(scope="session", params=["qwen3"])  # as tests name it: what is made of it is made once
def model_path(request, tmp_path_factory):
    """A Hugging Face folder with a tiny random model (tied embeddings) and tokenizer: a Qwen3, or the kind
    that a test names as the fixture's parameter.
    """
    return write_model(tmp_path_factory.mktemp(f"tiny_{request.param}"), kind=request.param)


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

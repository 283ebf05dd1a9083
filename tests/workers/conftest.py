"""Fixtures for tests of workers; this file's folder is importable, so `tiny_training` is too."""

import pytest
from tiny_training import write_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A Hugging Face folder with a tiny random model (tied embeddings) and tokenizer."""
    return write_model(tmp_path_factory.mktemp("tiny_model"))

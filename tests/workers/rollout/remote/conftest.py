"""Engines on servers that speak vLLM's protocol, ended with the test."""

from contextlib import ExitStack

import pytest
from protocol_server import VOCABULARY, ProtocolServer
from remote_parts import WEIGHTS, VersionSender

from verl.workers.rollout.remote import client
from verl.workers.rollout.remote.remote_engine import RemoteEngine


@pytest.fixture
def start(monkeypatch):
    """start(num_servers=1): (engine with weights 0, servers)."""
    monkeypatch.setattr(client, "STREAM_INTERVAL", 4)
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.3)
    with ExitStack() as stack:

        def make(num_servers=1, version=0, prepare=lambda server: None):
            servers = [stack.enter_context(ProtocolServer()) for _ in range(num_servers)]
            for server in servers:
                prepare(server)
            urls = [server.url for server in servers]
            engine = RemoteEngine(urls, max_model_len=256, vocab_size=VOCABULARY, sender=VersionSender())
            stack.callback(engine.shutdown)
            if version is not None:
                engine.load_weights(WEIGHTS, version)
            return engine, servers

        yield make

"""Engines on servers that speak vLLM's protocol, ended with the test."""

from contextlib import ExitStack

import pytest
from protocol_server import VOCABULARY, ProtocolServer
from remote_parts import WEIGHTS, VersionSender

from verl.workers.rollout.vllm.remote_engine import RemoteVllmEngine


@pytest.fixture
def start():
    """start(num_servers=1, **engine options): (engine with weights 0, servers)."""
    with ExitStack() as stack:

        def make(num_servers=1, version=0, prepare=lambda server: None, **options):
            servers = [stack.enter_context(ProtocolServer()) for _ in range(num_servers)]
            for server in servers:
                prepare(server)
            defaults = {
                "max_model_len": 256,
                "sender": VersionSender(),
                "stream_interval": 4,
                "patience": 0.3,
            }
            options = defaults | options
            engine = RemoteVllmEngine([s.url for s in servers], vocab_size=VOCABULARY, **options)
            stack.callback(engine.shutdown)
            if version is not None:
                engine.load_weights(WEIGHTS, version)
            return engine, servers

        yield make

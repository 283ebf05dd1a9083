"""What the tests of `RemoteEngine` share: a sender without weights, and waiting with a deadline."""

import time

import torch

GREEDY = {"temperature": 0.0}
WEIGHTS = [("weight", torch.zeros(2))]


class VersionSender:
    """Tells the servers the version; no weights travel."""

    def send(self, servers, weights, version):
        list(weights)  # walked, as by a real one
        self.urls = [server.url for server in servers]
        calls = [(s.url, s.call("rollout_receive", version=str(version))) for s in servers]
        return {url: str(call.exception()) for url, call in calls if call.exception()}

    def close(self):
        pass


def drain(engine, timeout=20.0):
    completions = {}
    deadline = time.monotonic() + timeout
    while engine.has_runnable:
        assert time.monotonic() < deadline, "the engine hangs"
        for completion in engine.step():
            assert completion.session_id not in completions
            completions[completion.session_id] = completion
    return completions


def wait_until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def hold(servers, num_tokens):
    """Lets sequences of `num_tokens`, their prompts among them, wait at the servers; None: no more."""
    for server in servers:
        server.holds_at = num_tokens

"""Weights to servers, with a group per server; and what happens when one side fails."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.workers.rollout.remote import weights
from verl.workers.rollout.remote.weights import WeightSender
from verl.workers.rollout.vllm.weight_transfer import WeightReceiver

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


class Receiver(WeightReceiver):
    """A worker whose model is a dict."""

    def __init__(self, config, rank=0, breaks_at=None):
        self.rank = rank
        self.device = CPU
        self.model_config = SimpleNamespace(hf_config=config, trust_remote_code=False)
        self.loaded = {}
        self.breaks_at = breaks_at

    def _rollout_reload(self, weights):
        for name, tensor in weights:
            if name == self.breaks_at:
                raise KeyError(f"no room for {name}")
            self.loaded[name] = tensor.clone()


class Workers:
    """Receivers of one server, each in a thread; a call's answer comes when all have answered."""

    def __init__(self, name, receivers):
        self.url = f"http://127.0.0.1:{name}"
        self.receivers = receivers
        self.num_workers = len(receivers)
        self.threads = ThreadPoolExecutor(2 * len(receivers))

    def call(self, method, **arguments):
        answers = [self.threads.submit(getattr(r, method), **arguments) for r in self.receivers]
        return self.threads.submit(lambda: [answer.result(30) for answer in answers])


def assert_has(receiver, model, dtype=torch.float32):
    expected = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    assert receiver.loaded.keys() == expected.keys()
    for name, tensor in receiver.loaded.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name]), name


def test_all_workers_of_all_servers_get_every_update_in_the_wanted_dtype(model):
    servers = [Workers(1, [Receiver(model.config, rank) for rank in range(2)])]
    servers.append(Workers(2, [Receiver(model.config)]))
    sender = WeightSender("gloo", CPU, torch.bfloat16)
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        assert sender.send(servers, model.named_parameters(), version) == {}
        for server in servers:
            for receiver in server.receivers:
                assert_has(receiver, model, torch.bfloat16)
    sender.close()


def test_a_worker_that_fails_in_the_middle_is_reported_and_holds_nobody_up(model):
    bad = Workers(1, [Receiver(model.config, breaks_at="model.norm.weight")])
    early = Workers(2, [Receiver(model.config, breaks_at="model.embed_tokens.weight")])
    good = Workers(3, [Receiver(model.config)])
    sender = WeightSender("gloo", CPU, torch.float32)
    failed = sender.send([bad, early, good], model.named_parameters(), 1)
    assert failed.keys() == {bad.url, early.url}
    assert "no room for model.norm.weight" in failed[bad.url]
    assert_has(good.receivers[0], model)
    bad.receivers[0].breaks_at = None
    assert sender.send([bad, good], model.named_parameters(), 2) == {}
    assert_has(bad.receivers[0], model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "missing weights"),
        (lambda pairs: [*pairs, ("stranger", torch.zeros(1))], "no weight stranger"),
        (lambda pairs: [(pairs[0][0], torch.zeros(3)), *pairs[1:]], "has shape"),
    ],
)
def test_weights_that_are_not_the_models_are_not_taken(model, change, message):
    server = Workers(1, [Receiver(model.config)])
    sender = WeightSender("gloo", CPU, torch.float32)
    failed = sender.send([server], change(list(model.named_parameters())), 1)
    assert message in failed[server.url]
    sender.close()


def test_workers_hear_at_once_of_a_tensor_that_the_trainer_could_not_send(model):
    class Broken:
        def is_floating_point(self):
            raise MemoryError("out of memory")

    workers = Workers(4, [Receiver(model.config)])
    call = workers.call
    answers = []
    workers.call = lambda *words, **arguments: answers.append(call(*words, **arguments)) or answers[-1]
    sender = WeightSender("gloo", CPU, torch.float32)
    pairs = [*list(model.named_parameters())[:2], ("third", Broken())]
    with pytest.raises(MemoryError):
        sender.send([workers], pairs, 1)
    with pytest.raises(RuntimeError, match="the trainer broke off: MemoryError"):
        answers[-1].result(20)


@pytest.mark.parametrize("dies", [True, False])
def test_a_server_that_takes_nothing_more_is_given_up(model, dies, monkeypatch):
    """It dies in the midst of a tensor that no buffer holds, or stands still."""
    monkeypatch.setattr(weights, "TENSOR_SECONDS", 60.0 if dies else 3.0)
    monkeypatch.setattr(weights, "LEAVE_SECONDS", 0.1)  # its workers never come
    silent = Workers(5, [Receiver(model.config)])
    good = Workers(6, [Receiver(model.config)])
    call = silent.call
    gone = Future()

    def lost(method, **arguments):
        if method != "rollout_receive":
            return call(method, **arguments)
        if dies:
            threading.Timer(1.0, lambda: gone.set_exception(ConnectionError("the server is gone"))).start()
        return gone

    silent.call = lost
    sender = WeightSender("gloo", CPU, torch.float32)
    started = time.monotonic()
    failed = sender.send([silent, good], [("large", torch.zeros(2**23))], 1)
    assert time.monotonic() - started < 40
    assert ("the server is gone" if dies else "did not take a tensor") in failed[silent.url]
    assert "no weight large" in failed[good.url]
    sender.close()

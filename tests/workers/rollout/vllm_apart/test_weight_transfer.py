"""Weights in buckets: packing, a group per server; and what happens when one side fails."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.workers.rollout.vllm.weight_buckets import pack, unpack
from verl.workers.rollout.vllm.weight_transfer import WeightReceiver, WeightSender

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
        self.rank, self.device = rank, CPU
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
        self.url, self.receivers, self.num_workers = f"http://127.0.0.1:{name}", receivers, len(receivers)
        self.threads = ThreadPoolExecutor(2 * len(receivers))

    def call(self, method, **arguments):
        answers = [self.threads.submit(getattr(r, method), **arguments) for r in self.receivers]
        return self.threads.submit(lambda: [answer.result(30) for answer in answers])


def assert_has(receiver, model, dtype=torch.float32):
    expected = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    assert receiver.loaded.keys() == expected.keys()
    for name, tensor in receiver.loaded.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name]), name


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12),
    kinds=st.data(),
    limit=st.integers(1, 2000),
)
def test_what_is_packed_comes_out_again_in_buckets_of_bounded_size(shapes, kinds, limit):
    pairs = []
    for i, shape in enumerate(shapes):
        dtype = kinds.draw(st.sampled_from([torch.float32, torch.float16, torch.int32, torch.bool]))
        pairs.append((f"w{i}", (torch.randn(shape) * 9).to(dtype)))
    out = []
    for entries, data in pack(iter(pairs), torch.bfloat16, CPU, limit):
        assert data.dtype == torch.uint8 and (data.numel() < limit + 64 or len(entries) == 1)
        out += [(name, tensor.clone()) for name, tensor in unpack(entries, data)]
    assert [name for name, _ in out] == [name for name, _ in pairs]
    for (_, got), (_, given_) in zip(out, pairs, strict=True):
        expected = given_.to(torch.bfloat16) if given_.is_floating_point() else given_
        assert got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected)


def test_all_workers_of_all_servers_get_every_update_in_the_wanted_dtype(model):
    servers = [Workers(1, [Receiver(model.config, rank) for rank in range(2)])]
    servers.append(Workers(2, [Receiver(model.config)]))
    sender = WeightSender("gloo", CPU, torch.bfloat16, bucket_bytes=3000)
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
    sender = WeightSender("gloo", CPU, torch.float32, bucket_bytes=2000)
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

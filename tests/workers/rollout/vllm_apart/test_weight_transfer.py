"""Weights in buckets: packing, a group per server, files; and what happens when one side fails."""

import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.workers.rollout.vllm.weight_buckets import pack, unpack
from verl.workers.rollout.vllm.weight_transfer import DiskSender, GroupSender, WeightReceiver

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
        self.model_config = type("ModelConfig", (), {"hf_config": config})()
        self.loaded = {}
        self.breaks_at = breaks_at

    def rollout_load_weights(self, weights):
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
    sender = GroupSender("gloo", CPU, torch.bfloat16, bucket_bytes=3000)
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        assert sender.send(servers, model.named_parameters(), version) == {}
        for server in servers:
            for receiver in server.receivers:
                assert_has(receiver, model, torch.bfloat16)
    sender.close()


def test_transposed_parameters_travel_in_their_own_order(model):
    turned = [(name, parameter.detach().clone().mT.contiguous().mT if parameter.ndim == 2 else parameter)
              for name, parameter in model.named_parameters()]  # fmt: skip
    server = Workers(1, [Receiver(model.config)])
    assert GroupSender("gloo", CPU, torch.float32).send([server], turned, 0) == {}
    assert_has(server.receivers[0], model)


def test_a_worker_that_fails_in_the_middle_is_reported_and_holds_nobody_up(model):
    bad = Workers(1, [Receiver(model.config, breaks_at="model.norm.weight")])
    early = Workers(2, [Receiver(model.config, breaks_at="model.embed_tokens.weight")])
    good = Workers(3, [Receiver(model.config)])
    sender = GroupSender("gloo", CPU, torch.float32, bucket_bytes=2000)
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
@pytest.mark.parametrize("by", ["group", "disk"])
def test_weights_that_are_not_the_models_are_not_taken(model, change, message, by, tmp_path):
    server = Workers(1, [Receiver(model.config)])
    sender = GroupSender("gloo", CPU, torch.float32) if by == "group" else DiskSender(None, torch.float32)
    failed = sender.send([server], change(list(model.named_parameters())), 1)
    assert message in failed[server.url]
    sender.close()


def test_what_goes_wrong_with_the_weights_themselves_is_raised_and_the_workers_hear_of_it(model):
    def broken():
        yield from list(model.named_parameters())[:5]
        raise ZeroDivisionError("gathering failed")

    server = Workers(1, [Receiver(model.config)])
    calls = []
    call = server.call
    server.call = lambda *a, **k: calls.append(call(*a, **k)) or calls[-1]
    sender = GroupSender("gloo", CPU, torch.float32, bucket_bytes=1000)
    with pytest.raises(ZeroDivisionError):
        sender.send([server], broken(), 1)
    with pytest.raises(RuntimeError, match="the trainer broke off.*gathering failed"):
        calls[-1].result(10)
    assert sender.send([server], model.named_parameters(), 2) == {}


def test_a_server_that_cannot_be_joined_is_reported(model):
    class Deaf(Workers):
        def call(self, method, **arguments):
            answer = Future()
            answer.set_exception(RuntimeError("no such method"))
            return answer

    deaf, good = Deaf(1, [Receiver(model.config)]), Workers(2, [Receiver(model.config)])
    failed = GroupSender("gloo", CPU, torch.float32).send([deaf, good], model.named_parameters(), 1)
    assert failed.keys() == {deaf.url} and "no such method" in failed[deaf.url]
    assert_has(good.receivers[0], model)


def test_files_bring_the_same_and_none_is_left(model, tmp_path):
    server = Workers(1, [Receiver(model.config), Receiver(model.config, 1)])
    sender = DiskSender(str(tmp_path / "new"), torch.float32, bucket_bytes=3000)
    for version in range(2):
        assert sender.send([server], model.named_parameters(), version) == {}
        for receiver in server.receivers:
            assert_has(receiver, model)
    with pytest.raises(ZeroDivisionError):
        sender.send([server], (1 / 0 for _ in range(1)), 2)
    assert list((tmp_path / "new").iterdir()) == []
    temporary = DiskSender(None, torch.float32)
    assert temporary.send([server], model.named_parameters(), 3) == {}
    temporary.close()


def test_nccl_from_a_cpu_is_refused():
    with pytest.raises(ValueError, match="weight_transfer is nccl and the trainer runs on cpu"):
        GroupSender("nccl", CPU, torch.float32)


DOOMED = """
import sys, torch
from verl.workers.rollout.vllm.weight_transfer import WeightReceiver
receiver = WeightReceiver()
receiver.rank, receiver.device = 0, torch.device("cpu")
receiver.rollout_join("gloo", sys.argv[1], sys.argv[2], sys.argv[3])
print("joined", flush=True)
for name, tensor in receiver._rollout_group.receive(1):
    pass
"""


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_receives_takes_no_other_with_it(model):
    class Doomed:
        url, num_workers = "http://127.0.0.1:1", 1

        def call(self, method, **arguments):
            if method == "rollout_join":
                command = [
                    sys.executable,
                    "-c",
                    DOOMED,
                    arguments["host"],
                    arguments["port"],
                    arguments["size"],
                ]
                self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                return ThreadPoolExecutor(1).submit(lambda: [self.process.stdout.readline()])
            return Future()  # an HTTP call that never answers

    def pairs():
        for i, pair in enumerate(model.named_parameters()):
            if i == 6:
                doomed.process.send_signal(signal.SIGKILL)
                doomed.process.wait()
            yield pair

    doomed, good = Doomed(), Workers(2, [Receiver(model.config)])
    sender = GroupSender("gloo", CPU, torch.float32, bucket_bytes=1000)
    failed = sender.send([doomed, good], pairs(), 1)
    doomed.process.stdout.close()
    assert failed.keys() == {doomed.url} and "the transfer broke" in failed[doomed.url]
    assert_has(good.receivers[0], model)
    assert sender.send([good], model.named_parameters(), 2) == {}

"""Real vLLM servers: exact against transformers, through updates and the end of a server."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from started_servers import StartedServers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl.sessions.engine_contract import SamplingParams
from verl.sessions.stop import _byte_level_alphabet
from verl.workers.rollout.remote.remote_engine import RemoteEngine
from verl.workers.rollout.remote.weights import WeightSender

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

VOCABULARY = 300  # 256 bytes, and ids that the tokenizer does not know
CPU = torch.device("cpu")
LENGTH = 256
TOLERANCE = 1e-4
NUM_SERVERS = {"tied": 2, "untied": 1}
WORKERS = {"tied": 1, "untied": 2}  # of a server, that share the model


def make_model(kind, seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "tied",
        initializer_range=0.2,
        eos_token_id=7,
    )
    return Qwen2ForCausalLM(config).eval()


def byte_tokenizer():
    vocabulary = {char: byte for char, byte in _byte_level_alphabet().items()}  # noqa: C416 - a copy
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Stack:
    """The servers of one kind of model, an engine on them, and what the engine's weights are now."""

    def __init__(self, kind, folder):
        make_model(kind).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        engine_args = {"model": str(folder), "dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 32}
        engine_args |= {"kv_cache_memory_bytes": 64 << 20, "block_size": 32, "enforce_eager": True}
        engine_args |= {"tensor_parallel_size": WORKERS[kind]}
        self.servers = StartedServers(engine_args, NUM_SERVERS[kind], folder)
        self.engine = RemoteEngine(
            self.servers.urls,
            max_model_len=LENGTH,
            vocab_size=VOCABULARY,
            sender=WeightSender("gloo", CPU, torch.float32),
        )
        self.update(make_model(kind, seed=1))

    def update(self, model):
        self.model = model
        self.engine.load_weights(model.named_parameters(), self.engine.version + 1)

    def drain(self):
        completions = {}
        while self.engine.has_runnable:
            completions |= {c.session_id: c for c in self.engine.step()}
        return completions

    def generate(self, prompts, params):
        ids = [self.engine.open(prompt, params) for prompt in prompts]
        completions = self.drain()
        for session_id in ids:
            self.engine.close(session_id)
        return [completions[session_id] for session_id in ids]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    with ThreadPoolExecutor() as pool:
        started = {kind: pool.submit(Stack, kind, tmp_path_factory.mktemp(kind)) for kind in NUM_SERVERS}
    found = {kind: future.result() for kind, future in started.items()}
    yield found
    for stack in found.values():
        stack.engine.shutdown()
        stack.servers.close()


@pytest.fixture
def tied(stacks):
    return stacks["tied"]


def prompts_of(num, seed=0, longest=90):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (num,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def logits_behind(model, context, token_ids):
    """[len(token_ids), V]: what the model says before each of the tokens."""
    ids = torch.tensor([[*context, *token_ids]])
    return model(ids).logits[0, len(context) - 1 : -1].float()


def assert_greedy(model, prompt, completion):
    logits = logits_behind(model, prompt, completion.token_ids)
    assert completion.token_ids == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    for found in (completion.log_probs, completion.model_log_probs):
        assert torch.allclose(torch.tensor(found), expected, atol=TOLERANCE)


@pytest.mark.parametrize("kind", NUM_SERVERS)
def test_greedy_tokens_and_log_probs_are_those_of_transformers_after_each_of_three_updates(stacks, kind):
    stack = stacks[kind]
    prompts = prompts_of(24)
    for seed in range(2, 5):
        stack.update(make_model(kind, seed))
        for prompt, got in zip(prompts, stack.generate(prompts, SamplingParams(24, 0.0)), strict=True):
            assert_greedy(stack.model, prompt, got)
            assert got.version_first == got.version_last == stack.engine.version
            assert (got.finish_reason, len(got.token_ids)) == ("length", 24)


def begin(stack, prompts):
    """Sessions under way. On a busy machine all may end before anybody looks at them; then others."""
    while True:
        ids = [stack.engine.open(prompt, SamplingParams(200, 0.0)) for prompt in prompts]
        deadline = time.monotonic() + 60.0
        while stack.engine._ended.qsize() < len(ids):
            if stack.engine.partial(ids[0]).token_ids:
                return ids
            assert time.monotonic() < deadline, "no token"
            time.sleep(0.001)
        stack.drain()


def test_sessions_of_a_killed_server_go_on_at_the_other_and_updates_too(tied):
    """Last of this file: one of the servers is gone afterwards."""
    prompts = prompts_of(8, seed=9, longest=40)
    ids = begin(tied, prompts)
    at_first = tied.engine._sessions[ids[0]].server.url
    tied.servers.kill(at_first)
    found = tied.drain()
    for session_id, prompt in zip(ids, prompts, strict=True):
        assert_greedy(tied.model, prompt, found[session_id])
        tied.engine.close(session_id)
    assert tied.engine.stats()["servers"] == 1.0
    tied.update(make_model("tied", 40))
    (got,) = tied.generate(prompts[:1], SamplingParams(10, 0.0))
    assert_greedy(tied.model, prompts[0], got)

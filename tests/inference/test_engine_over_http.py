"""The engine of `rollout.name=remote` on a server of the tiny model: exact, through updates too."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from served import MODEL, serving

from search_r1.llm_agent.generation import build_agent
from verl.config import load_config
from verl.protocol import DataProto, object_array
from verl.sessions.engine_contract import EngineUnavailable, SamplingParams
from verl.sessions.stop import StopCondition
from verl.utils import hf_tokenizer
from verl.utils.safetensors_file import read_weights
from verl.workers.engine.loading import load_hf_config
from verl.workers.rollout.native import NativeEngine
from verl.workers.rollout.remote.client import API_KEY_VARIABLE
from verl.workers.rollout.remote.remote_engine import RemoteEngine
from verl.workers.rollout.remote.weights import WeightSender
from verl.workers.rollout_worker import MEMBER, RolloutWorker

TOKEN = "a secret"
LENGTH = 256
PROMPTS = [list(range(5, 9 + number)) for number in range(6)]


@pytest.fixture(scope="module")
def server():
    with serving(token=TOKEN) as running:
        yield running


@pytest.fixture(scope="module")
def native():
    engine = NativeEngine(load_hf_config({"path": str(MODEL)}), 64, LENGTH)
    engine.load_weights(read_weights(MODEL), 0)
    yield engine
    engine.shutdown()


def engine_on(url, folder=None):
    vocabulary = load_hf_config({"path": str(MODEL)}).get_text_config().vocab_size
    sender = WeightSender("gloo", torch.device("cpu"), torch.float32)
    return RemoteEngine([url], max_model_len=LENGTH, vocab_size=vocabulary, sender=sender, weight_dir=folder)


@pytest.fixture
def remote(server, tmp_path, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, TOKEN)
    engine = engine_on(server.url, tmp_path / "weights")
    yield engine
    engine.shutdown()


def turns(engine, params, observation=(7, 8, 9)):
    """Two turns of each prompt."""
    ids = [engine.open(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    found = []
    for turn in range(2):
        ended = {}
        while len(ended) < len(ids):
            ended |= {completion.session_id: completion for completion in engine.step()}
        found += [ended[i] for i in ids]
        for session_id, one in zip(ids, params, strict=True):
            if turn == 0:
                engine.resume(session_id, observation, one)
    for session_id in ids:
        engine.close(session_id)
    return found


def test_turns_are_those_of_the_engine_itself_for_the_same_seeds(remote, native):
    assert remote.version == -1
    remote.load_weights(read_weights(MODEL), 4)
    stop = StopCondition(hf_tokenizer(str(MODEL)), ["</search>", "</answer>"])
    kinds = [{}, {"temperature": 0.0}, {"temperature": 1.4, "top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {}]
    params = [SamplingParams(20, seed=seed, stop=stop, **kind) for seed, kind in enumerate(kinds)]
    expected, found = (turns(engine, params) for engine in (native, remote))
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason, one.stop_string) == (
            other.token_ids,
            other.finish_reason,
            other.stop_string,
        )
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert one.model_log_probs == pytest.approx(other.model_log_probs, abs=1e-4)
        assert (one.version_first, one.version_last) == (4, 4)
    assert remote.stats()["prefilled_tokens"] > 0


def test_new_weights_come_in_the_midst_of_turns_and_no_file_is_left(remote, server, tmp_path):
    remote.load_weights(read_weights(MODEL), 5)
    session_id = remote.open(PROMPTS[0], SamplingParams(200, seed=1, ignore_eos=True))
    deadline = time.monotonic() + 30
    while not any(server.engine.partial(i).token_ids for i in list(server.engine._sessions)):
        assert time.monotonic() < deadline
    remote.load_weights([(name, tensor * 1.1) for name, tensor in read_weights(MODEL)], 6)
    completions = []
    while not completions:
        completions = remote.step()
    assert len(completions[0].token_ids) == 200 and completions[0].version_last == 6
    assert completions[0].version_first == 5
    remote.close(session_id)
    assert list((tmp_path / "weights").iterdir()) == []


def test_weights_that_the_server_does_not_take_are_an_error_with_its_reason(remote):
    with pytest.raises(EngineUnavailable, match="no server is left.*missing weights.*rollout.weight_dir"):
        remote.load_weights([next(iter(read_weights(MODEL)))], 7)


def test_a_server_without_a_token_samples_with_its_own_weights_alone(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with serving() as running:
        engine = engine_on(running.url)
        try:
            engine.open(PROMPTS[0], SamplingParams(5, seed=1))
            completions = []
            while not completions:
                completions = engine.step()
            assert len(completions[0].token_ids) == 5 and engine.version == 0
            with pytest.raises(ValueError, match="takes no new weights; start it with --api_key_var"):
                engine.load_weights(read_weights(MODEL), 1)
        finally:
            engine.shutdown()


def test_a_token_that_is_missing_is_asked_for(server, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(EngineUnavailable, match="401"):
        engine_on(server.url)


def test_a_process_that_samples_apart_holds_it_as_any_engine(server, tmp_path, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, TOKEN)
    rollout = "actor_rollout_ref.rollout"
    settings = [f"actor_rollout_ref.model.path={MODEL}", "do_search=false", "max_turns=1"]
    settings += ["data.max_response_length=24", "data.max_prompt_length=512", "data.max_start_length=256"]
    settings += [
        f"{rollout}.name=remote",
        f"{rollout}.placement=apart",
        f"{rollout}.remote.urls={server.url}",
    ]
    config = load_config([*settings, f"{rollout}.weight_dir={tmp_path}"])
    block = config.actor_rollout_ref
    worker = RolloutWorker(block, partial(build_agent, config), config.trainer.async_training, "cpu")
    try:
        worker.start_rollout(8, "float32")
        for version in (8, 9):
            worker.load_weights([list(read_weights(MODEL))], version)
            columns = {"raw_prompt_ids": PROMPTS[:2], "uid": ["group"] * 2, MEMBER: [0, 1]}
            tensors = {"sampling_seeds": torch.arange(2)}
            arrays = {name: object_array(column) for name, column in columns.items()}
            worker.submit(DataProto.from_dict(tensors, arrays))
            records = []
            while len(records) < 2:
                batch = worker.poll(1.0)
                records += [] if batch is None else list(batch.non_tensor_batch["trajectory"])
            assert {(record["version_first"], record["version_last"]) for record in records} == {
                (version, version)
            }
    finally:
        worker.close()

"""The agent with the native engine, a small random model and a real retrieval server: the parts fit together.

The model knows nothing, so the tags' rows of its head are scaled up: it writes searches and answers often.
What it samples is decided by the model and the seed; Hugging Face's forward is the oracle for its log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from scripted_engine import byte_tokenizer, prompts
from tokenizers import AddedToken
from transformers import Qwen3Config, Qwen3ForCausalLM

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager, env_metrics
from search_r1.search.client import SearchClient
from verl.protocol import DataProto
from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.native.native_engine import NativeEngine

TAGS = ["<search>", "</search>", "<answer>", "</answer>"]
CONFIG = GenerationConfig(
    max_turns=3,
    max_start_length=16,
    max_prompt_length=400,
    max_response_length=24,
    max_obs_length=90,
    topk=2,
    search_delay_steps=2,
)
QUESTIONS = [f"question {letter}" for letter in "abcdefghijkl"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for row in tokenizer.convert_tokens_to_ids(TAGS):
            model.lm_head.weight[row] *= 3
    return model


@pytest.fixture(scope="module")
def client(serve_documents) -> Iterator[SearchClient]:
    words = [chr(a) + chr(b) for a in range(97, 123) for b in range(97, 123)]
    documents = [{"contents": f'"{word}"\n{word} is near {word[::-1]}'} for word in words]
    documents.append({"contents": '"answer"\nWhat this model often writes: search, answer.'})
    with serve_documents(documents, topk=2) as address, SearchClient(address, timeout=20) as client:
        yield client


def generate(tokenizer, model, client, config=CONFIG, max_num_seqs=5, **meta_info) -> DataProto:
    engine = NativeEngine(model.config, max_num_seqs, max_model_len=config.max_prompt_length)
    engine.load_weights(model.state_dict().items(), version=7)
    return LLMGenerationManager(tokenizer, engine, client, config).run_llm_loop(
        prompts(tokenizer, QUESTIONS, **meta_info)
    )


@pytest.fixture(scope="module")
def output(tokenizer, model, client) -> DataProto:
    return generate(tokenizer, model, client)


def test_the_runs_have_something_of_everything(output):
    """Otherwise the tests below would hold of nothing."""
    records = list(output.non_tensor_batch["trajectory"])
    actions = [turn["action"] for record in records for turn in record["turns"]]
    assert {"search", "invalid"} <= set(actions)
    assert any(turn["documents"] for record in records for turn in record["turns"])
    assert env_metrics(records)["env/search_failed"] == 0
    assert {record["version_first"] for record in records} == {7}


def test_the_log_probs_are_those_of_the_model(output, model):
    batch = output.batch
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits
    width = batch["responses"].shape[1]
    log_probs = torch.log_softmax(logits[:, -width - 1 : -1].float(), -1)
    log_probs = log_probs.gather(-1, batch["responses"][..., None])[..., 0]
    mask = batch["response_mask"].bool()
    assert mask.sum() > 100
    torch.testing.assert_close(batch["rollout_log_probs"][mask], log_probs[mask], atol=2e-4, rtol=0)


def test_observations_are_in_the_ids_as_the_server_gave_them(output, tokenizer):
    seen = 0
    for row, record in enumerate(output.non_tensor_batch["trajectory"]):
        for turn in record["turns"]:
            if turn["documents"] is not None and turn["obs_start"] is not None:
                ids = output.batch["responses"][row, turn["obs_start"] : turn["obs_end"]]
                text = tokenizer.decode(ids)
                assert text.startswith("\n\n<information>") and text.endswith("</information>\n\n")
                seen += 1
    assert seen > 0


def test_rule_10_the_same_seeds_give_the_same_bits_again(output, tokenizer, model, client):
    again = generate(tokenizer, model, client)
    for key in output.batch.keys():  # noqa: SIM118
        assert torch.equal(output.batch[key], again.batch[key]), key


@pytest.mark.parametrize("steps_between", [0, 1, 30])
def test_equal_trajectories_that_find_the_same_documents_compute_them_once(model, steps_between):
    engine = NativeEngine(model.config, 4, max_model_len=400)
    engine.load_weights(model.state_dict().items(), version=0)
    prompt = list(range(40))
    observation = list(range(100, 220))
    params = SamplingParams(max_tokens=6, temperature=0.0)

    def run_all() -> dict[int, list[int]]:
        ended = {}
        while engine.has_runnable:
            ended |= {completion.session_id: completion.token_ids for completion in engine.step()}
        return ended

    sessions = [engine.open(prompt, params) for _ in range(3)]
    run_all()
    before = engine.stats()["prefilled_tokens"]
    completions = []
    for session_id in sessions:
        engine.resume(session_id, observation, params)
        for _ in range(steps_between):
            if engine.has_runnable:
                completions += engine.step()
    ended = {completion.session_id: completion.token_ids for completion in completions} | run_all()
    assert len({tuple(ids) for ids in ended.values()}) == 1 and len(ended) == 3
    computed = engine.stats()["prefilled_tokens"] - before
    assert len(observation) <= computed < 2 * len(observation)
    for session_id in sessions:
        engine.close(session_id)

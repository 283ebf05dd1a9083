"""The engine on transformers' own models: Hugging Face's tokens and log-probs, whatever the cache is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.workers.rollout.engine import Completion, SamplingParams
from verl.workers.rollout.transformers_engine import TransformersEngine

VOCAB = 97
_ENDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    **_ENDS,
}
_GQA: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **_ENDS
    )


def _gpt_neox() -> PretrainedConfig:
    return transformers.GPTNeoXConfig(**_SIZES, intermediate_size=48)


def _phi3() -> PretrainedConfig:
    return transformers.Phi3Config(**_GQA, sliding_window=8)


def _mamba() -> PretrainedConfig:
    sizes = {name: _SIZES[name] for name in _SIZES if name != "num_attention_heads"}
    return transformers.MambaConfig(**sizes, state_size=4)


def _falcon_h1() -> PretrainedConfig:
    return transformers.FalconH1Config(
        **_GQA, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    )


KINDS = {"gpt2": _gpt2, "gpt_neox": _gpt_neox, "phi3": _phi3, "mamba": _mamba, "falcon_h1": _falcon_h1}


def _make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model


def _make_engine(model: PreTrainedModel, max_num_seqs: int = 3, **kwargs: Any) -> TransformersEngine:
    values: dict[str, Any] = {"max_model_len": 128, "dtype": torch.float32, "device": "cpu", **kwargs}
    engine = TransformersEngine(model.config, max_num_seqs, **values)
    engine.update_weights(model.named_parameters(), version=1)
    return engine


def _run(engine: TransformersEngine) -> dict[int, Completion]:
    ended = {}
    while engine.has_runnable:
        ended |= {completion.session_id: completion for completion in engine.step()}
    return ended


@torch.no_grad()
def _greedy(model: PreTrainedModel, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs, each from the whole sequence without a cache."""
    tokens, log_probs = list(tokens), []
    for _ in range(count):
        row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
        tokens.append(int(row.argmax()))
        log_probs.append(float(row.max()))
    return tokens[-count:], log_probs


def _prompts(count: int, longest: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_turns_are_hugging_faces_also_after_observations_and_dropped_caches(kind: str) -> None:
    model = _make_model(kind)
    engine = _make_engine(model, max_num_seqs=2)
    sequences = {engine.open(prompt, SamplingParams(5, temperature=0.0)): prompt for prompt in _prompts(5)}
    for observation in ([3, 1, 4, 1, 5, 9], [2], []):
        ended = _run(engine)
        for session_id, completion in ended.items():
            tokens, log_probs = _greedy(model, sequences[session_id], 5)
            assert completion.token_ids == tokens
            assert completion.log_probs == pytest.approx(log_probs, abs=1e-5)
            assert completion.model_log_probs == pytest.approx(log_probs, abs=1e-5)
            sequences[session_id] = sequences[session_id] + tokens + observation
            engine.resume(session_id, observation, SamplingParams(5, temperature=0.0))
        assert ended.keys() == sequences.keys()


def test_no_more_caches_are_held_than_sessions_are_allowed() -> None:
    engine = _make_engine(_make_model("gpt2"), max_num_seqs=2)
    for length in (3, 4, 5, 6):
        engine.open(list(range(length)), SamplingParams(length))
    position = 2 * 2 * 32 * 4  # layers, keys and values, width, bytes
    while engine.has_runnable:
        engine.step()
        assert engine.stats()["kv_bytes"] <= 2 * 12 * position
    assert engine.stats()["parked"] == 4 and engine.stats()["kv_bytes"] == (9 + 11) * position
    assert engine.stats()["prefilled_tokens"] == 3 + 4 + 5 + 6


def test_who_has_been_parked_longest_gives_its_cache_up() -> None:
    engine = _make_engine(_make_model("gpt2"), max_num_seqs=2)
    first, second = (engine.open([1, 2, 3], SamplingParams(count)) for count in (1, 2))
    _run(engine)
    third = engine.open([4, 5], SamplingParams(1))
    _run(engine)
    before = engine.stats()["prefilled_tokens"]
    engine.resume(second, [7], SamplingParams(1))
    _run(engine)
    assert engine.stats()["prefilled_tokens"] == before + 2  # its last token and the observation
    engine.resume(first, [7], SamplingParams(1))
    _run(engine)
    assert engine.stats()["prefilled_tokens"] == before + 2 + 5
    assert engine.partial(third).token_ids == []


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_are_used_at_once_and_sessions_stay(tied: bool) -> None:
    config = transformers.GPTNeoXConfig(**_SIZES, intermediate_size=48, tie_word_embeddings=tied)
    torch.manual_seed(0)
    models = [AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval() for _ in range(3)]
    engine = _make_engine(models[0])
    session = engine.open([5, 6, 7], SamplingParams(9, temperature=0.0))
    expected = [5, 6, 7]
    for version, model in enumerate(models[1:], 2):
        for _ in range(3):
            engine.step()
        expected += _greedy(models[version - 2], expected, 3)[0]
        assert engine.partial(session).token_ids == expected[3:]
        engine.update_weights(model.named_parameters(), version)
    ended = _run(engine)[session]
    assert ended.token_ids == (expected + _greedy(models[-1], expected, 3)[0])[3:]
    assert (ended.version_first, ended.version_last) == (1, 3)


def test_weights_of_another_dtype_are_cast_into_storage_of_the_engines_own() -> None:
    model = _make_model("phi3")
    engine = _make_engine(model, dtype=torch.bfloat16)
    session = engine.open([1, 2, 3], SamplingParams(4, temperature=0.0))
    completion = _run(engine)[session]
    reference = _make_model("phi3").to(torch.bfloat16)
    with torch.no_grad():
        row = reference(torch.tensor([[1, 2, 3]])).logits[0, -1].float().log_softmax(-1)
    assert completion.log_probs[0] == pytest.approx(float(row[completion.token_ids[0]]), abs=0.02)
    engine.update_weights(model.named_parameters(), 2)
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert engine.sleep(2) >= num_bytes
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    engine.resume(session, [], SamplingParams(1))
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.step()


def test_sleep_gives_the_caches_back_and_turns_go_on_as_if_nothing_had_been() -> None:
    model = _make_model("mamba")
    plain, slept = _make_engine(model), _make_engine(model)
    for engine in (plain, slept):
        engine.open([1, 2, 3, 4], SamplingParams(8, seed=3))
    for _ in range(4):
        slept.step()
    held = slept.stats()["kv_bytes"]
    assert slept.sleep(1) == held > 0 and slept.stats()["kv_bytes"] == 0
    slept.wake()
    assert _run(slept)[0].token_ids == _run(plain)[0].token_ids


def test_weights_that_do_not_fit_are_refused() -> None:
    model = _make_model("gpt_neox")
    engine = _make_engine(model)
    weights = dict(model.named_parameters())
    name = "gpt_neox.final_layer_norm.weight"
    with pytest.raises(ValueError, match="1 unknown .*1 missing"):
        engine.update_weights(
            [("other", torch.zeros(1)), *((n, w) for n, w in weights.items() if n != name)], 2
        )
    with pytest.raises(ValueError, match="shape"):
        engine.update_weights((weights | {name: torch.zeros(3)}).items(), 2)
    assert engine.version == -1


def test_turns_end_at_eos_at_max_tokens_and_at_max_model_len() -> None:
    model = _make_model("gpt_neox")
    engine = _make_engine(model, max_model_len=12)
    third = _greedy(model, [1, 2], 3)[0][2]
    eos = SamplingParams(9, temperature=0.0, eos_token_ids=frozenset({third}))
    ended = _run_one(engine, [1, 2], eos)
    assert ended.finish_reason == "eos" and ended.token_ids[-1] == third
    assert _run_one(engine, [1, 2], SamplingParams(2)).finish_reason == "length"
    full = _run_one(engine, [1] * 8, SamplingParams(9))
    assert (full.finish_reason, len(full.token_ids)) == ("length", 4)
    engine.resume(full.session_id, [1], SamplingParams(9))
    assert _run(engine)[full.session_id].token_ids == []
    with pytest.raises(ValueError, match="13 tokens"):
        engine.open([1] * 13, SamplingParams(1))


def _run_one(engine: TransformersEngine, prompt: list[int], params: SamplingParams) -> Completion:
    session_id = engine.open(prompt, params)
    return _run(engine)[session_id]


def test_a_first_token_follows_the_models_softmax() -> None:
    model = _make_model("gpt_neox")
    engine = _make_engine(model, max_num_seqs=500)
    for seed in range(500):
        engine.open([4, 8, 15], SamplingParams(1, seed=seed))
    ended = _run(engine)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in ended.values()]), minlength=VOCAB)
    with torch.no_grad():
        expected = 500 * model(torch.tensor([[4, 8, 15]])).logits[0, -1].double().softmax(-1)
    cells = expected >= 5
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_sampled_turn_depends_on_its_seed_alone() -> None:
    model = _make_model("gpt2")
    alone = _run_one(_make_engine(model), [1, 2, 3], SamplingParams(8, seed=11))
    engine = _make_engine(model, max_num_seqs=2)
    for prompt in _prompts(4):
        engine.open(prompt, SamplingParams(5, seed=1))
    assert _run_one(engine, [1, 2, 3], SamplingParams(8, seed=11)).token_ids == alone.token_ids


def test_after_a_failed_step_turns_go_on_as_if_nothing_had_been() -> None:
    model = _make_model("gpt_neox")
    engine = _make_engine(model)
    session = engine.open([1, 2, 3], SamplingParams(6, temperature=0.0))
    engine.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    broken = weights | {"gpt_neox.final_layer_norm.bias": torch.full((32,), float("nan"))}
    engine.update_weights(broken.items(), 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not finite"):
            engine.step()
    engine.update_weights(weights.items(), 3)
    assert _run(engine)[session].token_ids == _greedy(model, [1, 2, 3], 6)[0]


def _play(
    engine: TransformersEngine, weights: list[tuple[str, Any]], scripts: list[list[list[int]]], seed: int
) -> list[list[list[int]]]:
    """Each session's turns, in a random order of opening, stepping, sleeping, updating and resuming."""
    random = np.random.default_rng(seed)
    turns: list[list[list[int]]] = [[] for _ in scripts]
    of_session: dict[int, int] = {}
    unopened, waiting = list(range(len(scripts))), []
    while unopened or waiting or engine.has_runnable:
        choice = random.integers(10)
        if choice == 0 and unopened:
            index = unopened.pop(0)
            params = SamplingParams(4, temperature=0.8, seed=index)
            of_session[engine.open(scripts[index][0], params)] = index
        elif choice == 1 and waiting:
            session = waiting.pop(int(random.integers(len(waiting))))
            done = turns[of_session[session]]
            script = scripts[of_session[session]]
            if len(done) == len(script):
                engine.close(session)
            else:
                params = SamplingParams(4, temperature=0.8, seed=of_session[session])
                engine.resume(session, script[len(done)], params)
        elif choice == 2:
            level = 1 + int(random.integers(2))
            engine.sleep(level)
            engine.wake()
            if level == 2:
                engine.update_weights(weights, 1)
        elif choice == 3:
            engine.update_weights(weights, 1)
        else:
            for completion in engine.step():
                turns[of_session[completion.session_id]].append(completion.token_ids)
                waiting.append(completion.session_id)
    return turns


@pytest.mark.parametrize("kind", ["gpt_neox", "mamba"])
def test_random_schedules_sample_what_each_session_samples_alone(kind: str) -> None:
    model = _make_model(kind)
    random = np.random.default_rng(0)
    scripts = [[random.integers(0, VOCAB, n).tolist() for n in (5, 3, 1)] for _ in range(4)]
    alone = []
    for index, script in enumerate(scripts):
        engine = _make_engine(model)
        session = engine.open(script[0], SamplingParams(4, temperature=0.8, seed=index))
        turns = [_run(engine)[session].token_ids]
        for observation in script[1:]:
            engine.resume(session, observation, SamplingParams(4, temperature=0.8, seed=index))
            turns.append(_run(engine)[session].token_ids)
        alone.append(turns)
    for seed in range(6):
        engine = _make_engine(model, max_num_seqs=1 + seed % 3)
        assert _play(engine, list(model.named_parameters()), scripts, seed) == alone
        assert engine.stats()["kv_bytes"] == 0  # all are closed


def test_it_says_once_that_it_is_the_slow_path(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="verl"):
        _run_one(_make_engine(_make_model("gpt2")), [1, 2], SamplingParams(3))
    (record,) = caplog.records
    assert "GPT2LMHeadModel" in record.getMessage() and "slow" in record.getMessage()

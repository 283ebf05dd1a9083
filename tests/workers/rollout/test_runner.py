"""PagedRunner: the same numbers as Hugging Face, however the tokens come and wherever their blocks lie."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from rollout_models import CONFIGS, hf_log_probs, make_model, random_prompts
from step_driver import StepDriver, sampling_rows
from transformers import AutoModelForCausalLM, Gemma3Config, PreTrainedModel

from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.rollout.native.cpu_model import padded
from verl.workers.rollout.native.runner import PagedRunner
from verl.workers.rollout.native.step_batch import PrefillSpan, StepBatch
from verl.workers.rollout.native.weights import WeightStore

LONGEST = 64


def _runner(model: PreTrainedModel, dtype: torch.dtype = torch.float32, block_size: int = 8) -> PagedRunner:
    runner = PagedRunner(model.config, dtype, "cpu", block_size, LONGEST)
    runner.update_weights(model.named_parameters())
    return runner


def _check(
    model: PreTrainedModel,
    runner: PagedRunner,
    prompts: list[list[int]],
    most: int = 10**9,
    num_tokens: int = 24,
) -> None:
    driver = StepDriver(runner, LONGEST, len(prompts))
    tokens, log_probs, model_log_probs = driver.generate(prompts, num_tokens, most)
    for prompt, sampled, ours, plain in zip(prompts, tokens, log_probs, model_log_probs, strict=True):
        expected = hf_log_probs(model, prompt + sampled)[len(prompt) :]
        assert ours == pytest.approx(expected, abs=1e-4)
        assert plain == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_hugging_faces(name: str) -> None:
    model = make_model(name)
    _check(model, _runner(model), random_prompts(5))


@pytest.mark.parametrize("name", ["qwen2-sliding", "llama-bias", "qwen3", "gemma2", "gemma3"])
def test_the_general_path_gives_hugging_faces_log_probs_too(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(name)
    with caplog.at_level(logging.WARNING):
        runner = _runner(model, torch.float64)  # on CPU only float32 and bfloat16 have the fast path
    assert "slow" in caplog.text
    _check(model, runner, random_prompts(5))


@pytest.mark.parametrize("name", ["qwen2-sliding", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_prompts_computed_in_pieces_give_the_same(name: str, most: int) -> None:
    model = make_model(name)
    _check(model, _runner(model), random_prompts(5), most)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_the_block_size_does_not_matter(block_size: int) -> None:
    model = make_model("gemma3")
    _check(model, _runner(model, block_size=block_size), random_prompts(5))


@pytest.mark.slow
def test_threads_do_not_change_the_result() -> None:
    model = make_model("qwen2-sliding")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _check(model, _runner(model), random_prompts(20), num_tokens=2)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_a_snapshot_until_the_next_update(dtype: torch.dtype) -> None:
    model = make_model("llama-bias").to(dtype)
    runner = _runner(model, dtype)
    prompts = random_prompts(3)
    before = StepDriver(runner, LONGEST, 3).generate(prompts, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    assert StepDriver(runner, LONGEST, 3).generate(prompts, 4) == before
    runner.update_weights(model.named_parameters())
    assert StepDriver(runner, LONGEST, 3).generate(prompts, 4) != before


def test_copied_blocks_carry_their_keys_and_values() -> None:
    model = make_model("qwen3")
    runner = _runner(model)
    driver = StepDriver(runner, LONGEST, 2)
    driver.append(0, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    driver.step([0])
    driver.tokens[1] = driver.tokens[0][:9] + [20]
    driver.stored[1] = 9
    runner.copy_blocks(driver.tables[0, :2].tolist(), driver.tables[1, :2].tolist())
    _, sampled = driver.step([1])
    expected = hf_log_probs(model, driver.tokens[1])[-1]
    assert float(sampled.log_probs[0]) == pytest.approx(expected, abs=1e-4)


def test_one_row_may_be_sampled_from_several_times() -> None:
    model = make_model("qwen3")
    runner = _runner(model)
    runner.allocate(1)
    batch = StepBatch(
        token_ids=np.array([5, 6, 7]),
        positions=np.arange(3),
        places=np.arange(3),
        num_decode=0,
        decode_tables=np.zeros((0, 1), dtype=np.int32),
        decode_lengths=np.zeros(0, dtype=np.int64),
        spans=[PrefillSpan(0, 3, 0, np.zeros(1, dtype=np.int32))],
        out_rows=np.full(30, 2),
    )
    sampled = runner.step(batch, sampling_rows(30))
    assert len(set(sampled.token_ids.tolist())) > 1
    for token, log_prob in zip(sampled.token_ids.tolist(), sampled.log_probs, strict=True):
        assert float(log_prob) == pytest.approx(hf_log_probs(model, [5, 6, 7, token])[-1], abs=1e-4)


def test_a_step_needs_weights_and_releasing_them_says_what_it_frees() -> None:
    model = make_model("qwen3")
    runner = _runner(model)
    StepDriver(runner, LONGEST, 1).generate([[1, 2]], 2)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert runner.release_weights() == pytest.approx(num_bytes, rel=0.1)
    with pytest.raises(RuntimeError, match="update_weights"):
        StepDriver(runner, LONGEST, 1).generate([[1, 2]], 2)


def test_products_run_with_few_numbers_of_rows() -> None:
    sizes = {padded(rows) for rows in range(1, 8193)}
    assert len(sizes) <= 72
    assert all(rows <= padded(rows) < max(rows + 4, rows * 1.26) for rows in range(1, 8193))


def test_gemma_3s_multimodal_config_is_read_for_its_text_model() -> None:
    text = CONFIGS["gemma3"]
    spec = ModelSpec.from_config(Gemma3Config(text_config=text.to_dict()))
    assert spec == ModelSpec.from_config(text)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert any("vision_tower" in name for name, _ in model.named_parameters())
    _check(model, _runner(model), random_prompts(5))
    runner = _runner(model)
    runner.update_weights(make_model("gemma3").named_parameters())  # the text model alone
    with pytest.raises(ValueError, match="model.vision_tower"):
        _runner(make_model("gemma3")).update_weights(model.named_parameters())


def test_what_it_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="relu"):
        ModelSpec.from_config(type(CONFIGS["qwen3"])(hidden_act="relu"))
    with pytest.raises(ValueError, match="bidirectional"):
        ModelSpec.from_config(type(CONFIGS["gemma3"])(use_bidirectional_attention=True))


def test_weights_made_for_each_update_are_copied_to_where_the_last_ones_were():
    """A CUDA graph finds gathered or merged matrices at the addresses that it was made with."""
    model = make_model("qwen3")
    spec = ModelSpec.from_config(model.config)
    owned = dict(model.named_parameters())
    store = WeightStore(spec, torch.float32, torch.device("cpu"), copies=True)
    first = store.update((name, p.detach().clone()) for name, p in owned.items())
    second = store.update((name, p.detach() + 1) for name, p in owned.items())
    assert first.layers[0].q.data_ptr() == second.layers[0].q.data_ptr()
    assert torch.equal(second.layers[0].q, owned["model.layers.0.self_attn.q_proj.weight"] + 1)
    references = WeightStore(spec, torch.float32, torch.device("cpu")).update(owned.items())
    assert references.norm.data_ptr() == owned["model.norm.weight"].data_ptr()

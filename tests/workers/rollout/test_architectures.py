"""Every architecture on the native engine: Hugging Face's log-probs; what it does not run is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from rollout_models import CONFIGS, generate, hf_log_probs, make_engine, make_model, random_prompts
from transformers import AutoModelForCausalLM, Gemma3Config, PreTrainedModel

from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.native import NativeEngine
from verl.workers.rollout.native.architecture import ModelSpec


def check(model: PreTrainedModel, engine: NativeEngine) -> None:
    prompts = random_prompts(5)
    params = [SamplingParams(24, seed=seed) for seed in range(5)]
    for prompt, completion in zip(prompts, generate(engine, prompts, params), strict=True):
        expected = hf_log_probs(model, prompt + completion.token_ids)[len(prompt) :]
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)
        assert completion.model_log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_hugging_faces(name: str) -> None:
    model = make_model(name)
    check(model, make_engine(model, max_model_len=64, block_size=8))


@pytest.mark.parametrize("name", ["qwen2-sliding", "llama-bias", "qwen3", "gemma3"])
def test_plain_torch_operations_give_hugging_faces_log_probs_too(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(name)
    with caplog.at_level(logging.WARNING):  # on CPU only float32 and bfloat16 have kernels
        engine = make_engine(model, max_model_len=64, block_size=8, dtype=torch.float64)
    assert "slowly" in caplog.text
    check(model, engine)
    assert engine.sleep(2) > 0  # the casts of the weights, and the cache
    with pytest.raises(RuntimeError, match="asleep"):
        engine.open([1], SamplingParams(1))
        engine.step()


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma3"])
@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prompts_computed_in_pieces_give_the_same(name: str, most: int, dtype: torch.dtype) -> None:
    model = make_model(name)
    check(model, make_engine(model, max_model_len=64, block_size=3, max_prefill_tokens=most, dtype=dtype))


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
    engine = make_engine(model, max_model_len=64)
    check(model, engine)
    engine.load_weights(make_model("gemma3").named_parameters(), 2)  # the text model alone
    with pytest.raises(ValueError, match="model.vision_tower"):
        make_engine(make_model("gemma3")).load_weights(model.named_parameters(), 1)


def test_what_it_does_not_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="relu"):
        ModelSpec.from_config(type(CONFIGS["qwen3"])(hidden_act="relu"))
    with pytest.raises(ValueError, match="bidirectional"):
        ModelSpec.from_config(type(CONFIGS["gemma3"])(use_bidirectional_attention=True))

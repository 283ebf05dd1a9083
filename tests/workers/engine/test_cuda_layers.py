"""Layers that are compiled for CUDA, here on CPU and by the compiler's front alone: nothing else changes."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen3Config

from verl.packing import linear_logprob
from verl.packing.attention import Packing
from verl.packing.packs import pack_rows
from verl.utils import device
from verl.workers.engine import cuda_layers
from verl.workers.engine.loading import PolicyModel
from verl.workers.engine.lora import add_adapters

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=7),
}


@pytest.fixture
def compiles(monkeypatch):
    """Any model is large enough, and Triton is there; functions are traced, and run by torch as it is."""
    monkeypatch.setattr(cuda_layers, "FEWEST_PARAMETERS", 0)
    find_spec = importlib.util.find_spec
    real = torch.compile
    calls = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name))

    def traced(function, **options):
        calls.append(function)
        return real(function, **options, backend="eager")

    monkeypatch.setattr(device.torch, "compile", traced)
    linear_logprob._compiled.cache_clear()
    yield calls
    linear_logprob._compiled.cache_clear()


def policy(name: str, checkpoints: bool) -> PolicyModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="packed")
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return PolicyModel(model.train())


def results(module: PolicyModel) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(97, (3, 20), generator=generator)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(20).expand(3, 20),
        "response_mask": torch.ones(3, 12, dtype=torch.int64),
    }
    with torch.no_grad():
        plain, _, _ = module(pack_rows(batch, [0, 1, 2], "cpu"), temperature=0.8, with_entropy=True)
    log_probs, entropy, _ = module(pack_rows(batch, [0, 1, 2], "cpu"), temperature=0.8, with_entropy=True)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    torch.testing.assert_close(plain, log_probs.detach())
    return [log_probs.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_compiled_layers_give_the_log_probs_and_gradients_of_plain_ones(name, checkpoints, compiles):
    wanted = results(policy(name, checkpoints))
    module = policy(name, checkpoints)
    assert cuda_layers.use_cuda_layers(module)
    got = results(module)
    assert len(compiles) == 2 + 2  # two layers of three, as the last one is short, and the logits each way
    assert len(got) == len(wanted) > 10
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_passes_of_other_rows_need_no_other_code(compiles, monkeypatch):
    counter = CompileCounterWithBackend("eager")
    real = torch._dynamo.optimize
    monkeypatch.setattr(device.torch, "compile", lambda function, **options: real(counter)(function))
    module = policy("qwen2", checkpoints=True)
    assert cuda_layers.use_cuda_layers(module)
    frames = []
    for count, width in ((2, 20), (3, 26), (5, 31), (6, 17), (7, 23)):
        ids = torch.randint(97, (count, width), generator=torch.Generator().manual_seed(count))
        ids[:, : count + 4] = ids[0, : count + 4]  # shared
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(width).expand(count, width),
            "response_mask": torch.ones(count, 8, dtype=torch.int64),
        }
        module(pack_rows(batch, range(count), "cpu"), temperature=0.8, with_entropy=True)[0].sum().backward()
        frames.append(counter.frame_count)
    assert frames[0] > 0 and len(set(frames[2:])) == 1  # sizes become variables by the second pass
    assert not Packing.__dataclass_params__.frozen  # torch 2.11 would look into it, and compile for each


@pytest.mark.slow
def test_adapters_are_trained_through_compiled_layers(compiles):
    gradients = []
    for is_compiled in (False, True):
        module = policy("qwen2", checkpoints=True)
        from peft import LoraConfig  # here, since its import takes seconds in each process of the tests

        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        add_adapters(module.model, config, "a model")
        assert not is_compiled or cuda_layers.use_cuda_layers(module)
        gradients.append(results(module)[1:])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_small_models_and_machines_without_a_compiler_stay_as_they_are(monkeypatch, caplog):
    module = policy("qwen2", checkpoints=False)
    forwards = [layer.forward for layer in module.model.model.layers]
    assert not cuda_layers.use_cuda_layers(module)
    monkeypatch.setattr(cuda_layers, "FEWEST_PARAMETERS", 0)
    monkeypatch.setattr(cuda_layers.shutil, "which", lambda name: None)
    assert not cuda_layers.use_cuda_layers(module) and "apt install gcc" in caplog.text
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not cuda_layers.use_cuda_layers(module)
    assert [layer.forward for layer in module.model.model.layers] == forwards

"""LoRA: gradients by the chain rule of the whole model's, merged weights, checkpoints, PEFT folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import (
    assert_same_gradients,
    gradients_of,
    make_actor,
    make_batch,
    make_config,
    make_critic,
    save,
    save_hf,
    write_model,
)
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine.loading import load_policy, load_value_model

RANK = 3
ALPHA = 12
LORA = [f"actor_rollout_ref.model.lora_rank={RANK}", f"actor_rollout_ref.model.lora_alpha={ALPHA}"]


def lora_actor(model_path, *overrides):
    """An actor whose adapters are not at their start: B is random too."""
    actor = make_actor(make_config(model_path, *LORA, *overrides))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.engine.adapters.parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return actor


def base_weights(engine):
    return {
        name.replace(".base_layer", ""): p.detach().clone()
        for name, p in engine.module.model.named_parameters()
        if not p.requires_grad
    }


def merged_by_hand(engine):
    """base + alpha / r * B A, in float64."""
    weights = {name: tensor.double() for name, tensor in base_weights(engine).items()}
    adapters = {name: p.detach().double() for name, p in engine.adapters.parameters().items()}
    for name in engine.adapters.layers:
        product = adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
        weights[f"{name}.weight"] += ALPHA / RANK * product
    return weights


def log_probs(actor):
    return compute_log_prob(actor.engine, make_batch(), actor.limits, 1.0)


@pytest.mark.parametrize(
    "variant",
    [
        [],
        ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
        ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
    ],
)
@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_the_gradient_of_an_adapter_is_the_chain_rule_of_the_matrixs(model_path, tmp_path, variant):
    """dL/dB = alpha/r dL/dW A^T and dL/dA = alpha/r B^T dL/dW, W the merged matrix of a whole model."""
    actor = lora_actor(model_path, *variant)
    save_hf(actor.engine, tmp_path, None, model_path)
    plain = make_actor(make_config(str(tmp_path)))
    metrics, (of_matrices,) = gradients_of(plain.engine, lambda: plain.update_policy(make_batch()))
    lora_metrics, (of_adapters,) = gradients_of(actor.engine, lambda: actor.update_policy(make_batch()))
    expected = {}
    for name, parameter in actor.engine.adapters.parameters().items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        gradient = of_matrices[f"model.{module}.weight"]
        other = actor.engine.adapters.parameters()[
            f"{module}.{'lora_A' if part == 'lora_B' else 'lora_B'}.weight"
        ].detach()
        by_rule = gradient @ other.T if part == "lora_B" else other.T @ gradient
        expected[f"model.{module}.{part}.default.weight"] = ALPHA / RANK * by_rule
        assert by_rule.shape == parameter.shape
    assert_same_gradients(of_adapters, expected, tolerance=1e-4)
    assert lora_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-4)


@pytest.mark.parametrize("model_path", ["qwen3", "gemma3"], indirect=True)
def test_the_weight_stream_is_base_plus_the_scaled_product_under_plain_names(model_path):
    actor = lora_actor(model_path)
    before = base_weights(actor.engine)
    expected = merged_by_hand(actor.engine)
    stream = dict(actor.engine.weights())
    assert list(stream) == [n for n, _ in AutoModelForCausalLM.from_pretrained(model_path).named_parameters()]
    for name, tensor in stream.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base_weights(actor.engine).items())


@pytest.mark.parametrize("tied", [True, False])
def test_the_hugging_face_folder_is_the_merged_model(tmp_path, tied):
    base = write_model(tmp_path / "base", tied)
    actor = lora_actor(base)
    save_hf(actor.engine, tmp_path / "hf", None, base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = merged_by_hand(actor.engine)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
    started = make_actor(make_config(str(tmp_path / "hf")))
    torch.testing.assert_close(log_probs(started), log_probs(actor), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rule_10_a_resumed_adapter_takes_bitwise_the_same_steps(model_path, tmp_path, optimizer):
    settings = f"actor_rollout_ref.actor.optim.name={optimizer}"
    actor, resumed = (lora_actor(model_path, settings) for _ in range(2))
    actor.update_policy(make_batch(seed=1))
    save(actor.engine, tmp_path)
    resumed.update_policy(make_batch(seed=99))
    resumed.engine.load(tmp_path)
    assert actor.update_policy(make_batch(seed=2)) == resumed.update_policy(make_batch(seed=2))
    expected = dict(actor.engine.weights())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.engine.weights())


def test_the_adapter_folder_is_one_that_peft_reads_and_a_run_goes_on_from(model_path, tmp_path):
    from peft import PeftModel  # here, since its import takes seconds in each process of the tests

    actor = lora_actor(model_path)
    save(actor.engine, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_path)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    expected = merged_by_hand(actor.engine)
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
    path = f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'adapter'}"
    going_on = make_actor(make_config(model_path, path))  # rank and alpha are the adapter's own
    assert torch.equal(log_probs(going_on), log_probs(actor))
    assert all(p.requires_grad for p in going_on.engine.adapters.parameters().values())


def test_adapters_of_a_bf16_base_are_float32(model_path):
    policy = load_policy({"path": model_path, "lora_rank": 2}, torch.bfloat16)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    actor = lora_actor(
        model_path,
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
    )
    before = log_probs(actor)
    metrics = actor.update_policy(make_batch())
    assert metrics["actor/num_skipped_updates"] == 0 and not torch.equal(log_probs(actor), before)
    assert {tensor.dtype for _, tensor in actor.engine.weights()} == {torch.bfloat16}


def test_a_critic_trains_adapters_and_its_head(model_path, tmp_path):
    critic, resumed = (
        make_critic(make_config(model_path, f"critic.model.lora_rank={RANK}")) for _ in range(2)
    )
    trained = {name for name, p in critic.engine.module.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"value_head.weight", "value_head.bias"}
    critic.update_critic(make_batch(seed=1))
    save(critic.engine, tmp_path)
    resumed.engine.load(tmp_path)
    assert critic.update_critic(make_batch(seed=2)) == resumed.update_critic(make_batch(seed=2))
    assert load_value_model({"path": model_path}, torch.float32).adapters is None


def test_mistakes_are_refused_in_words(model_path, tmp_path):
    def refuse(match, **keys):
        with pytest.raises(ValueError, match=match):
            load_policy({"path": model_path} | keys, torch.float32)

    refuse(
        "no linear layer is named qproj.*some of: down_proj", lora_rank=2, target_modules=["qproj", "v_proj"]
    )
    refuse("not found in the base model.*all-linear", lora_rank=2, target_modules=["qproj"])
    refuse("lm_head would get an adapter beyond", lora_rank=2, target_modules=["lm_head", "v_proj"])
    refuse("no linear layer is named embed_tokens", lora_rank=2, target_modules=["embed_tokens"])
    refuse("has no adapter_config.json and no adapter_model", lora_adapter_path=str(tmp_path))

    GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path / "gpt2")
    refuse("is no linear layer", path=str(tmp_path / "gpt2"), lora_rank=2)  # its matrices are transposed
    save(lora_actor(model_path).engine, tmp_path)
    folder = tmp_path / "adapter"
    refuse(f"lora_rank=8, but the adapter in .* has rank {RANK}", lora_adapter_path=str(folder), lora_rank=8)
    settings = json.loads((folder / "adapter_config.json").read_text())
    for changes, match in (
        ({"use_dora": True}, "beyond plain LoRA"),
        ({"modules_to_save": ["norm"]}, "also trains .*norm"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"peft_type": "IA3"}, "adapter of type IA3; expected LORA"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
        refuse(match, lora_adapter_path=str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(RANK, 5)}, folder / "adapter_model.safetensors")
    refuse(r"1 tensors are missing, unknown or of another shape", lora_adapter_path=str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    refuse("can't be read", lora_adapter_path=str(folder))

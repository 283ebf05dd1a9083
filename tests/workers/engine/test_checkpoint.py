"""Checkpoints: a run that goes on from one is bit by bit the undisturbed run; Hugging Face folders are
usable.
"""

import pytest
import torch
from safetensors import safe_open
from tiny_training import make_actor, make_batch, make_config, make_critic, save, save_hf, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import replace_values


def scheduled_config(model_path, *overrides):
    """A configuration with a cosine schedule of 6 steps; a run sets the number of its steps there."""
    optim = "actor_rollout_ref.actor.optim"
    config = make_config(model_path, f"{optim}.warmup_style=cosine", f"{optim}.lr_warmup_steps=2", *overrides)
    return replace_values(config, {f"{optim}.total_training_steps": 6})


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_rule_10_a_resumed_actor_takes_bitwise_the_same_steps(tmp_path, tied, steps_before):
    config = scheduled_config(write_model(tmp_path / "model", tied))
    actor = make_actor(config)
    for seed in range(steps_before):
        actor.update_policy(make_batch(seed=seed))
    save(actor.engine, tmp_path / "saved")
    going_on = [actor.update_policy(make_batch(seed=seed)) for seed in (7, 8)]

    resumed = make_actor(config)
    resumed.update_policy(make_batch(seed=99))  # state that loading has to replace
    resumed.engine.load(tmp_path / "saved")
    assert [resumed.update_policy(make_batch(seed=seed)) for seed in (7, 8)] == going_on
    expected = weights(actor.engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed.engine).items())
    assert resumed.engine.weights_version == actor.engine.weights_version


def test_rule_10_a_resumed_critic_takes_bitwise_the_same_steps(tmp_path, model_path):
    critic, resumed = (make_critic(make_config(model_path)) for _ in range(2))
    critic.update_critic(make_batch(seed=1))
    save(critic.engine, tmp_path)
    resumed.engine.load(tmp_path)
    assert critic.update_critic(make_batch(seed=2)) == resumed.update_critic(make_batch(seed=2))
    expected = weights(critic.engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed.engine).items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_takes_its_settings_from_the_configuration_and_its_state_from_the_checkpoint(
    model_path, tmp_path, optimizer
):
    def actor_with(lr, betas, weight_decay):
        values = f"lr={lr}", f"betas={betas}", f"weight_decay={weight_decay}", f"name={optimizer}"
        overrides = [f"actor_rollout_ref.actor.optim.{value}" for value in values]
        return make_actor(scheduled_config(model_path, *overrides))

    actor = actor_with(0.01, [0.9, 0.999], 0.01)
    resumed = actor_with(0.002, [0.8, 0.95], 0.1)
    for seed in range(3):
        actor.update_policy(make_batch(seed=seed))
    save(actor.engine, tmp_path)
    resumed.engine.load(tmp_path)
    assert resumed.engine.num_training_steps == 3
    assert resumed.engine.lr == pytest.approx(actor.engine.lr / 5)
    assert resumed.engine.lr == resumed.engine.optimizer.param_groups[0]["lr"]
    for group in resumed.engine.optimizer.param_groups:
        assert group["weight_decay"] == 0.1 and group.get("betas", (0.8, 0.95)) == (0.8, 0.95)
    pairs = zip(actor.engine.optimizer.state.values(), resumed.engine.optimizer.state.values(), strict=True)
    for saved, loaded in pairs:
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path, model_path):
    engine = make_actor(make_config(model_path)).engine
    with pytest.raises(ValueError, match="has no dcp/.metadata and no schedule.pt"):
        engine.load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_the_hugging_face_folder_is_the_trained_model_under_plain_names(tmp_path, tied):
    base = write_model(tmp_path / "base", tied)
    actor = make_actor(make_config(base))
    actor.update_policy(make_batch())
    tokenizer = AutoTokenizer.from_pretrained(base)
    save_hf(actor.engine, tmp_path / "hf", tokenizer, base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")  # with any attention
    expected = weights(actor.engine)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected[f"model.{name}"])
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied  # noqa: SIM118
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("5 6")["input_ids"] == [5, 6]
    assert (tmp_path / "hf" / "prompt_template.txt").read_text() == "Question: {question}\n"

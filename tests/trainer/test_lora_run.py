"""A whole run with LoRA: the reference moves with the policy, a second start goes on, the model is usable."""

import pytest
from small_runs import arguments, metrics
from transformers import AutoModelForCausalLM

from verl.trainer.main_ppo import run

LORA = {
    "actor_rollout_ref__model__lora_rank": 4,
    "actor_rollout_ref__actor__optim__lr": 1e-2,
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__ref__reset_every": 2,
    "trainer__seed": 3,
    "trainer__val_before_train": False,
}


@pytest.mark.slow
def test_rule_10_a_lora_run_whose_reference_is_reset_goes_on_with_the_same_numbers(world, url, tmp_path):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run(arguments(world, url, whole, **LORA, trainer__total_training_steps=4)) == 0
    for steps in (3, 4):
        assert run(arguments(world, url, parts, **LORA, trainer__total_training_steps=steps)) == 0
    figures = [
        [{name: value for name, value in step.items() if name.startswith("actor/")} for step in steps]
        for steps in ([row for row in metrics(folder) if "actor/kl_loss" in row] for folder in (whole, parts))
    ]
    assert figures[0] == figures[1]
    kl = [step["actor/kl_loss"] for step in figures[0]]
    assert kl[0] == kl[2] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    assert kl[1] > 1e-4 and kl[3] > 1e-4
    AutoModelForCausalLM.from_pretrained(parts / "global_step_4" / "actor" / "huggingface")

"""The critic: values where tokens were sampled, and the same loss for every split."""

import pytest
import torch
from tiny_training import assert_same_gradients, gradients_of, make_batch, make_config, make_critic
from transformers import AutoModel

from verl.trainer.ppo.core_algos import compute_value_loss


def update(model_path, batch, *overrides):
    critic = make_critic(make_config(model_path, "critic.ppo_mini_batch_size=8", *overrides))
    return gradients_of(critic.engine, lambda: critic.update_critic(batch))


def reference_values(critic, model_path, batch):
    """Values by Hugging Face's eager attention, row by row: of the state before each response token."""
    backbone = AutoModel.from_pretrained(model_path, attn_implementation="eager")
    head = torch.nn.Linear(16, 1)
    head.load_state_dict(critic.engine.module.value_head.state_dict())
    mask = batch.batch["response_mask"]
    rows = []
    for ids, attention in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True):
        values = head(backbone(ids[attention.bool()][None]).last_hidden_state)[0, :-1, 0]
        response = int(attention[-mask.shape[1] :].sum())
        rows.append(torch.nn.functional.pad(values[-response:], (0, mask.shape[1] - response)))
    return backbone, head, torch.stack(rows) * mask


def test_values_are_of_the_state_before_each_sampled_token(model_path):
    critic = make_critic(make_config(model_path))
    batch = make_batch()
    values = critic.compute_values(batch)
    torch.testing.assert_close(values, reference_values(critic, model_path, batch)[2], rtol=1e-4, atol=1e-6)
    assert values[batch.batch["response_mask"] == 0].abs().max() == 0 and values.abs().max() > 0


def test_the_gradient_equals_autograd_of_the_clipped_loss(model_path):
    batch = make_batch()
    metrics, recorded = update(model_path, batch, "critic.ppo_micro_batch_size=3")
    critic = make_critic(make_config(model_path))
    backbone, head, values = reference_values(critic, model_path, batch)
    tensors = batch.batch
    loss, clip_fraction = compute_value_loss(
        values, tensors["returns"], tensors["values"], tensors["response_mask"], 0.5
    )
    loss.backward()
    expected = {f"model.{name}": p.grad for name, p in backbone.named_parameters()}
    expected |= {f"value_head.{name}": p.grad for name, p in head.named_parameters()}
    assert_same_gradients(recorded[0], expected, tolerance=2e-5)
    assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clip_fraction.item(), rel=1e-5)


@pytest.mark.parametrize(
    "split",
    [
        ["critic.ppo_micro_batch_size=1"],
        ["actor_rollout_ref.actor.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=25"],
        ["actor_rollout_ref.model.use_remove_padding=false"],
    ],
)
def test_rule_5_critic_loss_and_gradient_are_the_same_for_every_split(model_path, split):
    metrics, recorded = update(model_path, make_batch())
    split_metrics, split_recorded = update(model_path, make_batch(), *split)
    assert_same_gradients(split_recorded[0], recorded[0])
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-8)


def test_rule_3_only_states_before_sampled_tokens_take_part_bit_by_bit(model_path):
    dirty = make_batch(pad_id=9)
    for key in ("values", "returns"):
        dirty.batch[key][dirty.batch["response_mask"] == 0] = float("nan")
    (metrics, recorded), (dirty_metrics, dirty_recorded) = (
        update(model_path, b) for b in (make_batch(), dirty)
    )
    assert metrics == dirty_metrics
    assert all(torch.equal(dirty_recorded[0][name], recorded[0][name]) for name in recorded[0])

"""`rollout_corr/*`: against a plain loop, over ranks, and where the actor measures them."""

import math

import pytest
import torch
from tiny_training import make_actor, make_batch, make_config

from verl.algos.rollout_correction import rollout_agreement
from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine.update_loop import MicroBatchLimits

ALL_ROWS = MicroBatchLimits(None, None, padded=False)


def plain_loop(rollout, trainer, mask):
    """The definitions, token by token in float64."""
    pairs = [
        [(q, p) for q, p, m in zip(*row, strict=True) if m]
        for row in zip(rollout.double().tolist(), trainer.double().tolist(), mask.tolist(), strict=True)
    ]
    sequences = [row for row in pairs if row]
    tokens = [pair for row in sequences for pair in row]

    def mean(values):
        values = list(values)
        return math.fsum(values) / len(values)

    def log_ppl(row, which):
        return -mean(pair[which] for pair in row)

    gaps = [log_ppl(row, 1) - log_ppl(row, 0) for row in sequences]
    return {
        "log_prob_diff_mean": mean(abs(q - p) for q, p in tokens),
        "log_prob_diff_max": max(abs(q - p) for q, p in tokens),
        "kl": mean(q - p for q, p in tokens),
        "k3_kl": mean(math.exp(p - q) - (p - q) - 1 for q, p in tokens),
        "chi2_token": mean(math.exp(min(p - q, 20)) ** 2 for q, p in tokens) - 1,
        "chi2_seq": mean(math.exp(min(sum(p - q for q, p in row), 20)) ** 2 for row in sequences) - 1,
        "training_ppl": mean(math.exp(log_ppl(row, 1)) for row in sequences),
        "training_log_ppl": mean(log_ppl(row, 1) for row in sequences),
        "rollout_ppl": mean(math.exp(log_ppl(row, 0)) for row in sequences),
        "rollout_log_ppl": mean(log_ppl(row, 0) for row in sequences),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": mean(map(abs, gaps)),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean(map(math.exp, gaps)),
    }


def random_log_probs(num_rows=9, width=7, noise=0.3):
    """(rollout, trainer, mask): row 4 sampled nothing, and what is masked is NaN."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(num_rows, width, generator=generator) < 0.6
    mask[4] = False
    rollout = -torch.rand(num_rows, width, generator=generator) * 4
    trainer = rollout + noise * torch.randn(num_rows, width, generator=generator)
    return *(x.masked_fill(~mask, math.nan) for x in (rollout, trainer)), mask


def test_the_figures_equal_a_plain_loop():
    data = random_log_probs()
    expected = {f"rollout_corr/{name}": value for name, value in plain_loop(*data).items()}
    assert rollout_agreement(*data) == pytest.approx(expected, rel=1e-12)


def test_ranks_together_have_the_figures_of_one_and_one_may_be_empty():
    rollout, trainer, mask = random_log_probs()
    parts = [(rollout[a:b], trainer[a:b], mask[a:b]) for a, b in ((0, 4), (4, 5), (5, 9), (9, 9))]
    sent: dict[str, list[list[float]]] = {"sum": [], "max": []}
    for part in parts:
        rollout_agreement(*part, lambda values, op: (sent[op].append(list(values)), [1.0] * len(values))[1])
    together = {
        "sum": [sum(column) for column in zip(*sent["sum"], strict=True)],
        "max": [max(column) for column in zip(*sent["max"], strict=True)],
    }
    expected = rollout_agreement(rollout, trainer, mask)
    for part in parts:  # each rank gets the same, the one without tokens too
        assert rollout_agreement(*part, lambda values, op: together[op]) == pytest.approx(expected, rel=1e-12)


SPLITS = {
    "one pass": [],
    "rows of 1": ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
    "padded": ["actor_rollout_ref.model.use_remove_padding=false"],
}


@pytest.mark.parametrize("bypass_mode", [False, True])
def test_the_update_reports_them_from_its_own_forward_pass_where_nobody_has_yet(model_path, bypass_mode):
    """With one optimizer step nobody computes old_log_probs, and in bypass mode they are the engine's: the
    update's own pass is compared, no other.
    """
    batch = make_batch()
    mask = batch.batch["response_mask"].bool()
    trainer = compute_log_prob(make_actor(make_config(model_path)).engine, batch, ALL_ROWS, 1.0)
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)) * 0.1
    batch.batch["rollout_log_probs"] = torch.where(mask, trainer + noise, math.nan)
    expected = plain_loop(batch.batch["rollout_log_probs"], trainer, mask)
    batch.batch["old_log_probs"] = trainer
    given = make_actor(make_config(model_path)).update_policy(batch)
    assert not [name for name in given if name.startswith("rollout_corr/")]  # the driver has compared them
    if bypass_mode:
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        batch.meta_info["bypass_mode"] = True
    else:
        batch.batch.pop("old_log_probs")
    for split in SPLITS.values():
        actor = make_actor(make_config(model_path, *split))
        passes = []
        actor.engine.module.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        own = actor.update_policy(batch)
        assert len(passes) == (7 if "size_per_gpu" in str(split) else 1)  # of 8 rows one sampled nothing
        for name, value in expected.items():
            assert own[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name

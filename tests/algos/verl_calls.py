"""Calls of verl's core_algos with verl's keywords, which run on verl and on this project alike.

`verl_numbers.json` holds what they return with verl 0.9.1 (verl/trainer/ppo/core_algos.py of the wheel on
PyPI). With verl's package and what it imports on PYTHONPATH, before this project:

    python tests/algos/verl_calls.py tests/algos/verl_numbers.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.trainer.ppo import core_algos as algos


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


REWARDS = table([0, 0, 0, 1], [0, 0.25, 0, 0], [0, 0, 0.5, 0], [0, 0, 2, 0], [0, 0, 0.75, 0])
MASK = table([1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0], [0, 1, 1, 0])
WITHOUT_GAPS = table([1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0])
OLD = table(
    [-1.0, -0.7, -0.2, -2.0],
    [-0.5, -1.5, -0.3, -1.0],
    [-0.4, -0.1, -0.8, -1.0],
    [-0.9, -0.3, -1.1, -0.2],
    [-0.6, -0.2, -1.3, -0.4],
)
NEW = table(
    [-0.8, -0.9, -0.1, -1.0],
    [-0.9, -0.6, -0.3, -2.5],
    [-0.5, -0.1, -0.6, -1.0],
    [-1.0, -0.2, -1.2, -0.2],
    [-0.6, -0.4, -1.1, -0.4],
)
ADVANTAGES = table(
    [2.0, -1.5, 0.5, 1.0],
    [1.0, 1.0, -1.0, -2.0],
    [0.5, 0.2, -0.3, 0.1],
    [-0.7, -0.7, -0.7, -0.7],
    [0.9, 0.9, 0.9, 0.9],
)
UIDS = np.array(["a", "a", "a", "b", "c"], dtype=object)
GLOBAL_BATCH = {"dp_size": 2, "batch_num_tokens": 30, "global_batch_size": 6, "loss_scale_factor": 5}
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "dro", "cispo")
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
GATE = {"tau_pos": 1.0, "tau_neg": 1.05}
COVARIANCE = {"clip_cov_ratio": 1.0, "clip_cov_lb": -0.5, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.3}
OF_LOSS = COVARIANCE | {"ppo_kl_coef": 1.0, "dro_beta": 0.5}


class Block(dict[str, Any]):
    """A configuration that is read by attributes and by keys."""

    __getattr__ = dict.__getitem__


ACTOR = Block(**CLIP, **GATE, policy_loss=Block(**OF_LOSS), global_batch_info=GLOBAL_BATCH)
ALGORITHM = Block(gamma=0.9, norm_adv_by_std_in_grpo=False)


def numbers(*results: Tensor) -> list[float]:
    return [round(float(value), 8) for result in results for value in result.detach().flatten()]


def aggregated() -> dict[str, list[float]]:
    """Return the results of agg_loss and compute_value_loss."""
    results = {}
    for mode in MODES:
        loss = algos.agg_loss(loss_mat=NEW.abs() + 0.1, loss_mask=MASK, loss_agg_mode=mode, **GLOBAL_BATCH)
        value_loss = algos.compute_value_loss(
            vpreds=NEW,
            returns=REWARDS,
            values=OLD,
            response_mask=MASK,
            cliprange_value=0.1,
            loss_agg_mode=mode,
            **GLOBAL_BATCH,
        )
        results[f"agg_loss {mode}"] = numbers(loss)
        results[f"compute_value_loss {mode}"] = numbers(*value_loss)
    return results


def losses(actor: Any) -> dict[str, list[float]]:
    """Return losses and gradients by their names, with the default aggregation and with a given one."""
    results = {}
    cases = [(name, {}) for name in LOSSES]
    # verl's sapo ignores the given aggregation
    cases += [(name, {"loss_agg_mode": "seq-mean-token-sum-norm"}) for name in LOSSES if name != "sapo"]
    for name, mode in cases:
        log_prob = NEW.clone().requires_grad_()
        loss, _ = algos.get_policy_loss_fn(name)(
            old_log_prob=OLD,
            log_prob=log_prob * 1,
            advantages=ADVANTAGES,
            response_mask=MASK,
            config=actor,
            rollout_is_weights=0.5 + MASK * OLD.exp(),
            **mode,
        )
        loss.backward()
        assert log_prob.grad is not None
        results[" ".join([name, *mode.values()])] = numbers(loss, log_prob.grad)
    loss, metrics = algos.compute_policy_loss_reinforce(
        rollout_log_prob=OLD,
        log_prob=NEW,
        advantages=ADVANTAGES,
        response_mask=MASK,
        config=actor,
        rollout_is_weights=MASK * 0.7,
    )
    results["compute_policy_loss_reinforce"] = numbers(loss, torch.as_tensor(metrics["actor/ppo_kl"]))
    return results


def estimated() -> dict[str, list[float]]:
    """Return advantages, and returns where they differ, from all that verl's trainer passes."""
    results = {}
    shared = {"response_mask": MASK, "index": UIDS, "config": ALGORITHM}
    baselines = table([0.1, 0.2, 0.3, 0.4, 0.5])[0]
    names = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opo", "rloo_vectorized")
    for name in names:
        advantages, returns = algos.get_adv_estimator_fn(name)(
            token_level_rewards=REWARDS * MASK, reward_baselines=baselines, **shared
        )
        results[name] = numbers(advantages * MASK, returns * MASK)
    for name in ("grpo", "grpo_vectorized"):
        advantages, _ = algos.get_adv_estimator_fn(name)(
            token_level_rewards=REWARDS * MASK, epsilon=0.1, norm_adv_by_std_in_grpo=True, **shared
        )
        results[name] = numbers(advantages)
    group = {"token_level_rewards": (REWARDS * MASK)[:3], "response_mask": MASK[:3], "index": UIDS[:3]}
    advantages, _ = algos.compute_grpo_passk_outcome_advantage(**group, config=ALGORITHM)
    results["grpo_passk"] = numbers(advantages)
    masks = {"optimal_token_baseline": WITHOUT_GAPS, "tir_optimal_token_baseline": MASK}
    for name, mask in masks.items():
        for handle_zero_tail in (True, False):
            advantages, _ = algos.get_adv_estimator_fn(name)(
                token_level_rewards=REWARDS * mask,
                response_mask=mask,
                index=UIDS,
                old_log_probs=OLD,
                sum_pi_squared=OLD.exp() ** 2 + 0.1,
                rollout_is_weights=mask * 0.7,
                handle_zero_tail=handle_zero_tail,
                epsilon=0.05 if handle_zero_tail else 0.0,
            )
            results[f"{name} {handle_zero_tail}"] = numbers(advantages)
    return results


def others() -> dict[str, list[float]]:
    """Return rewards with a KL penalty, and the estimators of the KL."""
    rewards = algos.compute_rewards(
        token_level_scores=REWARDS, old_log_prob=OLD, ref_log_prob=NEW, kl_ratio=0.3
    )
    results = {"compute_rewards": numbers(rewards)}
    for name in ("k1", "abs", "k2", "k3"):
        value = algos.kl_penalty_forward(logprob=NEW, ref_logprob=OLD, kl_penalty=name)
        results[f"kl_penalty_forward {name}"] = numbers(value)
    return results


def compute(actor: Any) -> dict[str, list[float]]:
    return aggregated() | losses(actor) | estimated() | others()


if __name__ == "__main__":
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig  # verl's own

    of_verl = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**OF_LOSS),
        **CLIP,
        **GATE,
    )
    of_verl.global_batch_info.update(GLOBAL_BATCH)
    with open(sys.argv[1], "w") as file:
        json.dump(compute(of_verl), file)
        file.write("\n")

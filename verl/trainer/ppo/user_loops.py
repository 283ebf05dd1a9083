"""The functions of verl's ray_trainer.py for training loops that users write themselves.

The trainer of this project uses `scoring.add_advantages` instead, which does more.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import Tensor

from verl.algos import kl_and_entropy
from verl.algos.advantages import AdvantageInputs, compute_pf_ppo_reweight_data, estimate_advantages
from verl.algos.group_estimators import compute_gdpo_outcome_advantage
from verl.algos.kl_and_entropy import FixedKLController
from verl.algos.registry import config_value, plain_name
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import ESTIMATOR_COLUMNS


def compute_response_mask(data: DataProto) -> Tensor:
    """Return the columns of attention_mask that stand over the responses, [N, R].

    It is 1 on observations too; the batches of this project have a response_mask that is not.
    """
    tensors = data.tensors
    return tensors["attention_mask"][:, -tensors["responses"].shape[1] :]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: FixedKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Write token_level_rewards as `kl_and_entropy.apply_kl_penalty` does, and return what verl returns.

    Returns:
        The same batch, and the metrics actor/reward_kl_penalty and actor/reward_kl_penalty_coeff.
    """
    metrics = kl_and_entropy.apply_kl_penalty(data, kl_ctrl, kl_penalty)
    return data, {
        "actor/reward_kl_penalty": metrics["critic/kl"],
        "actor/reward_kl_penalty_coeff": metrics["critic/kl_coeff"],
    }


def compute_advantage(
    data: DataProto,
    adv_estimator: str | Enum,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Add advantages and returns to a batch, as verl's function of this name does.

    The batch must have token_level_rewards and what the estimator needs (uid, values, ...). `num_repeat` has
    no effect, as in verl. gdpo takes its rewards from `data.non_tensor_batch`, by `config`. With gae and
    config.use_pf_ppo the rows that come back are drawn by `compute_pf_ppo_reweight_data`.
    """
    tensors = data.tensors
    if "response_mask" not in tensors:
        tensors["response_mask"] = compute_response_mask(data)
    if plain_name(adv_estimator) == "gdpo":
        tensors["advantages"], tensors["returns"] = compute_gdpo_outcome_advantage(
            tensors["token_level_rewards"],
            tensors["response_mask"],
            data.non_tensor_batch["uid"],
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
            config=config,
            non_tensor_batch=data.non_tensor_batch,
        )
        return data
    inputs = AdvantageInputs(
        tensors["token_level_rewards"],
        tensors["response_mask"],
        data.non_tensor_batch.get("uid"),
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
        **{name: tensors[name] for name in ESTIMATOR_COLUMNS if name in tensors},
    )
    tensors["advantages"], tensors["returns"] = estimate_advantages(adv_estimator, inputs)
    if plain_name(adv_estimator) == "gae" and config is not None:
        label = "compute_advantage"
        if config_value(config, "use_pf_ppo", label, False):
            settings = config_value(config, "pf_ppo", label)
            method = config_value(settings, "reweight_method", label)
            return compute_pf_ppo_reweight_data(data, method, config_value(settings, "weight_pow", label))
    return data

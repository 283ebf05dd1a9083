"""Mistakes in the settings of estimator and data selection; called by `validation.py`.

Which passes an estimator needs is asked of `Passes`, so that an estimator of the user's own is checked like
ours.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl.trainer.ppo.passes import Passes

_FILTER = "algorithm.filter_groups"
_POOLS = "data.difficulty_pools"


def check_algorithm(config: DictConfig, passes: Passes) -> None:
    """What the keys of `algorithm` and of data selection mean for one another.

    Raises:
        ValueError: the first contradiction.
    """
    _check_estimator(config, passes)
    _check_penalties(config)
    _check_filter(config, passes)
    _check_teacher(config, passes)
    _check_pools(config)


def _check_estimator(config: DictConfig, passes: Passes) -> None:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    name, group = algorithm.adv_estimator, rollout.n * rollout.n_agent
    if name in ("rloo", "grpo_passk") and group < 2 and not config.trainer.val_only:
        raise ValueError(
            f"Found a group of 1 with algorithm.adv_estimator={name}, which compares the answers to one "
            "question; expected at least 2. Set actor_rollout_ref.rollout.n_agent, for example to 5."
        )
    if passes.greedy_rollouts and not rollout.do_sample:
        raise ValueError(
            f"Found actor_rollout_ref.rollout.do_sample=false with algorithm.adv_estimator={name}, which "
            "compares with the greedy answer: they would all be the same; expected do_sample=true."
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    takes_components = "reward_components" in passes.estimator_inputs
    if takes_components != bool(keys):
        raise ValueError(
            f"Found algorithm.gdpo_reward_keys={keys} with algorithm.adv_estimator={name}; expected the "
            "names of the rewards for gdpo, for example [score,format] of a reward function that returns "
            "both, and null for every other estimator."
        )
    if weights is not None and len(weights) != len(keys or ()):
        raise ValueError(
            f"Found algorithm.gdpo_reward_weights={weights} for gdpo_reward_keys={keys}; expected a number "
            "for each key, or null for 1 each."
        )
    if algorithm.turn_credit and not config.do_search:
        raise ValueError(
            f"Found algorithm.turn_credit={algorithm.turn_credit} with do_search=false, where a trajectory "
            "is a single turn; expected 0."
        )


def _check_penalties(config: DictConfig) -> None:
    """Rewards that an estimator does not read, or can't take as they are."""
    algorithm, reward = config.algorithm, config.reward_model
    kl_in_reward = not config.actor_rollout_ref.actor.use_kl_loss and algorithm.kl_ctrl.kl_coef > 0
    taken_off = {
        "algorithm.kl_ctrl.kl_coef": algorithm.kl_ctrl.kl_coef if kl_in_reward else 0,
        "reward_model.overlong_buffer.enable": reward.overlong_buffer.enable,
        "reward_model.search_cost": reward.search_cost if algorithm.adv_estimator == "gdpo" else 0,
    }
    reasons = {
        "gdpo": "takes its rewards one by one from gdpo_reward_keys",
        "maxrl": "divides by the mean score, which must not be negative",
    }
    found = [key for key, value in taken_off.items() if value]
    if algorithm.adv_estimator in reasons and found:
        raise ValueError(
            f"Found {found[0]}={taken_off[found[0]]} with algorithm.adv_estimator={algorithm.adv_estimator}, "
            f"which {reasons[algorithm.adv_estimator]}; expected nothing that is taken off the reward. Set "
            "algorithm.kl_ctrl.kl_coef=0 (a KL can be in the loss: actor_rollout_ref.actor.use_kl_loss="
            "true), reward_model.overlong_buffer.enable=false and reward_model.search_cost=0."
        )
    buffer, longest = reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len >= longest:
        raise ValueError(
            f"Found reward_model.overlong_buffer.len={buffer.len} with data.max_response_length={longest}, "
            "so that every last turn would be near its limit; expected less, for example "
            f"{max(1, longest // 4)}."
        )


def _check_filter(config: DictConfig, passes: Passes) -> None:
    groups, rollout = config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    if not groups.enable:
        if groups.metric is not None:
            raise ValueError(
                f"Found {_FILTER}.metric={groups.metric} without {_FILTER}.enable=true; expected both."
            )
        return
    if not passes.compares_group:
        raise ValueError(
            f"Found {_FILTER}.enable=true with algorithm.adv_estimator={config.algorithm.adv_estimator}, "
            "which does not compare the answers to one question: groups with equal rewards teach it as much "
            "as others; expected enable=false, or an estimator such as grpo."
        )
    if rollout.n * rollout.n_agent < 2:
        raise ValueError(
            f"Found {_FILTER}.enable=true with one trajectory a prompt, which differs from no other; "
            "expected a group. Set actor_rollout_ref.rollout.n_agent, for example to 5."
        )
    if groups.metric == "seq_final_reward":
        raise ValueError(
            f"Found {_FILTER}.metric=seq_final_reward, the reward with the KL in it, which is not known when "
            "groups are chosen; expected seq_reward, acc, or a number that the reward function returns."
        )
    if not groups.refill and groups.max_num_gen_batches != DEFAULT_ROUNDS:
        raise ValueError(
            f"Found {_FILTER}.max_num_gen_batches={groups.max_num_gen_batches} with refill=false, where a "
            f"step generates once; expected refill=true, or {DEFAULT_ROUNDS}, its default."
        )


DEFAULT_ROUNDS = 10  # of `algorithm.filter_groups.max_num_gen_batches` in ppo_trainer.yaml


def _check_teacher(config: DictConfig, passes: Passes) -> None:
    path, mode = config.actor_rollout_ref.teacher.path, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if passes.teacher != (path is not None):
        raise ValueError(
            f"Found actor_rollout_ref.teacher.path={path} with actor.policy_loss.loss_mode={mode}; expected "
            "a teacher for a loss that reads its log-probs (distillation), and null for every other."
        )


def _check_pools(config: DictConfig) -> None:
    pools = config.data.difficulty_pools
    if pools.easy_share + pools.hard_share > 1:
        raise ValueError(
            f"Found {_POOLS}.easy_share={pools.easy_share} and hard_share={pools.hard_share}; expected at "
            "most 1 together."
        )
    if pools.hard_threshold >= pools.easy_threshold:
        raise ValueError(
            f"Found {_POOLS}.hard_threshold={pools.hard_threshold} and "
            f"easy_threshold={pools.easy_threshold}; expected the first to be smaller."
        )

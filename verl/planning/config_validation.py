"""Checks of a configuration that only the algorithms, or the models' config.json, can make; and notes.

`validate` makes all checks that come before anything starts: the schema, the keys against each other
(`verl.config`), and the checks of this module. Each mistake is a ValueError that says what was found, what
was expected and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.algos.advantages import is_token_wise
from verl.algos.policy_losses import POLICY_LOSS_REGISTRY, loss_traits
from verl.config import Config, get_value
from verl.config.checks import check_config, check_model, check_vllm_installed
from verl.config.keys import config_error, format_value, keys_of
from verl.config.policy import ACTOR, REF, ROLLOUT
from verl.config.prompt_selection import check_prompt_selection, unread_selection_keys
from verl.planning.passes import Passes
from verl.planning.placement import needs_ray, samples_apart
from verl.workers.megatron import check_installed
from verl.workers.megatron.settings import ModelShape, ParallelSizes

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_ESTIMATOR = "algorithm.adv_estimator"
_TEACHER = "actor_rollout_ref.teacher.path"


def validate(config: Config, *, format_reward: bool = False) -> None:
    """Check a whole configuration; return silently when it can run.

    Args:
        config: the whole configuration.
        format_reward: whether the program is `main_ppo_format`, which reads the format scores.

    Raises:
        ValueError: for the first mistake that is found.
    """
    check_config(config, format_reward=format_reward)
    passes = Passes(config)
    _check_algorithm(config, passes)
    check_prompt_selection(config, passes.compares_group)
    if passes.needs_values:
        check_model("critic.model.path", config.critic.model.path, writes=False)
    if passes.needs_teacher:
        check_model(_TEACHER, config.actor_rollout_ref.teacher.path)
    check_megatron(config, passes)
    if not config.trainer.dry_run:  # the machine that the run is for may have vLLM
        check_vllm_installed(config)


def settings_without_effect(config: Config) -> list[str]:
    """Return a line for each setting without effect, and for an aggregation that the loss is not meant for.

    A setting has no effect if its key is set to something else than its default and has no meaning beside the
    others.
    """
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    unread: dict[str, str] = {}  # key -> reason why it has no effect
    if actor.use_dynamic_bsz:
        reason = f"passes are formed by tokens. Set {ACTOR}.use_dynamic_bsz=false."
        blocks = (f"{ACTOR}.ppo", f"{REF}.log_prob", f"{ROLLOUT}.log_prob", "critic.ppo")
        unread |= {f"{block}_micro_batch_size_per_gpu": reason for block in blocks}
    else:
        reason = f"passes are formed by rows. Set {ACTOR}.use_dynamic_bsz=true."
        unread |= {f"{block}.ppo_max_token_len_per_gpu": reason for block in (ACTOR, "critic")}
    mode = actor.policy_loss.loss_mode
    if ":" not in mode:  # a loss of the user's own may read any of them
        read_by: dict[str, list[str]] = {}
        for name in POLICY_LOSS_REGISTRY:
            for key in loss_traits(name).reads:
                read_by.setdefault(f"{ACTOR}.{key}", []).append(name)
        unread |= {
            key: f"it is for loss_mode {' | '.join(modes)}, not {mode}."
            for key, modes in read_by.items()
            if mode not in modes and key in keys_of(Config)
        }
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        unread[f"{ACTOR}.loss_scale_factor"] = "it is for loss_agg_mode seq-mean-token-sum-norm."
    if actor.strategy == "megatron":
        reason = "megatron-core cuts a model as the megatron block says, and shards no weights."
        unread |= {f"{ACTOR}.fsdp_config.{key}": reason for key in ("fsdp_size", "reshard_after_forward")}
    if not needs_ray(config):
        reason = "the run is one process, and what ends it ends the run. Set trainer.backend=ray."
        unread |= {"trainer.max_restarts": reason, "trainer.restart_timeout": reason}
    if trainer.on_collapse != "rewind":
        unread["trainer.max_rewinds"] = "the run does not go back. Set trainer.on_collapse=rewind."
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "auto" and trainer.device == "cpu":
        reason = f"the native engine has the whole model in each process; {ROLLOUT}.name=vllm splits it."
        unread[f"{ROLLOUT}.tensor_model_parallel_size"] = reason
    transfer = rollout.weight_transfer
    if transfer != "delta":
        unread[f"{ROLLOUT}.anchor_every"] = f"it is for {ROLLOUT}.weight_transfer=delta."
    if transfer in ("ray", "collective") and rollout.name != "remote":
        unread[f"{ROLLOUT}.weight_dir"] = f"no files are written with {ROLLOUT}.weight_transfer={transfer}."
    if transfer != "collective" and rollout.name != "remote":
        reason = f"nothing is broadcast with {ROLLOUT}.weight_transfer={transfer}."
        unread[f"{ROLLOUT}.weight_backend"] = reason
    if not samples_apart(config):
        reason = f"nothing samples beside training. Set {ROLLOUT}.placement=apart."
        names = ("in_flight_updates", "recompute_kv", "too_old", "group_deadline", "repeatable")
        unread |= {f"trainer.async_training.{name}": reason for name in names}
    if config.data.mixture is not None:
        reason = "the rows are those of data.mixture."
        unread |= {"data.train_files": reason, "data.train_data_num": reason}
    unread |= unread_selection_keys(config)
    if config.actor_rollout_ref.rollout.n * config.actor_rollout_ref.rollout.n_agent == 1:
        unread["algorithm.thrift"] = (
            f"{ROLLOUT}.n_agent=1 leaves an answer without others to compare it with."
        )
    lines = [
        f"{key}={format_value(get_value(config, key))} has no effect: {text}"
        for key, text in unread.items()
        if get_value(config, key) != keys_of(Config)[key].default
    ]
    meant_for = None if ":" in mode else loss_traits(mode).meant_for
    if meant_for not in (None, actor.loss_agg_mode):
        lines.append(
            f"{ACTOR}.policy_loss.loss_mode={mode} is meant for {ACTOR}.loss_agg_mode={meant_for}; with "
            f"{actor.loss_agg_mode} its rows have other weights than in the paper."
        )
    return lines


def _check_algorithm(config: Config, passes: Passes) -> None:
    """Check what the keys of `algorithm` mean for one another.

    `Passes` says which passes an estimator needs, so that a user's own estimator is checked like those of
    this project.
    """
    algorithm = config.algorithm
    rollout = config.actor_rollout_ref.rollout
    reward = config.reward_model
    name = algorithm.adv_estimator
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights
    if name in ("rloo", "grpo_passk") and rollout.n * rollout.n_agent < 2 and not config.trainer.val_only:
        raise ValueError(
            f"Found a group of 1 with {_ESTIMATOR}={name}, which compares the answers to one question; "
            f"expected at least 2. Set {ROLLOUT}.n_agent, for example to 5."
        )
    if passes.greedy_rollouts and not rollout.do_sample:
        reason = (
            ", which compares with the greedy answer: they would all be the same; expected do_sample=true."
        )
        raise config_error(config, f"{ROLLOUT}.do_sample {_ESTIMATOR}", reason)
    if ("reward_components" in passes.estimator_inputs) != bool(keys):
        reason = (
            "; expected the names of the rewards for gdpo, for example [score,format] of a reward function "
            "that returns both, and null for every other estimator."
        )
        raise config_error(config, f"algorithm.gdpo_reward_keys {_ESTIMATOR}", reason)
    if weights is not None and len(weights) != len(keys or ()):
        reason = "; expected a number for each key, or null for 1 each."
        raise config_error(config, "algorithm.gdpo_reward_weights algorithm.gdpo_reward_keys", reason)
    if algorithm.turn_credit and not config.do_search:
        reason = ", where a trajectory is a single turn; expected 0."
        raise config_error(config, "algorithm.turn_credit do_search", reason)
    if rollout.step_wise:
        _check_step_wise(config, passes)
    if passes.needs_teacher != (config.actor_rollout_ref.teacher.path is not None):
        reason = "; expected a teacher for a loss that reads its log-probs (distillation), else null."
        raise config_error(config, f"{_TEACHER} {ACTOR}.policy_loss.loss_mode", reason)
    # Some estimators do not read what is taken off the reward, or can't take rewards as they then are.
    kl_in_reward = not config.actor_rollout_ref.actor.use_kl_loss and algorithm.kl_ctrl.kl_coef > 0
    taken_off = ["algorithm.kl_ctrl.kl_coef"] * kl_in_reward
    taken_off += ["reward_model.overlong_buffer.enable"] * reward.overlong_buffer.enable
    taken_off += ["reward_model.search_cost"] * (name == "gdpo" and reward.search_cost > 0)
    reasons = {
        "gdpo": "takes its rewards one by one from gdpo_reward_keys",
        "maxrl": "divides by the mean score, which must not be negative",
    }
    if name in reasons and taken_off:
        reason = (
            f", which {reasons[name]}; expected nothing that is taken off the reward. Set "
            f"algorithm.kl_ctrl.kl_coef=0 (a KL can be in the loss: {ACTOR}.use_kl_loss=true), "
            "reward_model.overlong_buffer.enable=false and reward_model.search_cost=0."
        )
        raise config_error(config, f"{taken_off[0]} {_ESTIMATOR}", reason)


def _check_step_wise(config: Config, passes: Passes) -> None:
    """Refuse with `rollout.step_wise` what is computed over a trajectory's tokens across its turns."""
    algorithm = config.algorithm
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    name = algorithm.adv_estimator
    sums_kl = passes.greedy_rollouts and passes.kl_in_reward
    if is_token_wise(name) or passes.needs_values or sums_kl:
        reason = (
            ", which credits a token with what comes after it, in later turns too; with turns as rows a turn "
            "has the trajectory's outcome alone. Set step_wise=false, or an estimator such as grpo or rloo"
            + (", or algorithm.kl_ctrl.kl_coef=0." if sums_kl else ".")
        )
        raise config_error(config, f"{ROLLOUT}.step_wise {_ESTIMATOR}", reason)
    if loss_mode == "dro_sequence":
        reason = (
            ", which fits the log-ratio of a whole trajectory to its outcome; a turn has only a part of it. "
            "Set step_wise=false, or loss_mode=dro."
        )
        raise config_error(config, f"{ROLLOUT}.step_wise {ACTOR}.policy_loss.loss_mode", reason)


def check_megatron(config: Config, passes: Passes) -> None:
    """Check what `strategy=megatron` needs: the package, enough processes, models that can be cut.

    The processes must be divisible as the sizes ask. Only the configuration and the models' config.json are
    read. What only the worker can see (a model on the hub) is checked there again.
    """
    block = config.actor_rollout_ref
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        for size in SIZES:
            if actor.megatron[size] > 1:
                reason = f"; expected {ACTOR}.strategy=megatron."
                raise config_error(config, f"{ACTOR}.megatron.{size} {ACTOR}.strategy", reason)
        return
    from verl.workers.engine.loading import load_hf_config  # slow to import, and FSDP does without

    check_installed()
    sizes = ParallelSizes(*(actor.megatron[size] for size in SIZES))
    sizes.check(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    models: dict[str, Any] = {"actor_rollout_ref.model.path": block.model}
    if passes.needs_teacher:
        models[_TEACHER] = {"path": block.teacher.path, "trust_remote_code": block.model.trust_remote_code}
    if passes.needs_values:
        models["critic.model.path"] = config.critic.model
    for model in ("actor_rollout_ref.model", *["critic.model"] * passes.needs_values):
        if get_value(config, model).lora_rank > 0 or get_value(config, model).lora_adapter_path is not None:
            reason = ", which trains whole models; expected lora_rank=0 and no adapter, or strategy=fsdp."
            raise config_error(config, f"{model}.lora_rank {ACTOR}.strategy", reason)
    for key, model in models.items():
        if (Path(model["path"] or "") / "config.json").is_file():
            try:
                ModelShape.of(load_hf_config(model)).check(sizes)
            except ValueError as error:
                raise ValueError(
                    f"Found {key}={model['path']}, which can't be cut as asked: {error}"
                ) from error
    if actor.optim.name != "adamw":
        reason = ", whose optimizer is spread over processes without regard to matrices; expected adamw."
        raise config_error(config, f"{ACTOR}.optim.name {ACTOR}.strategy", reason)
    if actor.fsdp_config.model_dtype != "fp32":
        reason = (
            ", whose optimizer keeps the weights in fp32 (beside those that it computes with, of "
            "mixed_precision.param_dtype); expected fp32."
        )
        raise config_error(config, f"{ACTOR}.fsdp_config.model_dtype {ACTOR}.strategy", reason)
    if actor.ulysses_sequence_parallel_size > 1:
        reason = "; expected 1, and megatron.context_parallel_size instead."
        raise config_error(config, f"{ACTOR}.ulysses_sequence_parallel_size {ACTOR}.strategy", reason)

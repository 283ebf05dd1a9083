"""Mistakes in a configuration that only the algorithms, or the models' config.json, can tell; and notes.

`validate` is all that is checked before anything starts: the schema, the keys against each other
(`verl.config`), and what is here. Each mistake is a ValueError with what was found, what was expected and
what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.algos.policy_losses import POLICY_LOSSES, loss_traits
from verl.config import Config, at
from verl.config.checks import check_config, check_model, check_vllm_is_there
from verl.config.keys import keys_of, shown
from verl.config.policy import ACTOR, REF, ROLLOUT
from verl.trainer.ppo.passes import Passes
from verl.workers.megatron import check_installed
from verl.workers.megatron.settings import ModelShape, ParallelSizes

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_FILTER = "algorithm.filter_groups"


def validate(config: Config, *, format_reward: bool = False) -> None:
    """Check a whole configuration; returns silently when it can run.

    format_reward: the program is `main_ppo_format`, which reads the format scores.

    Raises:
        ValueError: the first mistake found.
    """
    check_config(config, format_reward=format_reward)
    passes = Passes.of(config)
    check_algorithm(config, passes)
    _check_batches(config, passes)
    if passes.values:
        check_model("critic.model.path", config.critic.model.path)
    if passes.teacher:
        check_model("actor_rollout_ref.teacher.path", config.actor_rollout_ref.teacher.path)
    check_megatron(config, passes)
    if not config.trainer.dry_run:  # the machine that it is for may have it
        check_vllm_is_there(config)


def settings_without_effect(config: Config) -> list[str]:
    """A line for each key that is set to something else than its default and has no meaning beside the
    others, and for an aggregation that the loss is not meant for.
    """
    defaults = {path: each.default for path, each in keys_of(Config).items()}
    without = {
        **_unread_by_passes(config),
        **_unread_by_loss(config),
        **_unread_on_megatron(config),
        **_unread_without_ray(config),
    }
    if config.actor_rollout_ref.rollout.placement == "colocated":
        without[f"{ROLLOUT}.tensor_model_parallel_size"] = (
            f"each process has an engine with the whole model; {ROLLOUT}.placement=apart splits it."
        )
    lines = [
        f"{key}={shown(at(config, key))} has no effect: {reason}"
        for key, reason in without.items()
        if at(config, key) != defaults[key]
    ]
    return [*lines, *_unusual_aggregation(config)]


def _unread_by_passes(config: Config) -> dict[str, str]:
    """key -> why it does not decide how large a pass is."""
    sizes = {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    }
    budgets = {f"{ACTOR}.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"}
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return dict.fromkeys(sizes, f"passes are formed by tokens. Set {ACTOR}.use_dynamic_bsz=false.")
    return dict.fromkeys(budgets, f"passes are formed by rows. Set {ACTOR}.use_dynamic_bsz=true.")


def _unread_by_loss(config: Config) -> dict[str, str]:
    """key -> why the chosen loss does not read it. A loss of the user's own may read any of them."""
    actor = config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    read_by: dict[str, list[str]] = {}
    for name in () if ":" in mode else POLICY_LOSSES:
        for key in loss_traits(name).reads:
            read_by.setdefault(f"{ACTOR}.{key}", []).append(name)
    unread = {
        key: f"it is for loss_mode {' | '.join(modes)}, not {mode}."
        for key, modes in read_by.items()
        if mode not in modes and key in keys_of(Config)
    }
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        unread[f"{ACTOR}.loss_scale_factor"] = "it is for loss_agg_mode seq-mean-token-sum-norm."
    return unread


def _unusual_aggregation(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    mode = actor.policy_loss.loss_mode
    meant_for = None if ":" in mode else loss_traits(mode).meant_for
    if meant_for not in (None, actor.loss_agg_mode):
        yield (
            f"{ACTOR}.policy_loss.loss_mode={mode} is meant for {ACTOR}.loss_agg_mode={meant_for}; with "
            f"{actor.loss_agg_mode} its rows have other weights than in the paper."
        )


def _unread_on_megatron(config: Config) -> dict[str, str]:
    if not uses_megatron(config):
        return {}
    why = "megatron-core cuts a model as the megatron block says, and shards no weights."
    return {f"{ACTOR}.fsdp_config.{key}": why for key in ("fsdp_size", "reshard_after_forward")}


def _unread_without_ray(config: Config) -> dict[str, str]:
    trainer = config.trainer
    has_one_process = trainer.nnodes * trainer.n_gpus_per_node == 1
    if trainer.backend == "local" or (trainer.backend == "auto" and has_one_process):
        why = "the run is one process without Ray, and what ends it ends the run. Set trainer.backend=ray."
        return dict.fromkeys(("trainer.max_restarts", "trainer.restart_timeout"), why)
    return {}


def _check_batches(config: Config, passes: Passes) -> None:
    rollout = config.actor_rollout_ref.rollout
    group = rollout.n * rollout.n_agent
    rows = config.data.train_batch_size * group
    for name in (ACTOR, "critic") if passes.values else (ACTOR,):
        size = at(config, name).ppo_mini_batch_size
        if size * rollout.n > rows and not config.trainer.val_only:
            raise ValueError(
                f"Found {name}.ppo_mini_batch_size={size} (times rollout.n = {size * rollout.n} "
                f"trajectories), but a step has {rows} (data.train_batch_size={config.data.train_batch_size}"
                f" times a group of {group}); expected at most {rows // rollout.n}."
            )


def check_algorithm(config: Config, passes: Passes) -> None:
    """What the keys of `algorithm` and of data selection mean for one another.

    Which passes an estimator needs is asked of `Passes`, so that one of the user's own is checked like ours.
    """
    _check_estimator(config, passes)
    _check_penalties(config)
    _check_filter(config, passes)
    path, mode = config.actor_rollout_ref.teacher.path, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if passes.teacher != (path is not None):
        raise ValueError(
            f"Found actor_rollout_ref.teacher.path={path} with actor.policy_loss.loss_mode={mode}; expected "
            "a teacher for a loss that reads its log-probs (distillation), and null for every other."
        )


def _check_estimator(config: Config, passes: Passes) -> None:
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


def _check_penalties(config: Config) -> None:
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
    wrong = [key for key, value in taken_off.items() if value]
    if algorithm.adv_estimator in reasons and wrong:
        raise ValueError(
            f"Found {wrong[0]}={taken_off[wrong[0]]} with algorithm.adv_estimator={algorithm.adv_estimator}, "
            f"which {reasons[algorithm.adv_estimator]}; expected nothing that is taken off the reward. Set "
            "algorithm.kl_ctrl.kl_coef=0 (a KL can be in the loss: actor_rollout_ref.actor.use_kl_loss="
            "true), reward_model.overlong_buffer.enable=false and reward_model.search_cost=0."
        )


def _check_filter(config: Config, passes: Passes) -> None:
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


def uses_megatron(config: Config) -> bool:
    """Whether the run trains on megatron-core."""
    return config.actor_rollout_ref.actor.strategy == "megatron"


def check_megatron(config: Config, passes: Passes) -> None:
    """What `strategy=megatron` needs: the package, processes that can be dealt out, models that can be cut.

    Read from the configuration and the models' config.json alone. What only the worker can see (a model on
    the hub) is checked there again.
    """
    group, actor, megatron = (
        config.actor_rollout_ref,
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.actor.megatron,
    )
    if not uses_megatron(config):
        for size in SIZES:
            if megatron[size] > 1:
                raise ValueError(
                    f"Found {ACTOR}.megatron.{size}={megatron[size]} with {ACTOR}.strategy={actor.strategy}; "
                    f"expected {ACTOR}.strategy=megatron."
                )
        return
    check_installed()
    sizes = ParallelSizes(*(megatron[size] for size in SIZES))
    sizes.check(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    models: dict[str, Any] = {"actor_rollout_ref.model.path": group.model}
    if passes.teacher:
        trusted = group.model.trust_remote_code
        models["actor_rollout_ref.teacher.path"] = {"path": group.teacher.path, "trust_remote_code": trusted}
    if passes.values:
        models["critic.model.path"] = config.critic.model
        _check_trained_on_megatron("critic", "critic.model", config)
    _check_trained_on_megatron(ACTOR, "actor_rollout_ref.model", config)
    for key, model in models.items():
        _check_shape(key, model, sizes, megatron.num_layers_per_virtual_pipeline_stage)
    key, dtype = f"{ACTOR}.fsdp_config.model_dtype", actor.fsdp_config.model_dtype
    if dtype != "fp32":
        raise ValueError(
            f"Found {key}={dtype} with {ACTOR}.strategy=megatron, whose optimizer keeps the weights in fp32 "
            "(beside those that it computes with, of mixed_precision.param_dtype); expected fp32."
        )
    if actor.ulysses_sequence_parallel_size > 1:
        raise ValueError(
            f"Found {ACTOR}.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size} with "
            f"{ACTOR}.strategy=megatron; expected 1, and {ACTOR}.megatron.context_parallel_size instead."
        )


def _check_trained_on_megatron(name: str, model_name: str, config: Config) -> None:
    """What a trained model asks for besides."""
    model, optim = at(config, model_name), at(config, name).optim
    if model.lora_rank > 0 or model.lora_adapter_path is not None:
        raise ValueError(
            f"Found {model_name}.lora_rank={model.lora_rank} (or lora_adapter_path) with {ACTOR}.strategy="
            f"megatron, which trains whole models; expected lora_rank=0, or {ACTOR}.strategy=fsdp."
        )
    if optim.name != "adamw":
        raise ValueError(
            f"Found {name}.optim.name={optim.name} with {ACTOR}.strategy=megatron, whose optimizer is spread "
            f"over processes without regard to matrices; expected {name}.optim.name=adamw, or "
            f"{ACTOR}.strategy=fsdp."
        )


def _check_shape(key: str, model: Any, sizes: ParallelSizes, num_layers_per_stage: int | None) -> None:
    """That the heads and layers of a model in a local folder can be dealt out."""
    from verl.workers.engine.loading import load_hf_config  # slow to import, and FSDP does without

    path = model["path"]
    if not (Path(path or "") / "config.json").is_file():
        return
    try:
        ModelShape.of(load_hf_config(model)).check(sizes, num_layers_per_stage)
    except ValueError as error:
        raise ValueError(f"Found {key}={path}, which can't be cut as asked: {error}") from error

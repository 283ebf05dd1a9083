"""What each configuration key may hold: types of nullable keys, choices, ranges. Read by `validation.py`."""

from math import inf
from typing import Any

from verl.trainer.config.keys import ACTOR, REF, ROLLOUT

# Keys that may be null, with the types that they may have otherwise.
NULLABLE: dict[str, tuple[type, ...]] = {
    "data.tokenizer": (str,),
    "data.train_files": (str, list),
    "data.val_files": (str, list),
    "data.extra_val_files": (str, list),
    "data.train_data_num": (int,),
    "data.val_data_num": (int,),
    "actor_rollout_ref.model.path": (str,),
    "actor_rollout_ref.model.external_lib": (str,),
    "actor_rollout_ref.model.lora_adapter_path": (str,),
    **{f"{block}.exclude_modules": (str, list) for block in ("actor_rollout_ref.model", "critic.model")},
    f"{REF}.reset_every": (int,),
    "actor_rollout_ref.teacher.path": (str,),
    **{
        f"{ACTOR}.{key}": (float,)
        for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_scale_factor")
    },
    **{
        f"{block}.optim.{key}": (float,)
        for block in (ACTOR, "critic")
        for key in ("min_lr_ratio", "adamw_lr")
    },
    **{
        f"{block}.{key}": (str,)
        for block in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
        for key in ("mixed_precision.param_dtype", "wrap_policy.transformer_layer_cls_to_wrap")
    },
    f"{REF}.fsdp_config.model_dtype": (str,),
    **{f"{block}.megatron.num_layers_per_virtual_pipeline_stage": (int,) for block in (ACTOR, REF, "critic")},
    **{
        f"{block}.{key}{ending}": (int,)
        for block, key in (
            (ACTOR, "ppo_micro_batch_size"),
            (REF, "log_prob_micro_batch_size"),
            (ROLLOUT, "log_prob_micro_batch_size"),
            ("critic", "ppo_micro_batch_size"),
            ("critic", "forward_micro_batch_size"),
        )
        for ending in ("", "_per_gpu")
    },
    f"{ROLLOUT}.search_delay_steps": (int,),
    f"{ROLLOUT}.kv_cache_gb": (float,),
    f"{ROLLOUT}.max_in_flight": (int,),
    f"{ROLLOUT}.straggler_factor": (float,),
    f"{ROLLOUT}.vllm.python": (str,),
    f"{ROLLOUT}.vllm.server_urls": (str, list),
    "critic.model.path": (str,),
    "critic.model.tokenizer_path": (str,),
    "critic.model.external_lib": (str,),
    "reward_model.model.input_tokenizer": (str,),
    "reward_model.model.path": (str,),
    "reward_model.model.external_lib": (str,),
    "reward_model.max_length": (int,),
    "custom_reward_function.path": (str,),
    "retriever.url": (str, list),
    "retriever.corpus_path": (str,),
    "algorithm.gdpo_reward_keys": (list,),
    "algorithm.gdpo_reward_weights": (list,),
    "algorithm.filter_groups.metric": (str,),
    "algorithm.kl_ctrl.target_kl": (float,),
    "algorithm.kl_ctrl.horizon": (float,),
    f"{ACTOR}.entropy_ctrl.target_entropy": (float,),
    **{
        f"algorithm.rollout_correction.{key}": types
        for key, types in (
            ("rollout_is", (str,)),
            ("rollout_rs", (str,)),
            ("rollout_rs_threshold", (float,)),
            ("rollout_rs_threshold_lower", (float,)),
        )
    },
    "trainer.total_training_steps": (int,),
    "trainer.default_hdfs_dir": (str,),
    "trainer.resume_from_path": (str,),
    "trainer.max_ckpt_to_keep": (int,),
    "trainer.rollout_pool.n_gpus_per_node": (int,),
    "trainer.dry_run_gpu_memory_gb": (float,),
}

# Keys that may be of more types than their default's.
TYPES: dict[str, tuple[type, ...]] = {
    "actor_rollout_ref.model.target_modules": (str, list),
    "critic.model.target_modules": (str, list),
}

_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_DTYPES = ("fp32", "bf16")
_LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
_LOSS_MODES = (
    "vanilla",
    "gspo",
    "geo_mean",
    "sapo",
    "cispo",
    "aipo",
    "ipo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "gpg",
    "importance_sampling",
    "clip_cov",
    "kl_cov",
    "sft",
    "distillation",
)
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gdpo",
    "maxrl",
    "rae",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)

CHOICES: dict[str, tuple[Any, ...]] = {
    "data.truncation": ("error", "left"),
    f"{ACTOR}.strategy": _STRATEGIES,
    "critic.strategy": _STRATEGIES,
    f"{ACTOR}.policy_loss.loss_mode": _LOSS_MODES,
    f"{ACTOR}.loss_agg_mode": (*_LOSS_AGG_MODES, "prompt-mean"),
    "critic.loss_agg_mode": _LOSS_AGG_MODES,
    f"{ACTOR}.kl_loss_type": (*_KL, *(f"{name}+" for name in _KL)),
    f"{ACTOR}.entropy_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": _KL,
    **{
        f"{block}.{key}": choices
        for block in (f"{ACTOR}.optim", "critic.optim")
        for key, choices in (("name", ("adamw", "muon")), ("warmup_style", ("constant", "cosine", "linear")))
    },
    **{f"{block}.model_dtype": _DTYPES for block in (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")},
    f"{REF}.fsdp_config.model_dtype": (*_DTYPES, None),
    **{
        f"{block}.mixed_precision.param_dtype": (*_DTYPES, None)
        for block in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
    },
    **{
        f"{block}.mixed_precision.reduce_dtype": _DTYPES
        for block in (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")
    },
    f"{ROLLOUT}.name": ("native", "vllm"),
    f"{ROLLOUT}.placement": ("colocated", "apart"),
    f"{ROLLOUT}.vllm.weight_transfer": ("auto", "nccl", "gloo", "disk"),
    f"{ROLLOUT}.dtype": ("auto", "bfloat16", "float32"),
    "algorithm.adv_estimator": _ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence", None),
    "algorithm.rollout_correction.rollout_rs": ("token", "geometric", "sequence", None),
    "trainer.backend": ("auto", "local", "ray"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.resume_mode": ("auto", "none", "latest", "from_path"),
    "trainer.progress": ("auto", "live", "plain"),
}

# Of these, an own function may be chosen as well: package.module:function
IMPORTABLE = (f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator")

# key -> (smallest, largest, the same in words); null values are not looked at
_POSITIVE = (1, inf, "a whole number of at least 1")
_NOT_NEGATIVE = (0, inf, "0 or more")
_ABOVE_ZERO = (1e-12, inf, "a number above 0")
_SHARE = (0, 1, "a number from 0 to 1")
RANGES: dict[str, tuple[float, float, str]] = {
    **{
        f"data.{key}": _POSITIVE
        for key in (
            "train_data_num",
            "val_data_num",
            "max_prompt_length",
            "max_response_length",
            "max_start_length",
            "max_obs_length",
            "train_batch_size",
            "val_batch_size",
        )
    },
    **{
        f"{block}.{key}": limits
        for block in (ACTOR, "critic")
        for key, limits in (
            ("ppo_mini_batch_size", _POSITIVE),
            ("ppo_micro_batch_size", _POSITIVE),
            ("ppo_micro_batch_size_per_gpu", _POSITIVE),
            ("ppo_max_token_len_per_gpu", _POSITIVE),
            ("ppo_epochs", _POSITIVE),
            ("ulysses_sequence_parallel_size", _POSITIVE),
            ("grad_clip", _ABOVE_ZERO),
            ("optim.lr", _NOT_NEGATIVE),
            ("optim.lr_warmup_steps", (-1, inf, "-1 or more")),
            ("optim.lr_warmup_steps_ratio", _SHARE),
            ("optim.min_lr_ratio", _SHARE),
            ("optim.total_training_steps", (-1, inf, "-1 or more")),
            ("optim.weight_decay", _NOT_NEGATIVE),
            ("optim.momentum", (0, 1 - 1e-9, "a number from 0 to below 1")),
            ("optim.adamw_lr", _NOT_NEGATIVE),
        )
    },
    f"{ACTOR}.clip_ratio": _SHARE,
    f"{ACTOR}.clip_ratio_low": _SHARE,
    f"{ACTOR}.clip_ratio_high": _NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_c": (1 + 1e-9, inf, "a number above 1, or null"),
    f"{ACTOR}.loss_scale_factor": _ABOVE_ZERO,
    f"{ACTOR}.echo_coeff": _NOT_NEGATIVE,
    **{f"{ACTOR}.{key}": _ABOVE_ZERO for key in ("tau_pos", "tau_neg")},
    **{
        f"{ACTOR}.policy_loss.{key}": limits
        for key, limits in (
            ("clip_cov_ratio", (1e-12, 1, "a number above 0 and at most 1")),
            ("kl_cov_ratio", (1e-12, 1, "a number above 0 and at most 1")),
            ("ppo_kl_coef", _NOT_NEGATIVE),
            ("aipo_max_ratio", _ABOVE_ZERO),
            ("ipo_eps", (0, 1, "a number from 0 to 1")),
            ("ipo_kl_tau", _NOT_NEGATIVE),
            ("dro_beta", _ABOVE_ZERO),
        )
    },
    f"{ACTOR}.entropy_coeff": _NOT_NEGATIVE,
    **{f"{ACTOR}.entropy_ctrl.{key}": _NOT_NEGATIVE for key in ("target_entropy", "min_coeff", "max_coeff")},
    f"{ACTOR}.entropy_ctrl.delta": _ABOVE_ZERO,
    f"{ACTOR}.kl_loss_coef": _NOT_NEGATIVE,
    **{
        f"{block}.{key}": limits
        for block in ("actor_rollout_ref.model", "critic.model")
        for key, limits in (("lora_rank", _NOT_NEGATIVE), ("lora_alpha", _POSITIVE))
    },
    f"{REF}.reset_every": _POSITIVE,
    **{
        f"{block}.fsdp_config.fsdp_size": (-1, inf, "-1 or a number of processes")
        for block in (ACTOR, REF, "critic.model")
    },
    **{
        f"{ACTOR}.megatron.{key}": _POSITIVE
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
    },
    **{
        f"{block}.megatron.num_layers_per_virtual_pipeline_stage": _POSITIVE
        for block in (ACTOR, REF, "critic")
    },
    **{
        f"{block}.{key}": _POSITIVE
        for block in (REF, ROLLOUT)
        for key in (
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_max_token_len_per_gpu",
        )
    },
    f"{ROLLOUT}.temperature": (1e-3, inf, "a number above 0; greedy training rollouts are do_sample=false"),
    f"{ROLLOUT}.top_k": (-1, inf, "-1 (all) or a number of tokens"),
    f"{ROLLOUT}.top_p": (1e-6, 1, "a number above 0 and at most 1"),
    f"{ROLLOUT}.min_p": _SHARE,
    f"{ROLLOUT}.gpu_memory_utilization": (0.01, 1, "a number above 0 and at most 1"),
    f"{ROLLOUT}.kv_cache_gb": _ABOVE_ZERO,
    f"{ROLLOUT}.block_size": _POSITIVE,
    f"{ROLLOUT}.tensor_model_parallel_size": _POSITIVE,
    f"{ROLLOUT}.max_in_flight": _POSITIVE,
    f"{ROLLOUT}.straggler_factor": (1, inf, "a number of at least 1"),
    f"{ROLLOUT}.vllm.sleep_level": (1, 2, "1 (the KV cache) or 2 (the weights too)"),
    f"{ROLLOUT}.vllm.num_servers": _POSITIVE,
    f"{ROLLOUT}.max_num_batched_tokens": _POSITIVE,
    f"{ROLLOUT}.max_num_seqs": _POSITIVE,
    f"{ROLLOUT}.n": _POSITIVE,
    f"{ROLLOUT}.n_agent": _POSITIVE,
    f"{ROLLOUT}.search_delay_steps": _NOT_NEGATIVE,
    "critic.forward_micro_batch_size": _POSITIVE,
    "critic.forward_micro_batch_size_per_gpu": _POSITIVE,
    "critic.forward_max_token_len_per_gpu": _POSITIVE,
    "critic.cliprange_value": _ABOVE_ZERO,
    "reward_model.structure_format_score": _SHARE,
    "reward_model.final_format_score": _SHARE,
    "reward_model.retrieval_score": _SHARE,
    "reward_model.search_cost": _SHARE,
    "reward_model.overlong_buffer.len": _POSITIVE,
    "reward_model.overlong_buffer.penalty_factor": _NOT_NEGATIVE,
    **{
        f"data.difficulty_pools.{key}": _SHARE
        for key in ("easy_threshold", "hard_threshold", "easy_share", "hard_share")
    },
    "algorithm.rae_decay": (0, 1 - 1e-9, "a number from 0 to below 1"),
    "algorithm.turn_credit": _NOT_NEGATIVE,
    "algorithm.filter_groups.max_num_gen_batches": (0, inf, "a number of rounds, or 0"),
    "retriever.topk": _POSITIVE,
    "retriever.timeout": _ABOVE_ZERO,
    "retriever.max_failed_share": _SHARE,
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_ctrl.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": _ABOVE_ZERO,
    "algorithm.kl_ctrl.horizon": _ABOVE_ZERO,
    "algorithm.rollout_correction.rollout_is_threshold": (1, inf, "a number of at least 1"),
    "algorithm.rollout_correction.rollout_rs_threshold": (1 + 1e-9, inf, "a number above 1"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        0,
        1,
        "0 (no lower bound) or a number up to 1",
    ),
    "trainer.total_epochs": _POSITIVE,
    "trainer.total_training_steps": _POSITIVE,
    "trainer.nnodes": _POSITIVE,
    "trainer.n_gpus_per_node": _POSITIVE,
    "trainer.rollout_pool.nnodes": _POSITIVE,
    "trainer.rollout_pool.n_gpus_per_node": _POSITIVE,
    "trainer.cpus_per_process": (0, inf, "a number of at least 0"),
    "trainer.dry_run_gpu_memory_gb": _ABOVE_ZERO,
    "trainer.dry_run_gpus_per_node": _POSITIVE,
    "trainer.save_freq": (-1, inf, "-1 (only the last) or a number of steps"),
    "trainer.test_freq": (-1, inf, "-1 (only the first and the last) or a number of steps"),
    "trainer.critic_warmup": _NOT_NEGATIVE,
    "trainer.seed": _NOT_NEGATIVE,
    "trainer.max_ckpt_to_keep": _POSITIVE,
    "trainer.max_skipped_updates": _POSITIVE,
    "trainer.max_restarts": _NOT_NEGATIVE,
    "trainer.restart_timeout": _NOT_NEGATIVE,
    "trainer.num_trajectories_logged": _NOT_NEGATIVE,
    "max_turns": _NOT_NEGATIVE,
}

"""What each configuration key may hold, and where it is read.

`READ_IN` names for every key the source that acts on it; `FIXED` the keys that may only keep their default,
with the reason; `NO_EFFECT` those that Search-R1's scripts set and that have no meaning here.
A test holds that every key of `ppo_trainer.yaml` is in exactly one of the three, and that each `READ_IN`
source really reads it.
"""

from math import inf
from typing import Any

from omegaconf import ListConfig

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
_NEURAL = "Neural reward models are not in this version; give a function with custom_reward_function.path."
_SEQUENCE_PARALLEL = "Sequence parallelism is not in this version; use more processes or param_offload."
_WRAP = "FSDP2 shards each decoder layer on its own; there is nothing to choose."

# key -> why it may only keep its default
FIXED: dict[str, str] = {
    "data.tokenizer": "The tokenizer is the one in the model's folder; put yours there.",
    "data.return_raw_input_ids": "The raw prompt ids are always in the batch, as raw_prompt_ids.",
    "actor_rollout_ref.hybrid_engine": "Actor, rollout and reference always share their processes.",
    f"{ACTOR}.state_masking": "Only tokens that the policy sampled are trained; this cannot be off.",
    f"{ACTOR}.ulysses_sequence_parallel_size": _SEQUENCE_PARALLEL,
    f"{REF}.ulysses_sequence_parallel_size": _SEQUENCE_PARALLEL,
    "critic.ulysses_sequence_parallel_size": _SEQUENCE_PARALLEL,
    f"{REF}.fsdp_config.mixed_precision.reduce_dtype": "The reference has no gradients to reduce.",
    f"{ROLLOUT}.prompt_length": "It follows data.max_prompt_length; set that.",
    f"{ROLLOUT}.response_length": "It follows data.max_response_length; set that.",
    "critic.model.tokenizer_path": "The critic reads the policy's token ids.",
    **{
        f"{block}.{key}": reason
        for block in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
        for key, reason in (
            ("fsdp_size", "Weights are sharded over all processes."),
            ("mixed_precision.buffer_dtype", "Buffers such as rotary tables keep their own type."),
            ("wrap_policy.min_num_params", _WRAP),
            ("wrap_policy.transformer_layer_cls_to_wrap", _WRAP),
            ("wrap_policy.disable", _WRAP),
        )
    },
    **{
        f"reward_model.{key}": _NEURAL
        for key in (
            "enable",
            "strategy",
            "model.input_tokenizer",
            "model.path",
            "model.external_lib",
            "model.use_remove_padding",
            "model.trust_remote_code",
            "model.fsdp_config.min_num_params",
            "model.fsdp_config.param_offload",
            "micro_batch_size",
            "max_length",
            "ulysses_sequence_parallel_size",
            "use_dynamic_bsz",
            "forward_max_token_len_per_gpu",
            "truncation",
        )
    },
    "algorithm.no_think_rl": "It would train on text that the policy did not write in this form.",
    "algorithm.state_masking.start_state_marker": "The tags of an observation are the protocol.",
    "algorithm.state_masking.end_state_marker": "The tags of an observation are the protocol.",
    "trainer.default_hdfs_dir": "Nothing is copied to HDFS; a run's folder is default_local_dir.",
}

# key -> why any (valid) value of it changes nothing
NO_EFFECT: dict[str, str] = {
    f"{ROLLOUT}.enforce_eager": "The native engine has no compiled mode.",
    f"{ROLLOUT}.load_format": "The native engine reads the trainer's weights; it loads no files.",
    f"{ROLLOUT}.tensor_model_parallel_size": "Each process decodes with a whole model.",
}

# Keys that may be null, with the types that they may have otherwise.
NULLABLE: dict[str, tuple[type, ...]] = {
    "data.tokenizer": (str,),
    "data.train_files": (str, ListConfig),
    "data.val_files": (str, ListConfig),
    "data.extra_val_files": (str, ListConfig),
    "data.train_data_num": (int,),
    "data.val_data_num": (int,),
    "actor_rollout_ref.model.path": (str,),
    "actor_rollout_ref.model.external_lib": (str,),
    **{f"{ACTOR}.{key}": (float,) for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")},
    **{f"{block}.optim.min_lr_ratio": (float,) for block in (ACTOR, "critic")},
    **{
        f"{block}.{key}": (str,)
        for block in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
        for key in ("mixed_precision.param_dtype", "wrap_policy.transformer_layer_cls_to_wrap")
    },
    f"{REF}.fsdp_config.model_dtype": (str,),
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
    "critic.model.path": (str,),
    "critic.model.tokenizer_path": (str,),
    "critic.model.external_lib": (str,),
    "reward_model.model.input_tokenizer": (str,),
    "reward_model.model.path": (str,),
    "reward_model.model.external_lib": (str,),
    "reward_model.max_length": (int,),
    "custom_reward_function.path": (str,),
    "retriever.url": (str, ListConfig),
    "algorithm.kl_ctrl.target_kl": (float,),
    "algorithm.kl_ctrl.horizon": (float,),
    "trainer.total_training_steps": (int,),
    "trainer.default_hdfs_dir": (str,),
    "trainer.resume_from_path": (str,),
    "trainer.max_ckpt_to_keep": (int,),
}

_STRATEGIES = ("fsdp", "fsdp2")
_DTYPES = ("fp32", "bf16")
_LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")

CHOICES: dict[str, tuple[Any, ...]] = {
    "data.truncation": ("error", "left"),
    f"{ACTOR}.strategy": _STRATEGIES,
    "critic.strategy": _STRATEGIES,
    f"{ACTOR}.loss_agg_mode": _LOSS_AGG_MODES,
    "critic.loss_agg_mode": _LOSS_AGG_MODES,
    f"{ACTOR}.kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    **{
        f"{block}.{key}": choices
        for block in (f"{ACTOR}.optim", "critic.optim")
        for key, choices in (("name", ("adamw",)), ("warmup_style", ("constant", "cosine", "linear")))
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
    f"{ROLLOUT}.dtype": ("auto", "bfloat16", "float32"),
    "algorithm.adv_estimator": ("gae", "grpo", "rloo", "reinforce_plus_plus"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "trainer.backend": ("auto", "local", "ray"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.resume_mode": ("auto", "none", "latest", "from_path"),
    "trainer.progress": ("auto", "live", "plain"),
}

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
            ("grad_clip", _ABOVE_ZERO),
            ("optim.lr", _NOT_NEGATIVE),
            ("optim.lr_warmup_steps", (-1, inf, "-1 or more")),
            ("optim.lr_warmup_steps_ratio", _SHARE),
            ("optim.min_lr_ratio", _SHARE),
            ("optim.total_training_steps", (-1, inf, "-1 or more")),
            ("optim.weight_decay", _NOT_NEGATIVE),
        )
    },
    f"{ACTOR}.clip_ratio": _SHARE,
    f"{ACTOR}.clip_ratio_low": _SHARE,
    f"{ACTOR}.clip_ratio_high": _NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_c": (1 + 1e-9, inf, "a number above 1, or null"),
    f"{ACTOR}.entropy_coeff": _NOT_NEGATIVE,
    f"{ACTOR}.kl_loss_coef": _NOT_NEGATIVE,
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
    f"{ROLLOUT}.tensor_model_parallel_size": _POSITIVE,
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
    "retriever.topk": _POSITIVE,
    "retriever.timeout": _ABOVE_ZERO,
    "algorithm.gamma": _SHARE,
    "algorithm.lam": _SHARE,
    "algorithm.kl_ctrl.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": _ABOVE_ZERO,
    "algorithm.kl_ctrl.horizon": _ABOVE_ZERO,
    "trainer.total_epochs": _POSITIVE,
    "trainer.total_training_steps": _POSITIVE,
    "trainer.nnodes": _POSITIVE,
    "trainer.n_gpus_per_node": _POSITIVE,
    "trainer.save_freq": (-1, inf, "-1 (only the last) or a number of steps"),
    "trainer.test_freq": (-1, inf, "-1 (only the first and the last) or a number of steps"),
    "trainer.critic_warmup": _NOT_NEGATIVE,
    "trainer.seed": _NOT_NEGATIVE,
    "trainer.max_ckpt_to_keep": _POSITIVE,
    "trainer.num_trajectories_logged": _NOT_NEGATIVE,
    "max_turns": _NOT_NEGATIVE,
}

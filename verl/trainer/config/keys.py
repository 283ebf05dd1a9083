"""Where each configuration key is read, or why it is not.

`READ_IN` names for every key the source that acts on it; `FIXED` the keys that may only keep their default,
with the reason; `NO_EFFECT` those that Search-R1's scripts set and that have no meaning here.
A test holds that every key of `ppo_trainer.yaml` is in exactly one of the three, and that each `READ_IN`
source really reads it.
"""

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
_NEURAL = "Neural reward models are not in this version; give a function with custom_reward_function.path."
_WRAP = "FSDP2 shards each decoder layer on its own; there is nothing to choose."
_MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)

# key -> why it may only keep its default
FIXED: dict[str, str] = {
    "data.tokenizer": "The tokenizer is the one in the model's folder; put yours there.",
    "data.return_raw_input_ids": "The raw prompt ids are always in the batch, as raw_prompt_ids.",
    "actor_rollout_ref.hybrid_engine": "Rollouts of their own processes are trainer.rollout_pool.",
    f"{ACTOR}.state_masking": "Only tokens that the policy sampled are trained; this cannot be off.",
    f"{REF}.ulysses_sequence_parallel_size": "It shares the actor's processes and rows; set the actor's.",
    f"{REF}.fsdp_config.mixed_precision.reduce_dtype": "The reference has no gradients to reduce.",
    **{
        f"{block}.megatron.{size}": "Models that share processes are cut alike; set the actor's."
        for block in (REF, "critic")
        for size in _MEGATRON_SIZES
    },
    f"{ROLLOUT}.prompt_length": "It follows data.max_prompt_length; set that.",
    f"{ROLLOUT}.response_length": "It follows data.max_response_length; set that.",
    "critic.model.tokenizer_path": "The critic reads the policy's token ids.",
    **{
        f"{block}.{key}": reason
        for block in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
        for key, reason in (
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
    **{
        f"{block}.megatron.seed": "weights come from the model's folder, and no layer draws at random."
        for block in (ACTOR, REF, "critic")
    },
    f"{ROLLOUT}.load_format": "Every engine takes the trainer's weights; none loads a file of its own.",
}

_MAIN = "verl/trainer/main_ppo.py"
_PLACEMENT = "verl/trainer/placement.py"
_FORMAT = "verl/trainer/main_ppo_format.py:format_score"
_TRAINER = "verl/trainer/ppo/ray_trainer.py:RayPPOTrainer"
_COLLECTOR = "verl/trainer/ppo/collection.py:TrajectoryCollector"
_SCORING = "verl/trainer/ppo/scoring.py"
_TOKENS = "verl/trainer/ppo/token_worker.py:TokenWorker"
_PASSES = "verl/trainer/ppo/passes.py:Passes"
_ADVANTAGE_INPUTS = "verl/trainer/ppo/advantage_inputs.py"
_POOLS = "verl/utils/dataset/difficulty_pools.py:DifficultyPools"
_ALGOS = "verl/trainer/ppo/algos"
_WORKERS = "verl/workers/fsdp_workers.py"
_MEGATRON = "verl/workers/megatron_workers.py"
_ENGINE = "verl/workers/engine/engine.py"
_PRECISION = "verl/workers/engine/precision.py"
_BUILD = "verl/workers/rollout/build.py"
_OPTIM = "verl/workers/engine/optim.py"
_LOADING = "verl/workers/engine/loading.py"
_LORA = "verl/workers/engine/lora.py"
_RESOLVE = "verl/trainer/config/loading.py:resolve"
_LIMITS = "verl/workers/engine/micro_batches.py:MicroBatchLimits.from_config"
_DP_ACTOR = "verl/workers/actor/dp_actor.py:DataParallelPPOActor"
_OBJECTIVE = "verl/workers/actor/policy_objective.py"
_VALUE_OBJECTIVE = "verl/workers/critic/dp_critic.py:ValueObjective"
_UPDATE_LOOP = "verl/workers/engine/update_loop.py:UpdateLoop"
_DATASET = "verl/utils/dataset/rl_dataset.py:RLHFDataset"
_RECORDER = "verl/utils/records/recorder.py:RunRecorder"
_REWARD = "verl/utils/reward_score/__init__.py:load_reward_function"
_AGENT = "search_r1/llm_agent/generation.py:build_agent"
_SEARCH_CLIENT = "search_r1/llm_agent/generation.py:build_search_client"


def _under(prefix: str, readers: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """{reader: names} -> {prefix.name: reader}"""
    return {f"{prefix}.{name}": reader for reader, names in readers.items() for name in names}


_OPTIM_READERS: dict[str, tuple[str, ...]] = {
    f"{_OPTIM}:build_optimizer": ("name", "lr", "betas", "weight_decay", "momentum", "adamw_lr"),
    f"{_OPTIM}:build_scheduler": (
        "lr_warmup_steps",
        "lr_warmup_steps_ratio",
        "min_lr_ratio",
        "warmup_style",
        "total_training_steps",
    ),
}
_FSDP_READERS: dict[str, tuple[str, ...]] = {
    f"{_ENGINE}:TrainEngine.__init__": (
        "param_offload",
        "grad_offload",
        "optimizer_offload",
        "reshard_after_forward",
        "fsdp_size",
    ),
    f"{_PRECISION}:Precision.from_config": (
        "model_dtype",
        "mixed_precision.param_dtype",
        "mixed_precision.reduce_dtype",
    ),
}
_MEGATRON_LAYOUT = ("num_layers_per_virtual_pipeline_stage", "sequence_parallel")
_LORA_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
_POLICY_LOSS_READERS = {
    f"{_ALGOS}/covariance_losses.py:select_clip_cov": (
        "policy_loss.clip_cov_ratio",
        "policy_loss.clip_cov_lb",
        "policy_loss.clip_cov_ub",
    ),
    f"{_ALGOS}/covariance_losses.py:select_kl_cov": ("policy_loss.kl_cov_ratio",),
    f"{_ALGOS}/covariance_losses.py:compute_policy_loss_kl_cov": ("policy_loss.ppo_kl_coef",),
    f"{_ALGOS}/importance_losses.py:compute_policy_loss_aipo": ("policy_loss.aipo_max_ratio",),
    f"{_ALGOS}/importance_losses.py:compute_policy_loss_ipo": (
        "policy_loss.ipo_eps",
        "policy_loss.ipo_kl_tau",
    ),
    f"{_ALGOS}/importance_losses.py:compute_policy_loss_dro": ("policy_loss.dro_beta",),
}
_LOG_PROB_KEYS = (
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu",
)
_PPO_KEYS = (
    "ppo_micro_batch_size_per_gpu",
    "use_dynamic_bsz",
    "ppo_max_token_len_per_gpu",
)

# key -> "file:function" that acts on it
READ_IN: dict[str, str] = {
    **_under(
        "data",
        {
            f"{_MAIN}:build_trainer": (
                "train_files",
                "val_files",
                "extra_val_files",
                "train_data_num",
                "val_data_num",
            ),
            f"{_DATASET}.__init__": ("prompt_key", "truncation"),
            f"{_DATASET}.__getitem__": ("return_raw_chat",),
            f"{_TRAINER}._prompt_sampler": (
                "train_batch_size",
                "shuffle_train_dataloader",
                "difficulty_pools.enable",
            ),
            f"{_POOLS}.pools": ("difficulty_pools.easy_threshold", "difficulty_pools.hard_threshold"),
            f"{_POOLS}.take": ("difficulty_pools.easy_share", "difficulty_pools.hard_share"),
            f"{_TRAINER}._validate": ("val_batch_size",),
            _AGENT: ("max_prompt_length", "max_response_length", "max_start_length", "max_obs_length"),
        },
    ),
    **_under(
        "actor_rollout_ref.model",
        {
            f"{_LOADING}:_load": ("enable_gradient_checkpointing",),
            f"{_LOADING}:load_hf_config": ("external_lib", "override_config", "trust_remote_code"),
            f"{_WORKERS}:ActorRolloutRefWorker.init_model": ("path",),
            f"{_WORKERS}:ActorRolloutRefWorker._limits": ("use_remove_padding",),
            f"{_LORA}:adapter_config": (*_LORA_KEYS, "lora_adapter_path"),
        },
    ),
    **_under(
        ACTOR,
        {
            _LIMITS: _PPO_KEYS,
            _RESOLVE: ("ppo_micro_batch_size",),
            f"{_UPDATE_LOOP}.__init__": ("ppo_mini_batch_size",),
            f"{_UPDATE_LOOP}._mini_batches": ("ppo_epochs",),
            f"{_TRAINER}._arranged": ("shuffle",),
            f"{_ALGOS}/policy_losses.py:clip_range": ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
            f"{_ALGOS}/clipped_losses.py:compute_policy_loss_vanilla": ("clip_ratio_c",),
            f"{_ALGOS}/clipped_losses.py:compute_policy_loss_sapo": ("tau_pos", "tau_neg"),
            **_POLICY_LOSS_READERS,
            f"{_DP_ACTOR}.__init__": ("loss_scale_factor",),
            f"{_OBJECTIVE}:uses_kl_loss": ("use_kl_loss", "kl_loss_coef"),
            f"{_OBJECTIVE}:PolicyObjective.share": ("policy_loss.loss_mode", "loss_agg_mode"),
            f"{_OBJECTIVE}:PolicyObjective._other_terms": ("kl_loss_type", "echo_coeff"),
            f"{_ALGOS}/entropy.py:get_entropy_controller": (
                "entropy_coeff",
                "entropy_ctrl.type",
                "entropy_ctrl.target_entropy",
                "entropy_ctrl.delta",
                "entropy_ctrl.min_coeff",
                "entropy_ctrl.max_coeff",
            ),
            f"{_WORKERS}:ActorRolloutRefWorker._engine": ("grad_clip",),
            f"{_WORKERS}:ActorRolloutRefWorker._num_sharing": ("ulysses_sequence_parallel_size",),
        },
    ),
    f"{ACTOR}.strategy": f"{_MAIN}:worker_classes",
    "critic.strategy": "verl/trainer/config/megatron_checks.py:check_megatron",
    **_under(
        f"{ACTOR}.megatron",
        {f"{_MEGATRON}:layout_of": (*_MEGATRON_SIZES, *_MEGATRON_LAYOUT)},
    ),
    **_under(f"{REF}.megatron", {f"{_MEGATRON}:layout_of": _MEGATRON_LAYOUT}),
    **_under("critic.megatron", {f"{_MEGATRON}:layout_of": _MEGATRON_LAYOUT}),
    **_under(f"{ACTOR}.optim", _OPTIM_READERS),
    **_under(f"{ACTOR}.fsdp_config", _FSDP_READERS),
    **_under(REF, {_LIMITS: _LOG_PROB_KEYS, _RESOLVE: ("log_prob_micro_batch_size",)}),
    f"{REF}.reset_every": _TRAINER,
    "actor_rollout_ref.teacher.path": f"{_WORKERS}:ActorRolloutRefWorker._load_teacher",
    **_under(
        f"{REF}.fsdp_config",
        {
            f"{_ENGINE}:TrainEngine.__init__": ("param_offload", "reshard_after_forward", "fsdp_size"),
            f"{_PRECISION}:Precision.from_config": ("model_dtype", "mixed_precision.param_dtype"),
        },
    ),
    **_under(
        ROLLOUT,
        {
            _LIMITS: _LOG_PROB_KEYS,
            _RESOLVE: ("log_prob_micro_batch_size",),
            f"{_COLLECTOR}._round": ("do_sample", "n", "n_agent", "keep_partial"),
            f"{_COLLECTOR}._gen_batch": ("temperature", "top_k", "top_p"),
            _AGENT: (
                "min_p",
                "ignore_eos",
                "search_delay_steps",
                "max_in_flight",
                "straggler_factor",
            ),
            f"{_BUILD}:build_engine": ("name", "placement", "max_num_seqs", "tensor_model_parallel_size"),
            f"{_BUILD}:local_engine": ("max_num_batched_tokens", "compile"),
            f"{_BUILD}:_kv_bytes": ("gpu_memory_utilization", "kv_cache_gb"),
            f"{_BUILD}:_vllm_arguments": (
                "block_size",
                "enforce_eager",
                "vllm.engine_args",
            ),
            f"{_BUILD}:_vllm_apart": ("vllm.server_urls", "vllm.weight_transfer"),
            f"{_BUILD}:_started_servers": ("vllm.python", "vllm.num_servers"),
            f"{_WORKERS}:ActorRolloutRefWorker.start_rollout": ("dtype",),
            f"{_WORKERS}:ActorRolloutRefWorker._sleep": ("free_cache_engine", "vllm.sleep_level"),
        },
    ),
    **_under(
        "critic",
        {
            _LIMITS: (
                *_PPO_KEYS,
                "forward_micro_batch_size_per_gpu",
                "forward_max_token_len_per_gpu",
            ),
            _RESOLVE: ("ppo_micro_batch_size", "forward_micro_batch_size"),
            f"{_UPDATE_LOOP}.__init__": ("ppo_mini_batch_size",),
            f"{_UPDATE_LOOP}._mini_batches": ("ppo_epochs",),
            f"{_TRAINER}._arranged": ("shuffle",),
            f"{_VALUE_OBJECTIVE}.share": ("cliprange_value", "loss_agg_mode"),
            f"{_WORKERS}:CriticWorker.init_model": ("model.use_remove_padding",),
            f"{_WORKERS}:CriticWorker._engine": ("grad_clip",),
            f"{_WORKERS}:CriticWorker._num_sharing": ("ulysses_sequence_parallel_size",),
            f"{_LOADING}:_source": ("model.path",),
            f"{_LOADING}:_load": ("model.enable_gradient_checkpointing",),
            f"{_LOADING}:load_hf_config": (
                "model.external_lib",
                "model.override_config",
                "model.trust_remote_code",
            ),
        },
    ),
    **_under("critic.model", {f"{_LORA}:adapter_config": _LORA_KEYS}),
    **_under("critic.optim", _OPTIM_READERS),
    **_under("critic.model.fsdp_config", _FSDP_READERS),
    **_under(
        "reward_model",
        {
            _FORMAT: ("structure_format_score", "final_format_score", "retrieval_score"),
            f"{_SCORING}:score": (
                "search_cost",
                "overlong_buffer.enable",
                "overlong_buffer.len",
                "overlong_buffer.penalty_factor",
            ),
        },
    ),
    **_under("custom_reward_function", {_REWARD: ("path", "name")}),
    **_under(
        "retriever",
        {
            _SEARCH_CLIENT: ("url", "topk", "timeout", "use_proxy"),
            "verl/doctor/collect.py:collect": ("corpus_path",),
            f"{_TRAINER}._check_searches": ("max_failed_share",),
        },
    ),
    **_under(
        "algorithm",
        {
            f"{_TOKENS}.advantages": (
                "adv_estimator",
                "kl_penalty",
            ),
            f"{_PASSES}.of": ("gdpo_reward_keys", "turn_credit"),
            f"{_TRAINER}.__init__": ("rae_decay",),
            f"{_ADVANTAGE_INPUTS}:advantage_inputs": (
                "gamma",
                "lam",
                "norm_adv_by_std_in_grpo",
                "gdpo_reward_weights",
            ),
            f"{_COLLECTOR}.collect": ("overlong_filter",),
            f"{_COLLECTOR}._refills": ("filter_groups.enable", "filter_groups.refill"),
            f"{_COLLECTOR}._compared_values": ("filter_groups.metric",),
            f"{_COLLECTOR}._may_go_on": ("filter_groups.max_num_gen_batches",),
            f"{_ALGOS}/kl.py:get_kl_controller": (
                "kl_ctrl.type",
                "kl_ctrl.kl_coef",
                "kl_ctrl.target_kl",
                "kl_ctrl.horizon",
            ),
            f"{_ALGOS}/rollout_correction.py:apply_rollout_correction": (
                "rollout_correction.rollout_is",
                "rollout_correction.rollout_is_threshold",
                "rollout_correction.rollout_is_batch_normalize",
                "rollout_correction.rollout_rs",
                "rollout_correction.rollout_rs_threshold",
                "rollout_correction.rollout_rs_threshold_lower",
                "rollout_correction.bypass_mode",
            ),
        },
    ),
    **_under(
        "trainer",
        {
            f"{_PLACEMENT}:pools_of": (
                "nnodes",
                "n_gpus_per_node",
                "rollout_pool.nnodes",
                "rollout_pool.n_gpus_per_node",
            ),
            f"{_PLACEMENT}:place": ("backend", "device"),
            f"{_MAIN}:build_trainer": ("cpus_per_process",),
            f"{_MAIN}:run": ("dry_run",),
            "verl/trainer/dry_run/run.py:dry_run": ("dry_run_gpu_memory_gb", "dry_run_gpus_per_node"),
            f"{_TRAINER}.__init__": (
                "total_epochs",
                "total_training_steps",
                "default_local_dir",
                "resume_mode",
                "resume_from_path",
                "max_ckpt_to_keep",
                "async_checkpoint",
            ),
            "verl/trainer/restarts.py:RestartingRun": ("max_restarts", "restart_timeout"),
            f"{_TRAINER}.fit": ("val_before_train", "val_only"),
            f"{_TRAINER}._train": ("save_freq", "test_freq"),
            f"{_TRAINER}._validate": ("val_modes",),
            f"{_TRAINER}._prompt_sampler": ("seed",),
            f"{_TRAINER}._updates_actor": ("critic_warmup",),
            f"{_TRAINER}._check_updates": ("max_skipped_updates",),
            "verl/doctor/start.py:start_is_sound": ("doctor_skip",),
            f"{_RECORDER}.start": ("project_name", "experiment_name", "logger", "progress"),
            f"{_TRAINER}._records": ("num_trajectories_logged",),
        },
    ),
    "max_turns": _AGENT,
    "do_search": _AGENT,
}

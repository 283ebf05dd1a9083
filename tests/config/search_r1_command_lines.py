"""The 13 command lines in which Search-R1 starts a training run or an evaluation, as lists of overrides.

Rebuilt from the keys and values that its scripts set (`train_ppo.sh`, `train_grpo.sh`, `scripts/**`,
`example/multinode/*`, `docs/multinode.md`). `command_lines` fills in the shell variables; the rest is as a
shell hands it to python, so `['wandb']` has lost its quotes.
"""

COMMON = {
    "data.train_files": "$DATA_DIR/train.parquet",
    "data.val_files": "$DATA_DIR/test.parquet",
    "data.train_data_num": "null",
    "data.val_data_num": "null",
    "data.train_batch_size": "512",
    "data.val_batch_size": "256",
    "data.max_prompt_length": "4096",
    "data.max_response_length": "500",
    "data.max_start_length": "2048",
    "data.max_obs_length": "500",
    "data.shuffle_train_dataloader": "True",
    "actor_rollout_ref.model.path": "$BASE_MODEL",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
    "actor_rollout_ref.model.use_remove_padding": "True",
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.285",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "64",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "true",
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "true",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "128",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "128",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "True",
    "actor_rollout_ref.rollout.temperature": "1",
    "actor_rollout_ref.actor.state_masking": "true",
    "algorithm.no_think_rl": "false",
    "trainer.logger": "[wandb]",
    "+trainer.val_only": "false",
    "+trainer.val_before_train": "true",
    "trainer.default_hdfs_dir": "null",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
    "trainer.save_freq": "100",
    "trainer.test_freq": "100",
    "trainer.project_name": "$WAND_PROJECT",
    "trainer.experiment_name": "$EXPERIMENT_NAME",
    "trainer.total_epochs": "15",
    "trainer.total_training_steps": "1005",
    "trainer.default_local_dir": "verl_checkpoints/$EXPERIMENT_NAME",
    "max_turns": "4",
    "retriever.url": "http://127.0.0.1:8000/retrieve",
    "retriever.topk": "3",
}

PPO = {
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "actor_rollout_ref.rollout.n_agent": "1",
    "critic.optim.lr": "1e-5",
    "critic.optim.lr_warmup_steps_ratio": "0.015",
    "critic.model.path": "$BASE_MODEL",
    "critic.model.use_remove_padding": "True",
    "critic.model.enable_gradient_checkpointing": "true",
    "critic.model.fsdp_config.param_offload": "true",
    "critic.model.fsdp_config.grad_offload": "true",
    "critic.model.fsdp_config.optimizer_offload": "true",
    "critic.ppo_micro_batch_size": "8",
    "trainer.critic_warmup": "0",
}

GRPO = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n_agent": "5",
    "actor_rollout_ref.actor.use_kl_loss": "true",
    "actor_rollout_ref.actor.kl_loss_coef": "0.001",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
}

FORMAT = {
    "reward_model.structure_format_score": "0.2",
    "reward_model.final_format_score": "0.1",
    "reward_model.retrieval_score": "0",
    "trainer.default_local_dir": "/home/peterjin/verl_checkpoints/$EXPERIMENT_NAME",
}

MULTINODE = {"trainer.nnodes": "$N_NODES"}
TOP_P = {"actor_rollout_ref.rollout.top_p": "1.0"}
FIRST_STEPS = {
    "trainer.test_freq": "50",
    "trainer.total_training_steps": "305",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.95",
}


def _offload(block: str, param: str, grad: str, optimizer: str) -> dict[str, str]:
    return {
        f"{block}.param_offload": param,
        f"{block}.grad_offload": grad,
        f"{block}.optimizer_offload": optimizer,
    }


_ACTOR_FSDP = "actor_rollout_ref.actor.fsdp_config"
_CRITIC_FSDP = "critic.model.fsdp_config"
_LARGE = {
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.5",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.actor.optim.lr": "2e-7",
}
_SMALL_MICRO = {
    "actor_rollout_ref.actor.ppo_micro_batch_size": "32",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": "32",
}
_GRPO_LARGE = {
    "+trainer.val_before_train": "false",
    "actor_rollout_ref.actor.state_masking": "True",
    "actor_rollout_ref.actor.use_kl_loss": "True",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "True",
}

_EVALUATE_LEAVES_OUT = (
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.default_local_dir",
)

# script -> its overrides in order; later entries win over earlier ones
SCRIPTS: dict[str, dict[str, str]] = {
    "train_ppo.sh": COMMON | PPO | {"max_turns": "2", "trainer.test_freq": "50"},
    "train_grpo.sh": COMMON
    | GRPO
    | {
        "max_turns": "2",
        "trainer.test_freq": "50",
        "data.train_files": "$TRAIN_DATA_DIR/train.parquet",
        "data.val_files": "$TEST_DATA_DIR/test.parquet",
    },
    "scripts/nq_hotpotqa/evaluate.sh": {
        key: value
        for key, value in (
            COMMON
            | PPO
            | {
                "trainer.logger": "[]",
                "+trainer.val_only": "true",
                "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.95",
                "critic.optim.lr_warmup_steps_ratio": "0.05",
            }
        ).items()
        if key not in _EVALUATE_LEAVES_OUT
    },
    "scripts/nq_hotpotqa/v0.1/train_ppo.sh": COMMON
    | PPO
    | FIRST_STEPS
    | {"critic.optim.lr_warmup_steps_ratio": "0.05"},
    "scripts/nq_hotpotqa/v0.1/train_grpo.sh": COMMON | GRPO | FIRST_STEPS,
    "scripts/nq_hotpotqa/v0.2/train_ppo.sh": COMMON | PPO | TOP_P,
    "scripts/nq_hotpotqa/v0.2/train_grpo.sh": COMMON | GRPO,
    "scripts/nq_hotpotqa/v0.3/train_ppo_format.sh": COMMON | PPO | TOP_P | FORMAT,
    "scripts/nq_hotpotqa/v0.3/train_grpo_format.sh": COMMON
    | GRPO
    | FORMAT
    | {"actor_rollout_ref.actor.optim.lr": "5e-7"},
    "docs/multinode.md": COMMON
    | PPO
    | MULTINODE
    | TOP_P
    | _offload(_ACTOR_FSDP, "False", "False", "False")
    | _offload(_CRITIC_FSDP, "False", "False", "False")
    | {
        "+trainer.val_before_train": "false",
        "actor_rollout_ref.ref.fsdp_config.param_offload": "False",
        "critic.ppo_micro_batch_size": "16",
    },
    "example/multinode/train_ppo_multinode_32b.sh": COMMON
    | PPO
    | MULTINODE
    | TOP_P
    | _LARGE
    | _offload(_ACTOR_FSDP, "False", "False", "True")
    | _offload(_CRITIC_FSDP, "False", "False", "True")
    | _SMALL_MICRO
    | {
        "actor_rollout_ref.ref.fsdp_config.param_offload": "False",
        "critic.ppo_micro_batch_size": "32",
    },
    "example/multinode/train_grpo_multinode_32b.sh": COMMON
    | GRPO
    | MULTINODE
    | _LARGE
    | _GRPO_LARGE
    | _offload(_ACTOR_FSDP, "false", "false", "false")
    | {"actor_rollout_ref.ref.fsdp_config.param_offload": "false"},
    "example/multinode/train_grpo_multinode_72b.sh": COMMON
    | GRPO
    | MULTINODE
    | _LARGE
    | _GRPO_LARGE
    | _SMALL_MICRO
    | _offload(_ACTOR_FSDP, "True", "True", "True")
    | {
        "actor_rollout_ref.actor.optim.lr": "1e-7",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "4",
    },
}


def command_lines(variables: dict[str, str]) -> dict[str, list[str]]:
    """Script -> arguments with `$NAME` replaced; every train script names default_hdfs_dir twice."""
    lines: dict[str, list[str]] = {}
    for script, overrides in SCRIPTS.items():
        arguments = [f"{key}={value}" for key, value in overrides.items()]
        arguments.append(f"trainer.default_hdfs_dir={overrides['trainer.default_hdfs_dir']}")
        for name, value in sorted(variables.items(), key=lambda item: -len(item[0])):
            arguments = [argument.replace(f"${name}", value) for argument in arguments]
        lines[script] = arguments
    return lines

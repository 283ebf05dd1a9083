"""Keys of Search-R1, verl and earlier versions that the schema does not have, and what becomes of each.

renamed             the name of a key in verl or in an earlier version: it stands for the key, in every layer
an alias            sets a key of the schema, perhaps after a conversion, unless the key is set itself
fixed               may only have the value that it already has; other values are refused with the reason
without effect      accepted with a note that it changes nothing here
removed             unknown, with what to do instead
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from verl.config.keys import Key, Range, format_value
from verl.config.policy import ACTOR, REF, ROLLOUT
from verl.config.prompt_selection import FILTER, POOLS, RETIRE
from verl.config.schema import Config, SFTConfig


@dataclass(frozen=True)
class Alias:
    """Another name of `key`.

    Attributes:
        key: the key of the schema.
        convert: function that maps (configuration, value) to the key's value. None: the value is the same.
        kind: type of the value that is converted.
        low: lower bound of the value that is converted.
        also: keys that are set besides.
        joins: whether the result of `convert` also holds what the key has by its own name.
    """

    key: str
    convert: Callable[[Any, Any], Any] | None = None
    kind: type = int
    low: int | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    joins: bool = False

    def check(self, name: str, value: Any) -> None:
        if self.convert is not None:
            bounds = None if self.low is None else Range(self.low)
            Key(name, None, (self.kind,), True, bounds=bounds).check(value)


@dataclass(frozen=True)
class CompatibilityTable:
    """The keys that one program accepts besides its schema; see the module.

    `renamed_groups` is for the keys of a group that have no entry of their own. `earlier_names` are those of
    `renamed` that only earlier versions of this project had: the user is told the new ones.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    earlier_names: frozenset[str] = frozenset()
    renamed_groups: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Return all keys that are accepted and have a meaning of their own; `renamed` ones have not."""
        return {*self.aliases, *self.fixed, *self.without_effect}

    def note(self, name: str, value: Any) -> str | None:
        """Return a line on a key without effect whose value is not the usual one, else None.

        Raises:
            ValueError: the key is fixed, to another value.
        """
        if name in self.fixed:
            expected, reason = self.fixed[name]
            if value != expected:
                raise ValueError(
                    f"Found {name}={format_value(value)}; expected {format_value(expected)}. {reason}"
                )
            return None
        usual, reason = self.without_effect[name]
        return None if value == usual else f"{name}={format_value(value)} has no effect: {reason}"


def num_replicas(config: Config | SFTConfig) -> int:
    """Return the number of groups of processes that have rows of their own.

    On Megatron several processes share each row.
    """
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if isinstance(config, SFTConfig) or config.actor_rollout_ref.actor.strategy != "megatron":
        return processes
    cut = config.actor_rollout_ref.actor.megatron
    sharing = cut.tensor_model_parallel_size * cut.pipeline_model_parallel_size * cut.context_parallel_size
    return max(1, processes // sharing)


def _rows_per_replica(config: Config | SFTConfig, rows: int) -> int:
    """Convert the rows of a pass over all processes to the rows of one process's pass."""
    return max(1, rows // num_replicas(config))


def _with_enforce_eager(config: Config, value: bool) -> dict[str, Any]:
    return {"enforce_eager": value} | config.actor_rollout_ref.rollout.vllm.engine_args


def _parse_reasons(text: str) -> dict[str, tuple[Any, str]]:
    """Parse lines "key=value key=value: reason" to a table key -> (value, reason).

    _BLOCKS lists what a key may begin with.
    """
    table: dict[str, tuple[Any, str]] = {}
    for entry in re.findall(r"(\S+=[^:]+): (.+)\n", text):
        for setting in entry[0].split():
            name, value = setting.split("=")
            first, dot, rest = name.partition(".")
            for block in _BLOCKS.get(first, (first,)):
                table[block + dot + rest] = (yaml.safe_load(value), entry[1])
    return table


DEFAULT_PASS_ROWS = {  # key of the size of a pass, in rows of the whole run -> its value when nothing is set
    f"{ACTOR}.ppo_micro_batch_size": 64,
    f"{REF}.log_prob_micro_batch_size": 128,
    f"{ROLLOUT}.log_prob_micro_batch_size": 128,
    "critic.ppo_micro_batch_size": 64,
}
_BLOCKS = {
    "ACTOR": (ACTOR,),
    "REF": (REF,),
    "ROLLOUT": (ROLLOUT,),
    "FSDP": (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config", f"{REF}.fsdp_config"),
    "MEGATRON": (f"{ACTOR}.megatron", f"{REF}.megatron", "critic.megatron"),
}
_RL_FIXED = """
data.tokenizer=null: The tokenizer is the one in the model's folder; put yours there.
data.return_raw_input_ids=false: The raw prompt ids are always in the batch, as raw_prompt_ids.
actor_rollout_ref.hybrid_engine=true: For rollouts apart set actor_rollout_ref.rollout.placement=apart.
ROLLOUT.vllm.python=null: With placement=apart vLLM runs in processes of the run, with its interpreter.
ROLLOUT.vllm.num_servers=1: With placement=apart rollout.num_processes processes sample; no servers.
ROLLOUT.vllm.server_urls=null: For servers that run already set rollout.name=remote and rollout.remote.urls.
ACTOR.state_masking=true: Only tokens that the policy sampled are trained; this cannot be off.
FSDP.mixed_precision.buffer_dtype=fp32: Buffers such as rotary tables keep their own type.
FSDP.mixed_precision.reduce_dtype=fp32: Gradients are summed over processes in fp32.
FSDP.wrap_policy.min_num_params=0 FSDP.wrap_policy.transformer_layer_cls_to_wrap=null
FSDP.wrap_policy.disable=false: FSDP2 shards each decoder layer on its own.
MEGATRON.sequence_parallel=true: With tensor parallelism the activations are shared too.
MEGATRON.num_layers_per_virtual_pipeline_stage=null: A process has one stage of the pipeline.
ACTOR.policy_loss.clip_cov_lb=1.0 ACTOR.policy_loss.clip_cov_ub=5.0
    : clip_cov draws among covariances from 1 to 5, as in verl.
critic.loss_agg_mode=token-mean: The critic's loss is a mean over tokens.
ACTOR.optim.total_training_steps=-1 critic.optim.total_training_steps=-1: The schedule is as long as the run.
ACTOR.load_weight=true REF.load_weight=true critic.load_weight=true reward_model.load_weight=true
    : Training starts from the weights in the model's folder.
critic.kl_ctrl.type=fixed critic.kl_ctrl.kl_coef=0.001
    : The critic's loss has no KL; the policy's is algorithm.kl_ctrl.
reward_model.enable=false reward_model.strategy=fsdp reward_model.model.input_tokenizer=null
reward_model.model.path=null reward_model.model.external_lib=null
reward_model.model.use_remove_padding=false reward_model.model.trust_remote_code=false
reward_model.model.fsdp_config.min_num_params=0 reward_model.model.fsdp_config.param_offload=false
reward_model.micro_batch_size=64 reward_model.max_length=null reward_model.ulysses_sequence_parallel_size=1
reward_model.use_dynamic_bsz=false reward_model.forward_max_token_len_per_gpu=32768
reward_model.truncation=right reward_model.param_offload=false
reward_model.megatron.tensor_model_parallel_size=4 reward_model.megatron.pipeline_model_parallel_size=1
reward_model.megatron.num_layers_per_virtual_pipeline_stage=null
reward_model.megatron.sequence_parallel=true reward_model.megatron.seed=1
    : There are no neural reward models; give a function with custom_reward_function.path.
algorithm.no_think_rl=false: It would train on text that the policy did not write in this form.
algorithm.state_masking.start_state_marker=<information>
algorithm.state_masking.end_state_marker=</information>: The tags of an observation are the protocol.
trainer.default_hdfs_dir=null: Nothing is copied to HDFS; a run's folder is default_local_dir.
ROLLOUT.ignore_eos=false: A turn ends at the end-of-sequence token.
"""
_RL_WITHOUT_EFFECT = """
MEGATRON.seed=1: weights come from the model's folder, and no layer draws at random.
ACTOR.fsdp_config.grad_offload=false critic.model.fsdp_config.grad_offload=false
    : gradients are freed with every update.
ROLLOUT.load_format=dummy_dtensor: every engine takes the trainer's weights; none loads a file of its own.
ROLLOUT.layer_name_map.qkv_layer_name=qkv ROLLOUT.layer_name_map.gate_proj_layer_name=gate_up
    : weights reach every engine under Hugging Face's names.
critic.forward_micro_batch_size=null critic.forward_micro_batch_size_per_gpu=null
critic.forward_max_token_len_per_gpu=null: the critic's passes are of one size, that of ppo_.
REF.log_prob_max_token_len_per_gpu=null ROLLOUT.log_prob_max_token_len_per_gpu=null
    : passes without gradient are of actor_rollout_ref.actor.ppo_max_token_len_per_gpu tokens too.
data.return_raw_chat=false: the chat messages of each row are kept where they are needed.
"""
_SFT_FIXED = """
data.use_shm=false model.use_shm=false: Models and data are read where they are.
data.custom_cls.path=null data.custom_cls.name=null
    : Rows come as prompt and response, as messages, or as segments; write them so.
model.use_liger=false: Logits are made for trained tokens only and in chunks already.
model.fsdp_config.wrap_policy.min_num_params=0: FSDP2 shards each decoder layer on its own.
model.fsdp_config.cpu_offload=false model.fsdp_config.offload_params=false
    : Weights stay on the device; use lora_rank, gradient checkpointing or more processes.
model.fsdp_config.mixed_precision.reduce_dtype=fp32: Gradients are summed over processes in fp32.
ulysses_sequence_parallel_size=1: Supervised rows are short: each process trains on whole ones.
trainer.default_hdfs_dir=null: Nothing is copied to HDFS; a run's folder is default_local_dir.
"""
_SFT_WITHOUT_EFFECT = """
data.balance_dp_token=false: the loss is always a mean over the trained tokens of all processes.
model.strategy=fsdp2: fsdp and fsdp2 both mean FSDP2.
"""

# Keys of SkyRL (skyrl_train/config/ppo_base_config.yaml, 00d10c0), and what each is called here.
_SKYRL = f"""
data.train_data data.train_files
data.val_data data.val_files
trainer.max_steps trainer.total_training_steps
trainer.max_training_steps trainer.total_training_steps
trainer.epochs trainer.total_epochs
trainer.run_name trainer.experiment_name
trainer.ckpt_path trainer.default_local_dir
trainer.resume_path trainer.resume_from_path
trainer.max_ckpts_to_keep trainer.max_ckpt_to_keep
trainer.ckpt_interval trainer.save_freq
trainer.hf_save_interval trainer.save_freq
trainer.eval_interval trainer.test_freq
trainer.eval_before_train trainer.val_before_train
trainer.eval_batch_size data.val_batch_size
trainer.train_batch_size data.train_batch_size
trainer.max_prompt_length data.max_start_length
trainer.policy_mini_batch_size {ACTOR}.ppo_mini_batch_size
trainer.critic_mini_batch_size critic.ppo_mini_batch_size
trainer.micro_train_batch_size_per_gpu {ACTOR}.ppo_micro_batch_size_per_gpu
trainer.micro_forward_batch_size_per_gpu {ROLLOUT}.log_prob_micro_batch_size_per_gpu
trainer.update_epochs_per_batch {ACTOR}.ppo_epochs
trainer.gradient_checkpointing actor_rollout_ref.model.enable_gradient_checkpointing
trainer.target_modules actor_rollout_ref.model.target_modules
trainer.strategy {ACTOR}.strategy
trainer.policy.model.path actor_rollout_ref.model.path
trainer.policy.optimizer_config.lr {ACTOR}.optim.lr
trainer.policy.optimizer_config.weight_decay {ACTOR}.optim.weight_decay
trainer.policy.optimizer_config.max_grad_norm {ACTOR}.grad_clip
trainer.policy.optimizer_config.num_warmup_steps {ACTOR}.optim.lr_warmup_steps
trainer.policy.fsdp_config.cpu_offload {ACTOR}.fsdp_config.param_offload
trainer.policy.fsdp_config.fsdp_size {ACTOR}.fsdp_config.fsdp_size
trainer.policy.sequence_parallel_size {ACTOR}.ulysses_sequence_parallel_size
trainer.critic.model.path critic.model.path
trainer.critic.optimizer_config.lr critic.optim.lr
trainer.placement.policy_num_nodes trainer.nnodes
trainer.placement.policy_num_gpus_per_node trainer.n_gpus_per_node
trainer.algorithm.advantage_estimator algorithm.adv_estimator
trainer.algorithm.use_kl_loss {ACTOR}.use_kl_loss
trainer.algorithm.kl_loss_coef {ACTOR}.kl_loss_coef
trainer.algorithm.init_kl_coef algorithm.kl_ctrl.kl_coef
trainer.algorithm.lambd algorithm.lam
trainer.algorithm.gamma algorithm.gamma
trainer.algorithm.eps_clip_low {ACTOR}.clip_ratio_low
trainer.algorithm.eps_clip_high {ACTOR}.clip_ratio_high
trainer.algorithm.clip_ratio_c {ACTOR}.clip_ratio_c
trainer.algorithm.tis_imp_ratio_cap algorithm.rollout_correction.rollout_is_threshold
generator.backend {ROLLOUT}.name
generator.n_samples_per_prompt {ROLLOUT}.n_agent
generator.num_inference_engines {ROLLOUT}.num_processes
generator.remote_inference_engine_urls {ROLLOUT}.remote.urls
generator.inference_engine_tensor_parallel_size {ROLLOUT}.tensor_model_parallel_size
generator.gpu_memory_utilization {ROLLOUT}.gpu_memory_utilization
generator.max_num_seqs {ROLLOUT}.max_num_seqs
generator.max_num_batched_tokens {ROLLOUT}.max_num_batched_tokens
generator.max_input_length data.max_prompt_length
generator.sampling_params.max_generate_length data.max_response_length
generator.sampling_params.temperature {ROLLOUT}.temperature
generator.sampling_params.top_p {ROLLOUT}.top_p
generator.sampling_params.top_k {ROLLOUT}.top_k
generator.sampling_params.min_p {ROLLOUT}.min_p
environment.max_env_workers environment.max_workers
trainer.algorithm.dynamic_sampling.type {FILTER}.enable
trainer.algorithm.dynamic_sampling.max_sample_batches {FILTER}.max_num_gen_batches
"""

# What was one block each before `prompt_selection` held them; the names of verl's users come first.
_VERLS_FILTER = {
    f"algorithm.filter_groups.{name}": f"{FILTER}.{name}"
    for name in ("enable", "metric", "max_num_gen_batches")
}
_EARLIER_SELECTION = {
    "algorithm.filter_groups.retire_solved": RETIRE,
    **{
        f"data.difficulty_pools.{name}": f"{POOLS}.{name}"
        for name in ("enable", "easy_threshold", "hard_threshold", "easy_share", "hard_share")
    },
}

RL = CompatibilityTable(
    renamed=_VERLS_FILTER | _EARLIER_SELECTION,
    earlier_names=frozenset(_EARLIER_SELECTION),
    renamed_groups={"environment.skyrl_gym": "environment.env_config"},
    aliases={
        **{name: Alias(f"{name}_per_gpu", _rows_per_replica, low=1) for name in DEFAULT_PASS_ROWS},
        f"{ACTOR}.optim.clip_grad": Alias(f"{ACTOR}.grad_clip"),
        "critic.optim.clip_grad": Alias("critic.grad_clip"),
        f"{ROLLOUT}.enforce_eager": Alias(
            f"{ROLLOUT}.vllm.engine_args", _with_enforce_eager, kind=bool, joins=True
        ),
        f"{REF}.param_offload": Alias(f"{REF}.fsdp_config.param_offload"),
        "generator.step_wise_trajectories": Alias(f"{ROLLOUT}.step_wise"),
        "generator.max_turns": Alias("max_turns"),
        "environment.skyrl_gym.max_env_workers": Alias("environment.max_workers"),
        "environment.skyrl_gym.search.search_url": Alias("retriever.url"),
        "environment.skyrl_gym.search.topk": Alias("retriever.topk"),
        "environment.skyrl_gym.search.timeout": Alias("retriever.timeout"),
    },
    fixed=_parse_reasons(_RL_FIXED),
    without_effect=_parse_reasons(_RL_WITHOUT_EFFECT),
    removed={
        f"{ROLLOUT}.keep_partial": (
            f"Groups go on beside training with {ROLLOUT}.placement=apart and "
            "trainer.async_training.max_staleness=1; docs/async.md."
        ),
        f"{ROLLOUT}.compile": "The native engine decodes without torch.compile.",
        f"{ROLLOUT}.block_size": "It is 32; of vLLM it is rollout.vllm.engine_args.block_size.",
        f"{ACTOR}.entropy_ctrl.type": "The weight is adaptive when entropy_ctrl.target_entropy is set.",
        f"{ROLLOUT}.vllm.sleep_level": "It is 1, and 2 where the trainer's weights are offloaded.",
        f"{ROLLOUT}.vllm.weight_transfer": f"Rollouts apart have {ROLLOUT}.weight_transfer.",
        "generator.merge_stepwise_output": "What turns have in common is computed once, always.",
        "algorithm.filter_groups.refill": f"No refill is {FILTER}.max_num_gen_batches=1.",
        "trainer.rollout_pool.nnodes": f"For rollouts apart set {ROLLOUT}.placement=apart.",
        "trainer.rollout_pool.n_gpus_per_node": f"For rollouts apart set {ROLLOUT}.placement=apart.",
        f"{ACTOR}.entropy_ctrl.min_coeff": "It is always 0.",
        f"{ACTOR}.entropy_ctrl.max_coeff": "It is always 0.1.",
        f"{ACTOR}.entropy_ctrl.delta": "It is always 0.001 a step.",
        f"{ACTOR}.policy_loss.aipo_max_ratio": "It is always 5.",
        f"{ACTOR}.policy_loss.ipo_eps": "It is always 0.3.",
        f"{ACTOR}.optim.adamw_lr": "It is always lr.",
        f"{REF}.fsdp_config.model_dtype": "It is always that of the computation.",
        "trainer.cpus_per_process": "It is always 0.25.",
        "algorithm.rae_decay": "It is always 0.95.",
        **{
            skyrl_key: f"SkyRL's {skyrl_key} is {our_key} here."
            for skyrl_key, our_key in map(str.split, _SKYRL.strip().split("\n"))
        },
    },
)

SFT = CompatibilityTable(
    aliases={
        "data.micro_batch_size": Alias("data.micro_batch_size_per_gpu", _rows_per_replica, low=1),
        "optim.warmup_steps_ratio": Alias("optim.lr_warmup_steps_ratio"),
        "optim.lr_scheduler": Alias("optim.warmup_style"),
        "trainer.resume_path": Alias("trainer.resume_from_path", also={"trainer.resume_mode": "from_path"}),
    },
    fixed=_parse_reasons(_SFT_FIXED),
    without_effect=_parse_reasons(_SFT_WITHOUT_EFFECT),
)

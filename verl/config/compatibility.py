"""Keys of Search-R1, verl and earlier versions that the schema does not have, and what becomes of each.

an alias            sets a key of the schema, perhaps after a conversion
fixed               may only have the value that it has there already; others are refused with the reason
without effect      taken with a note: it changes nothing here
removed             unknown, with what to do instead
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.config.keys import Key, shown
from verl.config.policy import ACTOR, REF, ROLLOUT
from verl.config.schema import Config
from verl.config.sft import SFTConfig

_NEURAL = "Neural reward models are not in this version; give a function with custom_reward_function.path."
_WRAP = "FSDP2 shards each decoder layer on its own; there is nothing to choose."
_START = "Training starts from the weights in the model's folder."
_TAGS = "The tags of an observation are the protocol."
_HDFS = "Nothing is copied to HDFS; a run's folder is default_local_dir."
_LENGTH = "The schedule is as long as the run."
_NO_KL = "The critic's loss has no KL; the policy's is algorithm.kl_ctrl."
_SHM = "Models and data are read where they are."
_CUSTOM = "Rows come as prompt and response, as messages, or as segments; write them so."
_OFFLOAD = "A layer's weights stay on the device; use lora_rank, gradient checkpointing or more processes."
_CLIP_COV = "clip_cov draws among covariances from 1 to 5, as in verl."
_FP32 = "Gradients are summed over processes in fp32."


@dataclass(frozen=True)
class Alias:
    """Another name of `key`. convert: (configuration, value) -> the key's value; None: it is the same. kind,
    low: of the value that is converted. also: keys that are set besides. joins: what `convert` gives holds
    what the key has by its own name, too.
    """

    key: str
    convert: Callable[[Any, Any], Any] | None = None
    kind: type = int
    low: float | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    joins: bool = False

    def check(self, name: str, value: Any) -> None:
        if self.convert is not None:
            Key(name, None, (self.kind,), True, low=self.low).check(value)


@dataclass(frozen=True)
class Table:
    """What one program takes besides its schema; see above."""

    aliases: Mapping[str, Alias] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    without_effect: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """All keys that are taken."""
        return {*self.aliases, *self.fixed, *self.without_effect}

    @property
    def groups(self) -> set[str]:
        """What these names have before a dot."""
        return {name[:end] for name in self.names for end, letter in enumerate(name) if letter == "."}

    def note(self, name: str, value: Any) -> str | None:
        """A line on a key without effect that is set to something else than what it usually is.

        Raises:
            ValueError: the key is fixed, to another value.
        """
        if name in self.fixed:
            expected, reason = self.fixed[name]
            if value != expected:
                raise ValueError(f"Found {name}={shown(value)}; expected {shown(expected)}. {reason}")
            return None
        usual, reason = self.without_effect[name]
        return None if value == usual else f"{name}={shown(value)} has no effect: {reason}"


def replicas(config: Config) -> int:
    """Groups of processes with rows of their own: on Megatron several processes share each row."""
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    megatron = config.actor_rollout_ref.actor.megatron
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return processes
    sharing = math.prod(
        (
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.context_parallel_size,
        )
    )
    return max(1, processes // sharing)


def _of_the_run(config: Config, rows: int) -> int:
    """Rows of a pass over all processes -> rows of one process's pass."""
    return max(1, rows // replicas(config))


def _with_enforce_eager(config: Config, value: bool) -> dict[str, Any]:
    return {"enforce_eager": value} | config.actor_rollout_ref.rollout.vllm.engine_args


def _of_the_sft_run(config: SFTConfig, rows: int) -> int:
    return max(1, rows // (config.trainer.nnodes * config.trainer.n_gpus_per_node))


def _fixed(blocks: tuple[str, ...], entries: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    return {f"{block}.{name}": entry for block in blocks for name, entry in entries.items()}


PASSES = {  # the whole run's size of a pass in rows -> what it is when nothing is set
    f"{ACTOR}.ppo_micro_batch_size": 64,
    f"{REF}.log_prob_micro_batch_size": 128,
    f"{ROLLOUT}.log_prob_micro_batch_size": 128,
    "critic.ppo_micro_batch_size": 64,
}
_TRAINED = (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")

RL = Table(
    aliases={
        **{name: Alias(f"{name}_per_gpu", _of_the_run, low=1) for name in PASSES},
        f"{ACTOR}.optim.clip_grad": Alias(f"{ACTOR}.grad_clip"),
        "critic.optim.clip_grad": Alias("critic.grad_clip"),
        f"{ROLLOUT}.enforce_eager": Alias(
            f"{ROLLOUT}.vllm.engine_args", _with_enforce_eager, kind=bool, joins=True
        ),
        f"{REF}.param_offload": Alias(f"{REF}.fsdp_config.param_offload"),
    },
    fixed={
        "data.tokenizer": (None, "The tokenizer is the one in the model's folder; put yours there."),
        "data.return_raw_input_ids": (
            False,
            "The raw prompt ids are always in the batch, as raw_prompt_ids.",
        ),
        "actor_rollout_ref.hybrid_engine": (
            True,
            f"For rollouts apart set {ROLLOUT}.placement=apart.",
        ),
        f"{ACTOR}.state_masking": (
            True,
            "Only tokens that the policy sampled are trained; this cannot be off.",
        ),
        **_fixed(
            (*_TRAINED, f"{REF}.fsdp_config"),
            {
                "mixed_precision.buffer_dtype": (
                    "fp32",
                    "Buffers such as rotary tables keep their own type.",
                ),
                "mixed_precision.reduce_dtype": ("fp32", _FP32),
                "wrap_policy.min_num_params": (0, _WRAP),
                "wrap_policy.transformer_layer_cls_to_wrap": (None, _WRAP),
                "wrap_policy.disable": (False, _WRAP),
            },
        ),
        **_fixed(
            (f"{ACTOR}.megatron", f"{REF}.megatron", "critic.megatron"),
            {
                "sequence_parallel": (
                    True,
                    "With tensor parallelism the activations are shared too.",
                )
            },
        ),
        f"{ACTOR}.policy_loss.clip_cov_lb": (1.0, _CLIP_COV),
        f"{ACTOR}.policy_loss.clip_cov_ub": (5.0, _CLIP_COV),
        "critic.loss_agg_mode": ("token-mean", "The critic's loss is a mean over tokens."),
        **_fixed((f"{ACTOR}.optim", "critic.optim"), {"total_training_steps": (-1, _LENGTH)}),
        **_fixed((ACTOR, REF, "critic", "reward_model"), {"load_weight": (True, _START)}),
        **_fixed(("critic.kl_ctrl",), {"type": ("fixed", _NO_KL), "kl_coef": (0.001, _NO_KL)}),
        **_fixed(
            ("reward_model",),
            {
                "enable": (False, _NEURAL),
                "strategy": ("fsdp", _NEURAL),
                "model.input_tokenizer": (None, _NEURAL),
                "model.path": (None, _NEURAL),
                "model.external_lib": (None, _NEURAL),
                "model.use_remove_padding": (False, _NEURAL),
                "model.trust_remote_code": (False, _NEURAL),
                "model.fsdp_config.min_num_params": (0, _NEURAL),
                "model.fsdp_config.param_offload": (False, _NEURAL),
                "micro_batch_size": (64, _NEURAL),
                "max_length": (None, _NEURAL),
                "ulysses_sequence_parallel_size": (1, _NEURAL),
                "use_dynamic_bsz": (False, _NEURAL),
                "forward_max_token_len_per_gpu": (32768, _NEURAL),
                "truncation": ("right", _NEURAL),
                "param_offload": (False, _NEURAL),
                "megatron.tensor_model_parallel_size": (4, _NEURAL),
                "megatron.pipeline_model_parallel_size": (1, _NEURAL),
                "megatron.num_layers_per_virtual_pipeline_stage": (None, _NEURAL),
                "megatron.sequence_parallel": (True, _NEURAL),
                "megatron.seed": (1, _NEURAL),
            },
        ),
        "algorithm.no_think_rl": (
            False,
            "It would train on text that the policy did not write in this form.",
        ),
        "algorithm.state_masking.start_state_marker": ("<information>", _TAGS),
        "algorithm.state_masking.end_state_marker": ("</information>", _TAGS),
        "trainer.default_hdfs_dir": (None, _HDFS),
        f"{ROLLOUT}.ignore_eos": (False, "A turn ends at the end-of-sequence token."),
    },
    without_effect={
        **_fixed(
            (f"{ACTOR}.megatron", f"{REF}.megatron", "critic.megatron"),
            {"seed": (1, "weights come from the model's folder, and no layer draws at random.")},
        ),
        f"{ROLLOUT}.load_format": (
            "dummy_dtensor",
            "every engine takes the trainer's weights; none loads a file of its own.",
        ),
        f"{ROLLOUT}.layer_name_map.qkv_layer_name": (
            "qkv",
            "weights reach every engine under Hugging Face's names.",
        ),
        f"{ROLLOUT}.layer_name_map.gate_proj_layer_name": (
            "gate_up",
            "weights reach every engine under Hugging Face's names.",
        ),
        **_fixed(
            ("critic",),
            {
                f"forward_{name}": (None, "the critic's passes are of one size, that of ppo_.")
                for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
            },
        ),
        **_fixed(
            (REF, ROLLOUT),
            {
                "log_prob_max_token_len_per_gpu": (
                    None,
                    f"passes without gradient are of {ACTOR}.ppo_max_token_len_per_gpu tokens too.",
                )
            },
        ),
        "data.return_raw_chat": (False, "the chat messages of each row are kept where they are needed."),
    },
    removed={
        f"{ROLLOUT}.compile": "The native engine decodes without torch.compile.",
        f"{ROLLOUT}.block_size": "It is 32; of vLLM it is rollout.vllm.engine_args.block_size.",
        f"{ACTOR}.entropy_ctrl.type": "The weight is adaptive when entropy_ctrl.target_entropy is set.",
        f"{ACTOR}.entropy_ctrl.min_coeff": "It is 0.",
        f"{ACTOR}.entropy_ctrl.max_coeff": "It is 0.1.",
        f"{ACTOR}.entropy_ctrl.delta": "It is 0.001 a step.",
        f"{ACTOR}.policy_loss.aipo_max_ratio": "It is 5.",
        f"{ACTOR}.policy_loss.ipo_eps": "It is 0.3.",
        f"{ACTOR}.optim.adamw_lr": "It is lr.",
        f"{REF}.fsdp_config.model_dtype": "It is bf16 on CUDA and fp32 on CPU.",
        f"{ROLLOUT}.vllm.sleep_level": "It is 1, and 2 where the trainer's weights are offloaded.",
        f"{ROLLOUT}.vllm.weight_transfer": "It is NCCL on CUDA and gloo on CPU.",
        "trainer.cpus_per_process": "It is 0.25.",
        "algorithm.filter_groups.refill": "No refill is algorithm.filter_groups.max_num_gen_batches=1.",
        "algorithm.rae_decay": "It is 0.95.",
        "data.difficulty_pools.easy_threshold": "It is 1: every trajectory of the group right.",
        "data.difficulty_pools.hard_threshold": "It is 0: none right.",
        **dict.fromkeys(
            ("trainer.rollout_pool.nnodes", "trainer.rollout_pool.n_gpus_per_node"),
            f"Rollouts apart are servers: {ROLLOUT}.placement=apart.",
        ),
    },
)

SFT = Table(
    aliases={
        "data.micro_batch_size": Alias("data.micro_batch_size_per_gpu", _of_the_sft_run, low=1),
        "optim.warmup_steps_ratio": Alias("optim.lr_warmup_steps_ratio"),
        "optim.lr_scheduler": Alias("optim.warmup_style"),
        "trainer.resume_path": Alias("trainer.resume_from_path", also={"trainer.resume_mode": "from_path"}),
    },
    fixed={
        "data.use_shm": (False, _SHM),
        "data.custom_cls.path": (None, _CUSTOM),
        "data.custom_cls.name": (None, _CUSTOM),
        "model.use_liger": (False, "Logits are made for trained tokens only and in chunks already."),
        "model.use_shm": (False, _SHM),
        "model.fsdp_config.wrap_policy.min_num_params": (0, _WRAP),
        "model.fsdp_config.cpu_offload": (False, _OFFLOAD),
        "model.fsdp_config.offload_params": (False, _OFFLOAD),
        "model.fsdp_config.mixed_precision.reduce_dtype": ("fp32", _FP32),
        "ulysses_sequence_parallel_size": (
            1,
            "Supervised rows are short: each process trains on whole ones.",
        ),
        "trainer.default_hdfs_dir": (None, _HDFS),
    },
    without_effect={
        "data.balance_dp_token": (
            False,
            "the loss is always a mean over the trained tokens of all processes.",
        ),
        "model.strategy": ("fsdp2", "fsdp and fsdp2 both mean FSDP2."),
    },
)

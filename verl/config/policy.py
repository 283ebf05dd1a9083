"""Keys below `actor_rollout_ref`: the policy, its update, its rollouts, the reference and the teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.blocks import Fsdp, ModelWithAdapters, Optim, follows_actor
from verl.config.keys import Block, group, key, must_follow

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
STRATEGIES = ("fsdp", "fsdp2", "megatron")
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
LOSS_MODES = (
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
    "dro_sequence",
    "gpg",
    "importance_sampling",
    "clip_cov",
    "kl_cov",
    "sft",
    "distillation",
)
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass(slots=True)
class Policy(ModelWithAdapters):
    """The policy."""

    use_remove_padding: bool = key(
        True,
        "sequences end to end in a forward pass; false: each padded to the longest one beside it. Loss and "
        "gradient are the same",
    )
    path: str = key(
        None,
        "Hugging Face folder of the policy (weights, config, tokenizer), or its name on the hub",
        is_path=True,
    )


@dataclass(slots=True)
class PolicyLoss(Block):
    """Which policy loss, and what single losses read besides the clip ratios."""

    loss_mode: str = key(
        "vanilla",
        "vanilla (PPO) | gspo | geo_mean | sapo | cispo | aipo | ipo | dppo_tv | dppo_kl | dro | "
        "dro_sequence | gpg | importance_sampling | clip_cov | kl_cov | sft | distillation, or your own as "
        "package.module:function",
        choices=LOSS_MODES,
        importable=True,
    )
    clip_cov_ratio: float = key(
        0.0002, "clip_cov: share of a mini-batch's sampled tokens that get no gradient", gt=0, le=1
    )
    kl_cov_ratio: float = key(
        0.0002, "kl_cov: share of the sampled tokens, of the greatest covariance, with a penalty", gt=0, le=1
    )
    ppo_kl_coef: float = key(
        0.1, "kl_cov: weight of that penalty, the distance to the old log-prob (the paper: 1)", ge=0
    )
    dro_beta: float = key(0.05, "dro: strength of the pull to the old policy (reward per nat)", gt=0)
    # Constants: settings of single losses that stay as their papers have them.
    aipo_max_ratio: float = 5.0  # aipo: the probability ratio counts at most this much
    ipo_eps: float = 0.3  # ipo: a token whose probability moved further gets no gradient
    clip_cov_lb: float = 1.0  # clip_cov: tokens with a covariance of log-prob (nats) and advantage above this
    clip_cov_ub: float = 5.0  # and below this
    ipo_kl_tau: float = 0.0  # ipo: weight of the squared log-ratio


@dataclass(slots=True)
class EntropyControl(Block):
    """An entropy bonus whose weight moves so that the entropy stays above a target."""

    target_entropy: float | None = key(
        None,
        "mean entropy of the sampled tokens (nats) below which the weight grows, above which it shrinks "
        "(null: the weight is entropy_coeff all along)",
        ge=0,
    )
    # Constants: by how much the weight moves per step, and its bounds.
    delta: float = 0.001
    max_coeff: float = 0.1
    min_coeff: float = 0.0


@dataclass(slots=True)
class Megatron(Block):
    """How megatron-core cuts the model (strategy=megatron); of fsdp_config offloads and dtypes hold too."""

    tensor_model_parallel_size: int = key(1, "processes that share each layer's matrices", ge=1)
    pipeline_model_parallel_size: int = key(
        1, "stages of consecutive layers, in processes of their own", ge=1
    )
    context_parallel_size: int = key(1, "processes that share the tokens of each sequence", ge=1)
    num_layers_per_virtual_pipeline_stage: int | None = key(
        None, "layers of one of a process's several stages (null: one stage)", ge=1
    )
    sequence_parallel: ClassVar[bool] = True  # with tensor parallelism: activations are shared too


@dataclass(slots=True)
class MegatronAsActor(Block):
    """The same for the models that share the actor's processes."""

    tensor_model_parallel_size: int = follows_actor("actor.megatron.tensor_model_parallel_size")
    pipeline_model_parallel_size: int = follows_actor("actor.megatron.pipeline_model_parallel_size")
    context_parallel_size: int = follows_actor("actor.megatron.context_parallel_size")
    num_layers_per_virtual_pipeline_stage: int | None = follows_actor(
        "actor.megatron.num_layers_per_virtual_pipeline_stage"
    )
    sequence_parallel: ClassVar[bool] = True


@dataclass(slots=True)
class Actor(Block):
    """The policy's update."""

    strategy: str = key(
        "fsdp",
        "fsdp or fsdp2: both mean FSDP2 (nothing is sharded with one process) | megatron: megatron-core, as "
        "the megatron block below says. The critic's is the same",
        choices=STRATEGIES,
    )
    ppo_mini_batch_size: int = key(256, "trajectories per optimizer step, whole run; times rollout.n", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "trajectories per forward pass of one process (null: 64 over all processes)", ge=1
    )
    use_dynamic_bsz: bool = key(
        False, "form micro-batches by token count instead of by rows, in every pass of every model"
    )
    ppo_max_token_len_per_gpu: int = key(
        16384, "tokens per micro-batch of one process with use_dynamic_bsz", ge=1
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", gt=0)
    clip_ratio: float = key(
        0.2,
        "PPO clips the probability ratio to [1 - clip_ratio, 1 + clip_ratio]. geo_mean: the log-ratio; "
        "dppo_tv: change of the probability; dppo_kl: KL of the token (nats)",
        ge=0,
        le=1,
    )
    clip_ratio_low: float | None = key(None, "lower bound's own value (null: clip_ratio)", ge=0, le=1)
    clip_ratio_high: float | None = key(None, "upper bound's own value (null: clip_ratio)", ge=0)
    clip_ratio_c: float | None = key(
        None, "dual clip: bound on the loss of negative advantages (null: off); dppo: on the ratio", gt=1
    )
    tau_pos: float = key(
        1.0, "sapo: how fast the gate closes as the ratio leaves 1, positive advantages", gt=0
    )
    tau_neg: float = key(1.05, "the same, negative advantages", gt=0)
    policy_loss: PolicyLoss = group(PolicyLoss)
    loss_agg_mode: str = key(
        "token-mean",
        "token-mean | token-sum | seq-mean-token-sum | seq-mean-token-sum-norm | seq-mean-token-mean (gspo, "
        "geo_mean and sapo are meant for it; dro_sequence for seq-mean-token-sum) | prompt-mean",
        choices=(*LOSS_AGG_MODES, "prompt-mean"),
    )
    loss_scale_factor: float | None = key(
        None,
        "what seq-mean-token-sum-norm divides by besides rows (null: the longest response of the step, "
        "observations included; Dr. GRPO's is a constant: set one)",
        gt=0,
    )
    echo_coeff: float = key(
        0.0, "weight of the mean cross-entropy of observation tokens (0: they are not trained)", ge=0
    )
    entropy_coeff: float = key(0.001, "weight of the entropy bonus (with a target_entropy: where it starts)")
    entropy_ctrl: EntropyControl = group(EntropyControl)
    use_kl_loss: bool = key(False, "true: KL to the reference is in the loss; false: in the reward (kl_ctrl)")
    kl_loss_coef: float = key(0.001, "weight of that KL", ge=0)
    kl_loss_type: str = key(
        "low_var_kl",
        "its estimator: abs | mse or k2 | low_var_kl or k3 | with +, as in k1+, k3+: the value of that one, "
        "the gradient of k2. (kl or k1 alone: no gradient on average)",
        choices=(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)),
    )
    ppo_epochs: int = key(1, "passes over a step's trajectories", ge=1)
    shuffle: bool = key(
        False,
        "shuffle a step's trajectories before they are split into mini-batches, and the order of the "
        "mini-batches in each epoch",
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "processes that share each pack's tokens, for long contexts; must divide the attention heads and "
        "the processes, and costs two exchanges a layer",
        ge=1,
    )
    optim: Optim = group(Optim)
    fsdp_config: Fsdp = group(Fsdp)
    megatron: Megatron = group(Megatron)


@dataclass(slots=True)
class ReferencePrecision(Block):
    """As the actor computes."""

    param_dtype: str | None = follows_actor("actor.fsdp_config.mixed_precision.param_dtype")
    reduce_dtype: ClassVar[str] = "fp32"


@dataclass(slots=True)
class ReferenceFsdp(Block):
    """The reference's memory."""

    param_offload: bool = key(False, "CUDA: keep the reference's weights in CPU memory between uses")
    reshard_after_forward: bool = follows_actor("actor.fsdp_config.reshard_after_forward")
    fsdp_size: int = follows_actor("actor.fsdp_config.fsdp_size")
    model_dtype: ClassVar[None] = None  # weights as the computation: bf16 on CUDA, fp32 on CPU
    mixed_precision: ReferencePrecision = group(ReferencePrecision)


@dataclass(slots=True)
class ReferenceConfig(Block):
    """The frozen model that a KL is measured to; it shares the actor's processes."""

    reset_every: int | None = key(
        None, "every this many steps the reference becomes the policy (null: never)", ge=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "trajectories per forward pass of one process (null: 128 over all processes)", ge=1
    )
    log_prob_max_token_len_per_gpu: int = follows_actor("actor.ppo_max_token_len_per_gpu")
    log_prob_use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    ulysses_sequence_parallel_size: int = follows_actor("actor.ulysses_sequence_parallel_size")
    fsdp_config: ReferenceFsdp = group(ReferenceFsdp)
    megatron: MegatronAsActor = group(MegatronAsActor)


@dataclass(slots=True)
class Teacher(Block):
    """A model to learn from."""

    path: str | None = key(
        None,
        "Hugging Face folder of a frozen model whose log-probs the policy_loss distillation reads; its "
        "tokenizer must be the policy's (null: none). ref's settings are its own",
        is_path=True,
    )


@dataclass(slots=True)
class Vllm(Block):
    """What vLLM alone reads."""

    engine_args: dict[str, Any] = key(
        {}, "more arguments for vLLM's engine, as vLLM names them: {kv_cache_dtype: fp8}"
    )
    python: str | None = key(
        None, "apart: interpreter that has vLLM, for the servers (null: the trainer's)", is_path=True
    )
    num_servers: int = key(1, "apart: servers to start", ge=1)
    server_urls: str | list[str] | None = key(
        None, "apart: servers that run already, http://host:port or [list] (null: start some)"
    )


@dataclass(slots=True)
class Rollout(Block):
    """Sampling trajectories."""

    name: str = key(
        "auto",
        "native (ours) | vllm | auto: vllm on CUDA if it is installed, native on CPU",
        choices=("auto", "native", "vllm"),
    )
    placement: str = key(
        "colocated",
        "colocated (an engine in each process) | apart (servers of their own; vllm)",
        choices=("colocated", "apart"),
    )
    temperature: float = key(
        1.0, "sampling temperature in training; greedy training rollouts are do_sample=false", ge=1e-3
    )
    top_k: int = key(-1, "sample among the k most likely tokens (-1: all)", ge=-1)
    top_p: float = key(1.0, "sample within this much probability mass", gt=0, le=1)
    min_p: float = key(0.0, "drop tokens below this share of the most likely token's probability", ge=0, le=1)
    do_sample: bool = key(True, "false: greedy training rollouts")
    n: int = key(1, "repeats per prompt (verl's name); multiplies ppo_mini_batch_size", ge=1)
    n_agent: int = key(1, "repeats per prompt (Search-R1's name); the group is n * n_agent", ge=1)
    dtype: str = key(
        "auto",
        "type of the rollout's weights: bfloat16 | float32 | auto (as the actor computes)",
        choices=("auto", "bfloat16", "float32"),
    )
    gpu_memory_utilization: float = key(
        0.5,
        "CUDA: share of the GPU's memory for the KV cache (native: no more than what is free; vllm: its "
        "weights too)",
        ge=0.01,
        le=1,
    )
    kv_cache_gb: float | None = key(
        None,
        "CPU: GiB for the KV cache (null: what max_num_seqs sequences need, at most 4); native has a packed "
        "copy of the weights beside it",
        gt=0,
    )
    free_cache_engine: bool = key(True, "give the KV cache's memory back while the policy is trained")
    tensor_model_parallel_size: int = key(
        1, "apart: GPUs that one server's weights are split over (colocated: no effect)", ge=1
    )
    max_num_batched_tokens: int = key(8192, "most tokens that one prefill pass takes", ge=1)
    max_num_seqs: int = key(1024, "most trajectories decoded at once in one process", ge=1)
    max_in_flight: int | None = key(
        None, "most trajectories under way in one process, those that search too (null: all)", ge=1
    )
    straggler_factor: float | None = key(
        None,
        "cut a group's last members (at most half of it) when they have taken more than this many times the "
        "batch's median trajectory time (null: never)",
        ge=1,
    )
    keep_partial: bool = key(
        False, "false: what is cut is left out; true: its group goes on in the next step"
    )
    search_delay_steps: int | None = key(
        None,
        "an observation joins exactly this many decode steps after its search was asked: makes batching "
        "repeatable (null: as soon as it is there)",
        ge=0,
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "trajectories per forward pass of old log-probs in one process (null: 128 over all processes)",
        ge=1,
    )
    log_prob_max_token_len_per_gpu: int = follows_actor("actor.ppo_max_token_len_per_gpu")
    log_prob_use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    prompt_length: int = must_follow("data.max_prompt_length", "Set that key.")
    response_length: int = must_follow("data.max_response_length", "Set that key.")
    vllm: Vllm = group(Vllm)
    block_size: ClassVar[int] = 32  # positions per block of the KV cache
    ignore_eos: ClassVar[bool] = False  # a trajectory ends at the end-of-sequence token


@dataclass(slots=True)
class ActorRolloutRef(Block):
    """The policy in all its parts."""

    model: Policy = group(Policy)
    actor: Actor = group(Actor)
    ref: ReferenceConfig = group(ReferenceConfig)
    teacher: Teacher = group(Teacher)
    rollout: Rollout = group(Rollout)

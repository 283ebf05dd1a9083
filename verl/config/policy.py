"""Keys of models and their optimizers, and the keys below `actor_rollout_ref`.

The latter are those of the policy, its update, its rollouts, the reference and the teacher.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from verl.config.keys import (
    Block,
    Count,
    FilePath,
    NotNegative,
    OrMinusOne,
    Positive,
    PositiveShare,
    Range,
    Share,
    Whole,
    config_block,
    follows_actor,
    group,
    key,
    must_follow,
)

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))


@config_block
class Optim(Block):
    """An optimizer and its schedule."""

    name: str = key("adamw", "muon: the layers' matrices; AdamW for all else", "adamw muon")
    lr: NotNegative = key(1e-6, "peak learning rate")
    lr_warmup_steps: OrMinusOne = key(-1, "linear warm-up, in steps (-1: use the ratio)")
    lr_warmup_steps_ratio: Share = key(0.0, "linear warm-up, as a share of the run's steps")
    min_lr_ratio: Share | None = key(None, "where a decaying schedule ends, as a share of lr (null: 0)")
    warmup_style: str = key("constant", "what follows the warm-up", "constant cosine linear")
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates")
    weight_decay: NotNegative = key(0.01, "decoupled weight decay, of AdamW and of Muon")
    adamw_lr: float | None = None  # not a key; muon: learning rate of what AdamW trains (null: lr)
    momentum: ClassVar[float] = 0.95  # muon: decay rate of the gradient's average
    total_training_steps: int = -1  # not a key; length of the schedule in steps, filled in by the trainer


@config_block
class MixedPrecision(Block):
    """The types of the computation. Gradients are summed over processes in fp32."""

    param_dtype: str | None = key(
        None,
        "of the computation (null: bf16 on CUDA, fp32 on CPU; fastest: bf16 on CPU too where it is faster)",
        "fp32 bf16 fastest",
    )


@config_block
class Fsdp(Block):
    """The memory of a trained model: how it is kept and cut over processes."""

    param_offload: bool = key(False, "CUDA: keep the weights in CPU memory between uses")
    optimizer_offload: bool = key(False, "CUDA: keep the optimizer's state in CPU memory between updates")
    reshard_after_forward: bool = key(
        True, "several processes: gather a layer's weights for each pass; false: once per optimizer step"
    )
    fsdp_size: OrMinusOne = key(-1, "shard within groups of so many processes, and replicate (-1: one group)")
    model_dtype: str = key("fp32", "type of the trained weights", "fp32 bf16")
    mixed_precision: MixedPrecision = group(MixedPrecision)


@config_block
class Model(Block):
    """A model that is trained, whole or by adapters."""

    external_lib: str | None = key(None, "python module imported first, e.g. with a model class")
    override_config: dict[str, Any] = key({}, "values that replace those of the model's config.json")
    enable_gradient_checkpointing: bool = key(False, "recompute activations: less memory, slower")
    trust_remote_code: bool = key(False, "allow the model folder's own python code")
    lora_rank: Whole = key(0, "train LoRA adapters of this rank, not the model itself (0: the model)")
    lora_alpha: Positive = key(16, "an adapter's product counts lora_alpha / lora_rank times")
    target_modules: str | list[str] = key(
        "all-linear",
        "layers with adapters: all-linear (but the output matrix), names, or a regular expression",
    )


@config_block
class ModelWithAdapters(Model):
    """A model that may go on from adapters."""

    lora_adapter_path: FilePath | None = key(None, "PEFT folder to go on from; KL is to the model without")


@config_block
class Policy(ModelWithAdapters):
    """The policy."""

    use_remove_padding: bool = key(True, "sequences end to end; false: padded (the loss is the same)")
    path: FilePath = key(None, "Hugging Face folder of the policy, or its name on the hub")


@config_block
class PolicyLoss(Block):
    """The choice of the policy loss, and what single losses read besides the clip ratios."""

    loss_mode: str = key(
        "vanilla",
        "the policy's loss (vanilla: PPO), or your own as package.module:function",
        "vanilla gspo geo_mean sapo cispo aipo ipo dppo_tv dppo_kl dro dro_sequence gpg "
        "importance_sampling clip_cov kl_cov sft distillation",
        importable=True,
    )
    clip_cov_ratio: PositiveShare = key(0.0002, "clip_cov: share of the sampled tokens without gradient")
    kl_cov_ratio: PositiveShare = key(0.0002, "kl_cov: share of the sampled tokens with a penalty")
    ppo_kl_coef: NotNegative = key(0.1, "kl_cov: weight of that penalty, the distance to the old log-prob")
    dro_beta: Positive = key(0.05, "dro: strength of the pull to the old policy (reward per nat)")
    # Constants: settings of single losses that stay as in their papers.
    aipo_max_ratio: float = 5.0  # aipo: the probability ratio counts at most this much
    ipo_eps: float = 0.3  # ipo: a token whose probability moved further gets no gradient
    clip_cov_lb: float = 1.0  # clip_cov: least covariance of log-prob (nats) and advantage of a drawn token
    clip_cov_ub: float = 5.0  # clip_cov: its greatest covariance
    ipo_kl_tau: float = 0.0  # ipo: weight of the squared log-ratio


@config_block
class EntropyControl(Block):
    """An entropy bonus whose weight moves so that the entropy stays above a target."""

    target_entropy: NotNegative | None = key(None, "mean entropy (nats) to hold by the weight (null: fixed)")
    delta: float = 0.001  # constant: by how much the weight moves per step
    max_coeff: float = 0.1  # constant: greatest weight
    min_coeff: float = 0.0  # constant: least weight


@config_block
class Megatron(Block):
    """The way megatron-core cuts the model (strategy=megatron).

    Offloads and dtypes of fsdp_config hold too.
    """

    tensor_model_parallel_size: Count = key(1, "processes that share each layer's matrices")
    pipeline_model_parallel_size: Count = key(1, "stages of consecutive layers, in processes of their own")
    context_parallel_size: Count = key(1, "processes that share the tokens of each sequence")
    sequence_parallel: ClassVar[bool] = True  # with tensor parallelism: activations are shared too


@config_block
class Actor(Block):
    """The policy's update."""

    strategy: str = key("fsdp", "of actor and critic; fsdp and fsdp2 both mean FSDP2", "fsdp fsdp2 megatron")
    ppo_mini_batch_size: Count = key(256, "trajectories per optimizer step, whole run; times rollout.n")
    ppo_micro_batch_size_per_gpu: Count | None = key(None, "trajectories of a pass (null: 64 in all)")
    use_dynamic_bsz: bool = key(False, "micro-batches by tokens, not rows, in every pass of every model")
    ppo_max_token_len_per_gpu: Count = key(16384, "tokens of a micro-batch with use_dynamic_bsz")
    grad_clip: Positive = key(1.0, "largest norm of the gradient")
    max_step_kl: Positive | None = key(
        None, "most nats per token by which an optimizer step moves the policy; longer ones are shortened"
    )
    clip_ratio: Share = key(0.2, "most change of the ratio (geo_mean: its log; dppo: probability, or KL)")
    clip_ratio_low: Share | None = key(None, "lower bound's own value (null: clip_ratio)")
    clip_ratio_high: NotNegative | None = key(None, "upper bound's own value (null: clip_ratio)")
    clip_ratio_c: Annotated[float, Range(1, above=True)] | None = key(
        None, "dual clip: bound on the loss of negative advantages; dppo: on the ratio"
    )
    tau_pos: Positive = key(1.0, "sapo: how fast the gate closes as the ratio leaves 1, positive advantages")
    tau_neg: Positive = key(1.05, "the same, negative advantages")
    policy_loss: PolicyLoss = group(PolicyLoss)
    loss_agg_mode: str = key(
        "token-mean",
        "gspo, geo_mean and sapo: seq-mean-token-mean",
        "token-mean token-sum seq-mean-token-sum seq-mean-token-sum-norm seq-mean-token-mean prompt-mean",
    )
    loss_scale_factor: Positive | None = key(None, "divisor of seq-mean-token-sum-norm (null: longest row)")
    echo_coeff: NotNegative = key(0.0, "weight of the cross-entropy of observations (0: not trained)")
    entropy_coeff: float = key(0.001, "weight of the entropy bonus (with a target_entropy: where it starts)")
    entropy_ctrl: EntropyControl = group(EntropyControl)
    use_kl_loss: bool = key(False, "true: KL to the reference is in the loss; false: in the reward (kl_ctrl)")
    kl_loss_coef: NotNegative = key(0.001, "weight of that KL")
    kl_loss_type: str = key(
        "low_var_kl",
        "its estimator; with +: the value of that one, the gradient of k2",
        "kl k1 abs mse k2 low_var_kl k3 kl+ k1+ abs+ mse+ k2+ low_var_kl+ k3+",
    )
    ppo_epochs: Count = key(1, "passes over a step's trajectories")
    shuffle: bool = key(False, "shuffle trajectories before they become mini-batches, and these")
    ulysses_sequence_parallel_size: Count = key(
        1, "processes that share each pack's tokens; must divide heads and processes"
    )
    optim: Optim = group(Optim)
    fsdp_config: Fsdp = group(Fsdp)
    megatron: Megatron = group(Megatron)


@config_block
class ReferenceFsdp(Block):
    """The reference's memory."""

    param_offload: bool = key(False, "CUDA: keep the reference's weights in CPU memory between uses")
    optimizer_offload: ClassVar[bool] = False  # a frozen model has no optimizer
    reshard_after_forward: bool = follows_actor("actor.fsdp_config.reshard_after_forward")
    fsdp_size: int = follows_actor("actor.fsdp_config.fsdp_size")
    model_dtype: ClassVar[None] = None  # weights have the type of the computation: bf16 on CUDA, fp32 on CPU
    mixed_precision: MixedPrecision = group(MixedPrecision, "actor.fsdp_config.mixed_precision")


@config_block
class ReferenceConfig(Block):
    """The frozen model that a KL is measured to; it shares the actor's processes."""

    reset_every: Count | None = key(None, "so often (steps) the reference becomes the policy (null: never)")
    log_prob_micro_batch_size_per_gpu: Count | None = key(None, "trajectories of a pass (null: 128 in all)")
    log_prob_max_token_len_per_gpu: int = follows_actor("actor.ppo_max_token_len_per_gpu")
    log_prob_use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    ulysses_sequence_parallel_size: int = follows_actor("actor.ulysses_sequence_parallel_size")
    fsdp_config: ReferenceFsdp = group(ReferenceFsdp)
    megatron: Megatron = group(Megatron, "actor.megatron")


@config_block
class Teacher(Block):
    """A model to learn from."""

    path: FilePath | None = key(None, "frozen model for the loss distillation, with the policy's tokenizer")


@config_block
class Vllm(Block):
    """The keys that only vLLM reads."""

    engine_args: dict[str, Any] = key({}, "more of vLLM's arguments, as {kv_cache_dtype: fp8}")


@config_block
class RemoteServers(Block):
    """The keys that only name=remote reads."""

    urls: str | list[str] | None = key(None, "servers that run already, http://host:port")


@config_block
class Rollout(Block):
    """The sampling of trajectories."""

    name: str = key(
        "auto",
        "native is ours; remote: servers that run already; auto: vllm on CUDA if there is one",
        "auto native vllm remote",
    )
    placement: str = key(
        "colocated", "in each process that trains; apart: in others, ahead of training", "colocated apart"
    )
    num_processes: Count = key(1, "apart: processes that sample, each with an engine")
    weight_transfer: str = key(
        "ray",
        "apart: by Ray's store, broadcasts in a group (NCCL, gloo), or files: all of them or what changed",
        "ray collective filesystem delta",
    )
    weight_backend: str = key(
        "auto",
        "of broadcasts: to processes apart (collective), to vLLM's servers (auto: NCCL from GPU to GPU)",
        "auto nccl gloo",
    )
    weight_dir: FilePath | None = key(
        None, "folder of those files, seen by all nodes and by remote servers (null: the run's)"
    )
    anchor_every: Count = key(50, "delta: every so many versions all weights are written")
    temperature: Annotated[float, Range(0.001)] = key(1.0, "sampling temperature in training")
    top_k: OrMinusOne = key(-1, "sample among the k most likely tokens (-1: all)")
    top_p: PositiveShare = key(1.0, "sample within this much probability mass")
    min_p: Share = key(0.0, "drop tokens below this share of the most likely token's probability")
    do_sample: bool = key(True, "false: greedy training rollouts")
    n: Count = key(1, "repeats per prompt (verl's name); multiplies ppo_mini_batch_size")
    n_agent: Count = key(1, "repeats per prompt (Search-R1's name); the group is n * n_agent")
    dtype: str = key("auto", "of the rollout's weights; auto: as the actor computes", "auto bfloat16 float32")
    gpu_memory_utilization: Annotated[float, Range(0.01, 1)] | None = key(
        None, "CUDA: share of the GPU for the KV cache, and vLLM's weights (null: what the plan leaves)"
    )
    kv_cache_gb: Positive | None = key(None, "CPU: GiB of KV cache (null: what max_num_seqs need, at most 4)")
    free_cache_engine: bool = key(True, "give the KV cache's memory back while the policy is trained")
    tensor_model_parallel_size: Count | None = key(
        None, "vLLM: processes (apart: devices) that share one model (null: as few as its size asks for)"
    )
    max_num_batched_tokens: Count = key(8192, "most tokens that one prefill pass takes")
    max_num_seqs: Count = key(1024, "most trajectories decoded at once in one engine")
    max_in_flight: Count | None = key(None, "most trajectories under way in one engine (null: all)")
    straggler_factor: Annotated[float, Range(1)] | None = key(
        None, "cut the slowest of a group after so many times the batch's median time (null: never)"
    )
    search_delay_steps: Whole | None = key(None, "decode steps to an observation (null: when it is there)")
    step_wise: bool = key(False, "each turn is a row of the update, not each trajectory; same gradient")
    log_prob_micro_batch_size_per_gpu: Count | None = key(None, "trajectories of a pass (null: 128 in all)")
    log_prob_max_token_len_per_gpu: int = follows_actor("actor.ppo_max_token_len_per_gpu")
    log_prob_use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    prompt_length: int = must_follow("data.max_prompt_length", "Set that key.")
    response_length: int = must_follow("data.max_response_length", "Set that key.")
    vllm: Vllm = group(Vllm)
    remote: RemoteServers = group(RemoteServers)
    block_size: ClassVar[int] = 32  # positions per block of the KV cache


@config_block
class ActorRolloutRef(Block):
    """The policy in all its parts."""

    model: Policy = group(Policy)
    actor: Actor = group(Actor)
    ref: ReferenceConfig = group(ReferenceConfig)
    teacher: Teacher = group(Teacher)
    rollout: Rollout = group(Rollout)

"""The schema: every key of the programs, in the order of their yaml.

The programs are `python -m verl.trainer.main_ppo` (reinforcement learning: `Config`) and
`python -m verl.trainer.fsdp_sft_trainer` (supervised training: `SFTConfig`).

Lengths are tokens, batch sizes are rows, times are seconds, unless a key says otherwise. A "process" is one
training process: one per GPU, or nnodes * n_gpus_per_node of them on CPU.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from verl.config.environments import EnvironmentConfig, VerifiersConfig
from verl.config.keys import (
    Block,
    Count,
    FilePath,
    Files,
    NotNegative,
    OrMinusOne,
    Positive,
    Range,
    Share,
    Whole,
    config_block,
    follows_actor,
    group,
    key,
    key_like,
    must_follow,
)
from verl.config.policy import (
    ACTOR,
    ActorRolloutRef,
    Fsdp,
    Megatron,
    MixedPrecision,
    Model,
    ModelWithAdapters,
    Optim,
    ReferenceFsdp,
)
from verl.config.prompt_selection import PromptSelection


@config_block
class Data(Block):
    """The rows of questions, and limits on the length of a trajectory."""

    train_files: Files = key(None, 'parquet or jsonl file or [list of files]; "~" is expanded')
    val_files: Files = key(None, "the same, for validation")
    mixture: list[dict] | None = key(
        None,
        "instead of train_files: [{path, amount, ratio, verifier, env_class, name, n, splits, env}, ...]",
    )
    streaming: bool | None = key(
        None, "read training rows while the run goes on (null: above 200,000, or 256 MiB, of jsonl 64 MiB)"
    )
    extra_val_files: Files | None = key(None, "more questions, asked at the first and last validation")
    train_data_num: Count | None = key(None, "so many training rows, drawn with a fixed seed (null: all)")
    val_data_num: Count | None = key(None, "the same, for validation")
    prompt_key: str = key("prompt", "column with the chat messages [{role, content}, ...]")
    max_prompt_length: Count = key(512, "longest context of a trajectory: prompt and all turns")
    max_response_length: Count = key(512, "most tokens that the policy writes in one turn")
    max_start_length: Count = key(256, "of the initial prompt the last this many tokens are kept")
    max_obs_length: Count = key(512, "longest observation; of a longer one the closing tag stays")
    truncation: str = key("error", "longer prompt; left: keep its end; skip: the row", "error left skip")
    train_batch_size: Count = key(1024, "prompts per training step, before they are repeated to groups")
    val_batch_size: Count = key(1312, "prompts per validation batch; the last batch may be smaller")
    shuffle_train_dataloader: bool = key(True, "new order of the training rows each epoch")


@config_block
class CriticOptim(Optim):
    """The critic's optimizer."""

    lr: NotNegative = key_like(Optim, "lr", 1e-5)
    name: str = follows_actor("actor.optim.name")


@config_block
class CriticModel(Model):
    """The critic's model: the policy's settings, except those that decide its memory."""

    path: FilePath = key(None, "the critic starts from this model", follows="actor_rollout_ref.model.path")
    tokenizer_path: str | None = must_follow("actor_rollout_ref.model.path", "It reads the policy's ids.")
    use_remove_padding: bool = follows_actor("model.use_remove_padding")
    lora_adapter_path: ClassVar[None] = None
    fsdp_config: Fsdp = group(Fsdp, "actor.fsdp_config", but="param_offload optimizer_offload")


@config_block
class Critic(Block):
    """The value model of estimators such as gae; it shares the actor's processes."""

    optim: CriticOptim = group(CriticOptim)
    model: CriticModel = group(
        CriticModel, "model", but="path lora_rank enable_gradient_checkpointing fsdp_config"
    )
    ppo_mini_batch_size: Count = key(
        0,
        "trajectories per optimizer step, whole run; times rollout.n",
        follows=f"{ACTOR}.ppo_mini_batch_size",
    )
    ppo_micro_batch_size_per_gpu: Count | None = key(None, "trajectories of a pass (null: 64 in all)")
    ppo_max_token_len_per_gpu: Count = key(32768, "tokens of a micro-batch with use_dynamic_bsz")
    grad_clip: Positive = key(1.0, "largest norm of the gradient")
    cliprange_value: Positive = key(0.5, "the value may move this far from the old one before it is clipped")
    loss_agg_mode: ClassVar[str] = "token-mean"
    ppo_epochs: int = follows_actor("actor.ppo_epochs")
    strategy: str = follows_actor("actor.strategy")
    shuffle: bool = follows_actor("actor.shuffle")
    ulysses_sequence_parallel_size: int = follows_actor("actor.ulysses_sequence_parallel_size")
    use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    megatron: Megatron = group(Megatron, "actor.megatron")


@config_block
class OverlongBuffer(Block):
    """A penalty for trajectories that near their limit of length."""

    enable: bool = key(False, "take something off the training reward of trajectories that near their limit")
    len: Count = key(128, "from so many tokens before the limit of the context or turn")
    penalty_factor: NotNegative = key(1.0, "taken off at the limit; evenly less before it")


@config_block
class RewardModel(Block):
    """The rewards of a trajectory besides exact match."""

    structure_format_score: Share = key(0.0, "main_ppo_format: well-formed, but a wrong answer")
    final_format_score: Share = key(0.0, "main_ppo_format: malformed and a wrong answer")
    retrieval_score: Share = key(0.0, "main_ppo_format: added when a document holds the answer")
    search_cost: Share = key(0.0, "share of a training reward above 0 that each search takes off (0: none)")
    overlong_buffer: OverlongBuffer = group(OverlongBuffer)


@config_block
class RewardFunction(Block):
    """A reward function of the user's own."""

    path: FilePath | None = key(None, "python file with the user's reward function")
    name: str = key("compute_score", "its name; gets data_source, solution_str, ground_truth, extra_info")


@config_block
class Retriever(Block):
    """The retrieval server. A key that it asks for is read from the environment (SEARCH_R1_API_KEY)."""

    url: str | list[str] = key("http://127.0.0.1:8000/retrieve", "address of the server, or [list]")
    topk: Count = key(3, "documents per search")
    timeout: Positive = key(60.0, "deadline of a search with its retries (seconds)")
    max_failed_share: Share = key(0.5, "the run stops when a larger share of a step is left out")
    use_proxy: bool = key(False, "true: reach it through the proxies that the environment names")
    corpus_path: FilePath | None = key(None, "the corpus that is meant; a server of another one is refused")


@config_block
class KlControl(Block):
    """The weight of the KL in the reward."""

    type: str = key("fixed", "of the weight", "fixed adaptive")
    kl_coef: NotNegative = key(0.001, "weight of the KL in the reward (adaptive: its start)")
    target_kl: Positive | None = key(None, "adaptive: the KL to aim at")
    horizon: Positive | None = key(None, "adaptive: how fast, in trajectories")


@config_block
class RolloutCorrection(Block):
    """The correction of a rollout engine whose probabilities are not the trainer's.

    A ratio is that of the trainer to the engine.
    """

    rollout_is: str | None = key(None, "weight the loss by ratios of tokens, or rows", "token sequence null")
    rollout_is_threshold: Annotated[float, Range(1)] = key(2.0, "weights are cut off above this")
    rollout_is_batch_normalize: bool = key(False, "divide the weights by their mean over the step")
    rollout_rs: str | None = key(
        None,
        "leave out tokens or rows out of bounds: token, geometric (by their mean), sequence, or verl's names",
    )
    rollout_rs_threshold: float | str | None = key(
        None, "upper bound: token 2 to 5, geometric 1.001 to 1.01, sequence 2 to 10"
    )
    rollout_rs_threshold_lower: Share | None = key(None, "lower bound (null: 1 / upper bound; 0: none)")
    bypass_mode: bool = key(False, "true: the engine's log-probs are the old ones; no pass for old log-probs")


@config_block
class AlgorithmConfig(Block):
    """The way from rewards to advantages."""

    adv_estimator: str = key(
        "gae",
        "the estimator of advantages, or your own as package.module:function",
        "gae grpo grpo_passk rloo reinforce_plus_plus reinforce_plus_plus_baseline remax opo gpg "
        "gdpo maxrl rae optimal_token_baseline tir_optimal_token_baseline",
        importable=True,
    )
    gamma: Share = key(1.0, "discount per token that the policy sampled")
    lam: Share = key(1.0, "lambda of GAE")
    norm_adv_by_std_in_grpo: bool = key(True, "GRPO: divide by the group's standard deviation")
    gdpo_reward_keys: list[str] | None = key(None, "gdpo: names of rewards that the reward function returns")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: their weights, a [list] (null: 1 each)")
    turn_credit: NotNegative = key(0.0, "weight of turn_rewards, or of 1 for the first search with an answer")
    thrift: NotNegative = key(0.0, "weight of having searched less than a question's other right answers")
    overlong_filter: bool = key(False, "true: trajectories that a limit of length has cut take no part")
    kl_penalty: str = key("kl", "estimator of the KL in the reward", "kl k1 abs mse k2 low_var_kl k3")
    kl_ctrl: KlControl = group(KlControl)
    rollout_correction: RolloutCorrection = group(RolloutCorrection)
    rae_decay: ClassVar[float] = 0.95  # share of a data source's running mean that remains after one score


@config_block
class RunSettings(Block):
    """Keys of `trainer` that reinforcement learning and supervised training share."""

    total_epochs: Count = key(30, "passes over the training rows; gives the number of steps")
    total_training_steps: Count | None = key(None, "stop after this many steps instead")
    project_name: str = key("verl_examples", "names of the run in the loggers and in default_local_dir")
    experiment_name: str = key("gsm8k", "as project_name")
    logger: list[str] = key(["console"], "any of console, wandb, tensorboard, mlflow")
    nnodes: Count = key(1, "machines")
    n_gpus_per_node: Count = key(1, "training processes per machine; it may have more GPUs, for other runs")
    backend: str = key(
        "auto",
        "local: in this process; auto: local for one process, ray for several or rollouts apart",
        "auto local ray",
        gone={"folder": "That backend was removed. On Ray, use python -m verl.rl @ run.yaml."},
    )
    device: str = key("auto", "auto: cuda if there is one, a GPU for each process", "auto cpu cuda")
    seed: Whole = key(0, "of everything random in the run")
    save_freq: OrMinusOne = key(-1, "checkpoint every this many steps (-1: only the last)")
    test_freq: OrMinusOne = key(-1, "validate every this many steps (-1: only the first and the last)")
    default_local_dir: FilePath = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "the run's folder"
    )
    resume_mode: str = key(
        "auto",
        "auto: the newest checkpoint, if any; latest: it must exist; none: an earlier run is renamed",
        "auto none latest from_path",
    )
    resume_from_path: FilePath | None = key(None, "with from_path: folder of a step; later ones are renamed")
    max_ckpt_to_keep: Count | None = key(3, "older checkpoints are deleted (null: keep all)")
    remote_dir: str | None = key(
        None, "checkpoints are uploaded there too: s3://.., gs://.., file://.. (fsspec)"
    )
    remote_keep: Count | None = key(None, "older ones are deleted there (null: keep all)")
    upload_deadline: Positive = key(3600, "seconds until the upload of a checkpoint is given up")
    async_checkpoint: bool = key(True, "write checkpoints while the next step runs, from a copy")
    doctor_skip: list[str] = key([], "checks of verl.preflight that the start leaves out")
    progress: str = key("auto", "live is a display, plain lines; auto: live on a terminal", "auto live plain")
    max_skipped_updates: Count = key(10, "the run stops after so many updates in a row without a finite loss")


@config_block
class AsyncTraining(Block):
    """Rollouts that go on while the policy is trained (with rollout.placement=apart)."""

    max_staleness: Whole = key(0, "updates since a trained row's oldest token, at most (0: no overlap)")
    in_flight_updates: bool = key(True, "new weights come in the midst of turns; false: turns end first")
    recompute_kv: bool = key(True, "new weights compute the KV cache again; false: they go on with it")
    too_old: str = key("drop", "batches wait for slow groups; mask: old turns are left out", "drop mask")
    group_deadline: Positive = key(1800, "seconds until an unfinished group is given up and asked again")
    repeatable: bool = key(False, "weights change between batches: the same run every time")


@config_block
class Trainer(RunSettings):
    """The run."""

    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate the model, or the checkpoint that resume_mode finds, and stop")
    val_modes: list[str] = key(["greedy"], "greedy, sampled or both; the first gives val/test_score")
    evals: list[dict] | None = key(
        None,
        "more sets to measure: [{files, name, every, n, rollouts, temperature, solved_at, retriever}, ...]",
    )
    critic_warmup: Whole = key(0, "steps in which only the critic is trained")
    max_restarts: Whole = key(0, "on Ray: how often the run goes on from a checkpoint after a death")
    on_collapse: str = key(
        "warn",
        "when the policy collapses: warn, stop, or rewind to a checkpoint from before, at half the rate",
        "warn stop rewind",
    )
    max_rewinds: Whole = key(2, "on_collapse=rewind: how often at most; later collapses are warned of")
    restart_timeout: NotNegative = key(600, "seconds that a restart waits for the cluster to have room again")
    dry_run: bool = key(False, "print who goes where and the memory of it, and end")
    dry_run_gpu_memory_gb: Positive | None = key(None, "dry run: GiB of each GPU (null: this machine's)")
    num_trajectories_logged: Whole = key(16, "trajectories kept as text, per step and per validation")
    async_training: AsyncTraining = group(AsyncTraining)
    cpus_per_process: ClassVar[float] = 0.25  # Ray's CPUs that each process reserves: several fit on a core


@config_block
class Config(Block):
    """The whole configuration of a run of reinforcement learning."""

    data: Data = group(Data)
    prompt_selection: PromptSelection = group(PromptSelection)
    actor_rollout_ref: ActorRolloutRef = group(ActorRolloutRef)
    critic: Critic = group(Critic)
    reward_model: RewardModel = group(RewardModel)
    custom_reward_function: RewardFunction = group(RewardFunction)
    verifiers: VerifiersConfig = group(VerifiersConfig)
    retriever: Retriever = group(Retriever)
    environment: EnvironmentConfig = group(EnvironmentConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    trainer: Trainer = group(Trainer)
    max_turns: Whole = key(10, "most searches, then one last turn without; in other environments most turns")
    do_search: bool = key(True, "false: answer without a search engine")


# ---- supervised training; the names are verl's ----


@config_block
class Multiturn(Block):
    """Rows that are whole conversations."""

    enable: bool = key(False, "true: rows are whole conversations; assistant messages are trained")
    messages_key: str = key("messages", "column: [{role, content}, ...]; `trained: false` leaves one out")
    tools_key: str = key("tools", "column with the tools that the chat template shows, where there is one")
    enable_thinking_key: str = key("enable_thinking", "column for the chat template's enable_thinking")


@config_block
class SFTData(Block):
    """The rows of text, and which of it is trained."""

    train_files: Files = key(None, 'parquet or jsonl file, or [list of files]; "~" is expanded')
    val_files: Files | None = key(None, "the same, for the validation loss (null: none)")
    train_batch_size: Count = key(256, "rows per optimizer step, whole run")
    micro_batch_size_per_gpu: Count | None = key(None, "most rows per pass of one process (null: no limit)")
    max_token_len_per_gpu: Count = key(16384, "most tokens per pass; a longer row stands alone")
    prompt_key: str = key("question", "column with the prompt: text (one user message), or chat messages")
    response_key: str = key("answer", "column with the response: text, or the last of its messages")
    prompt_dict_keys: list[str] | None = key(None, "[names] that lead to the prompt inside of the column")
    response_dict_keys: list[str] | None = key(None, "the same for the response")
    multiturn: Multiturn = group(Multiturn)
    segments_key: str | None = key(None, "column with rows in pieces, [{text, trained}, ...]")
    observation_tag: str | None = key("information", "text between these tags is never trained (null: none)")
    max_length: Annotated[int, Range(2)] = key(1024, "longest row")
    truncation: str = key("error", "longer row: stop, or cut there", "error left right")
    chat_template: FilePath | None = key(None, "Jinja text, or a file with it, in place of the tokenizer's")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the chat template")
    shuffle: bool = key(True, "new order of the rows each epoch (seeded by trainer.seed)")


@config_block
class SFTFsdp(Block):
    """The memory of the model: how it is kept and cut over processes."""

    model_dtype: str = key_like(Fsdp, "model_dtype", "fp32")
    mixed_precision: MixedPrecision = group(MixedPrecision)
    reshard_after_forward: bool = key_like(Fsdp, "reshard_after_forward", True)
    param_offload: ClassVar[bool] = False
    optimizer_offload: ClassVar[bool] = False
    fsdp_size: ClassVar[int] = -1


AnyFsdp = Fsdp | SFTFsdp | ReferenceFsdp  # the memory of a model in a worker


@config_block
class SFTModel(ModelWithAdapters):
    """The model."""

    partial_pretrain: FilePath = key(None, "Hugging Face folder or hub name to start from")
    fsdp_config: SFTFsdp = group(SFTFsdp)

    @property
    def path(self) -> str:
        """Return the model's path, under the name that other blocks use."""
        return self.partial_pretrain


@config_block
class SFTOptim(Optim):
    """The optimizer and its schedule."""

    lr: NotNegative = key_like(Optim, "lr", 1e-5)
    lr_warmup_steps_ratio: Share = key_like(Optim, "lr_warmup_steps_ratio", 0.1)
    warmup_style: str = key_like(Optim, "warmup_style", "cosine")
    betas: list[float] = key_like(Optim, "betas", [0.9, 0.95])
    clip_grad: Positive = key(1.0, "largest norm of the gradient")


@config_block
class SFTTrainer(RunSettings):
    """The run; the trained model is in <default_local_dir>/huggingface at the end."""

    project_name: str = key_like(RunSettings, "project_name", "search-r1-sft")
    experiment_name: str = key_like(RunSettings, "experiment_name", "test")
    total_epochs: Count = key_like(RunSettings, "total_epochs", 4)
    seed: Whole = key_like(RunSettings, "seed", 1)


@config_block
class SFTConfig(Block):
    """The whole configuration of supervised training."""

    data: SFTData = group(SFTData)
    model: SFTModel = group(SFTModel)
    optim: SFTOptim = group(SFTOptim)
    use_remove_padding: bool = key(True, "sequences end to end; false: padded (the loss is the same)")
    trainer: SFTTrainer = group(SFTTrainer)

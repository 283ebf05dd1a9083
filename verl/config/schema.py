"""Every key of `python -m verl.trainer.main_ppo` (reinforcement learning), in the order of its yaml.

Lengths are tokens, batch sizes are rows, times are seconds, unless a key says otherwise. "process" is one
training process: one per GPU, or nnodes * n_gpus_per_node of them on CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.blocks import Fsdp, MixedPrecision, Model, Optim, RunSettings, follows_actor
from verl.config.keys import Block, group, key, must_follow, same_as
from verl.config.policy import ACTOR, KL_ESTIMATORS, ActorRolloutRef, MegatronAsActor

ESTIMATORS = (
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
VAL_MODES = ("greedy", "sampled")
LOGGERS = ("console", "wandb", "tensorboard", "mlflow")


@dataclass(slots=True)
class PoolsConfig(Block):
    """Which prompts a step draws."""

    enable: bool = key(False, "draw a step's prompts by how often the policy solved them when last asked")
    easy_share: float = key(
        0.1, "of a step's prompts, drawn from those whose group was solved every time", ge=0, le=1
    )
    hard_share: float = key(
        0.1, "the same, never solved; the rest is solved at times or not yet measured", ge=0, le=1
    )
    easy_threshold: ClassVar[float] = 1.0  # easy from this mean score of the group up
    hard_threshold: ClassVar[float] = 0.0  # hard from this one down


@dataclass(slots=True)
class Data(Block):
    """Rows of questions, and how long a trajectory may be."""

    train_files: str | list[str] = key(None, 'parquet file or [list of files]; "~" is expanded', is_path=True)
    val_files: str | list[str] = key(None, "the same, for validation", is_path=True)
    extra_val_files: str | list[str] | None = key(
        None, "more questions, asked at the first and last validation and reported apart", is_path=True
    )
    train_data_num: int | None = key(
        None, "use this many training rows, drawn with a fixed seed (null: all)", ge=1
    )
    val_data_num: int | None = key(None, "the same, for validation", ge=1)
    prompt_key: str = key("prompt", "column with the chat messages [{role, content}, ...]")
    max_prompt_length: int = key(
        512, "longest whole context of a trajectory: prompt, turns, observations (tokens)", ge=1
    )
    max_response_length: int = key(512, "most tokens that the policy writes in one turn", ge=1)
    max_start_length: int = key(256, "of the initial prompt the last this many tokens are kept", ge=1)
    max_obs_length: int = key(
        512, "longest observation (tokens); a longer one is cut, its closing tag stays", ge=1
    )
    truncation: str = key(
        "error",
        "prompt longer than max_prompt_length: error (stop) | left (keep its end)",
        choices=("error", "left"),
    )
    train_batch_size: int = key(1024, "prompts per training step, before they are repeated to groups", ge=1)
    val_batch_size: int = key(1312, "prompts per validation batch; the last batch may be smaller", ge=1)
    shuffle_train_dataloader: bool = key(
        True, "new order of the training rows each epoch (seeded by trainer.seed)"
    )
    difficulty_pools: PoolsConfig = group(PoolsConfig)


@dataclass(slots=True)
class CriticOptim(Optim):
    """The critic's optimizer."""

    lr: float = same_as(Optim, "lr", 1e-5)
    name: str = follows_actor("actor.optim.name")


@dataclass(slots=True)
class CriticPrecision(MixedPrecision):
    """As the actor computes."""

    param_dtype: str | None = follows_actor("actor.fsdp_config.mixed_precision.param_dtype")


@dataclass(slots=True)
class CriticFsdp(Fsdp):
    """The critic's memory; it is cut over processes as the actor is."""

    reshard_after_forward: bool = follows_actor("actor.fsdp_config.reshard_after_forward")
    fsdp_size: int = follows_actor("actor.fsdp_config.fsdp_size")
    model_dtype: str = follows_actor("actor.fsdp_config.model_dtype")
    mixed_precision: CriticPrecision = group(CriticPrecision)


@dataclass(slots=True)
class CriticModel(Model):
    """The critic's model: the policy's settings, but for those that decide its memory."""

    path: str = key(
        None,
        "Hugging Face folder the critic starts from",
        follows="actor_rollout_ref.model.path",
        is_path=True,
    )
    lora_rank: int = key(0, "as for the actor; the value head is trained whole", ge=0)
    tokenizer_path: str | None = must_follow(
        "actor_rollout_ref.model.path", "The critic reads the policy's token ids."
    )
    external_lib: str | None = follows_actor("model.external_lib")
    override_config: dict[str, Any] = follows_actor("model.override_config")
    use_remove_padding: bool = follows_actor("model.use_remove_padding")
    trust_remote_code: bool = follows_actor("model.trust_remote_code")
    lora_alpha: float = follows_actor("model.lora_alpha")
    target_modules: str | list[str] = follows_actor("model.target_modules")
    lora_adapter_path: ClassVar[None] = None
    fsdp_config: CriticFsdp = group(CriticFsdp)


@dataclass(slots=True)
class Critic(Block):
    """The value model of estimators such as gae; it shares the actor's processes."""

    optim: CriticOptim = group(CriticOptim)
    model: CriticModel = group(CriticModel)
    ppo_mini_batch_size: int = key(
        0,
        "trajectories per optimizer step, whole run; times rollout.n",
        ge=1,
        follows=f"{ACTOR}.ppo_mini_batch_size",
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "trajectories per forward pass of one process (null: 64 over all processes)", ge=1
    )
    ppo_max_token_len_per_gpu: int = key(
        32768, "tokens per micro-batch of one process with use_dynamic_bsz", ge=1
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", gt=0)
    cliprange_value: float = key(
        0.5, "the value may move this far from the old one before it is clipped", gt=0
    )
    loss_agg_mode: ClassVar[str] = "token-mean"
    ppo_epochs: int = follows_actor("actor.ppo_epochs")
    strategy: str = follows_actor("actor.strategy")
    shuffle: bool = follows_actor("actor.shuffle")
    ulysses_sequence_parallel_size: int = follows_actor("actor.ulysses_sequence_parallel_size")
    use_dynamic_bsz: bool = follows_actor("actor.use_dynamic_bsz")
    megatron: MegatronAsActor = group(MegatronAsActor)

    @property
    def forward_micro_batch_size_per_gpu(self) -> int | None:
        """Of a pass without gradient; as large as one with."""
        return self.ppo_micro_batch_size_per_gpu

    @property
    def forward_max_token_len_per_gpu(self) -> int:
        """As above, in tokens."""
        return self.ppo_max_token_len_per_gpu


@dataclass(slots=True)
class OverlongBuffer(Block):
    """A penalty for trajectories that near their limit of length."""

    enable: bool = key(False, "take something off the training reward of trajectories that near their limit")
    len: int = key(
        128,
        "from so many tokens before the limit (max_prompt_length; in the last turn max_response_length too)",
        ge=1,
    )
    penalty_factor: float = key(1.0, "taken off at the limit; evenly less before it", ge=0)


@dataclass(slots=True)
class RewardModel(Block):
    """What a trajectory earns besides exact match."""

    structure_format_score: float = key(
        0.0, "main_ppo_format: reward of a well-formed trajectory with a wrong answer", ge=0, le=1
    )
    final_format_score: float = key(
        0.0, "main_ppo_format: reward of a wrong answer in a malformed trajectory", ge=0, le=1
    )
    retrieval_score: float = key(
        0.0, "main_ppo_format: added when a retrieved document holds a golden answer", ge=0, le=1
    )
    search_cost: float = key(
        0.0, "share of a training reward above 0 that each search takes off (0: none)", ge=0, le=1
    )
    overlong_buffer: OverlongBuffer = group(OverlongBuffer)


@dataclass(slots=True)
class RewardFunction(Block):
    """A reward function of the user's own."""

    path: str | None = key(None, "python file with the user's reward function", is_path=True)
    name: str = key(
        "compute_score", "its name; called with data_source, solution_str, ground_truth, extra_info"
    )


@dataclass(slots=True)
class Retriever(Block):
    """The retrieval server. A key that it asks for is read from the environment (SEARCH_R1_API_KEY)."""

    url: str | list[str] = key(
        "http://127.0.0.1:8000/retrieve", "address of the retrieval server, or [list of addresses]"
    )
    topk: int = key(3, "documents per search", ge=1)
    timeout: float = key(
        60.0,
        "deadline of one search with its retries (seconds): an outage that lasts no longer costs nothing "
        "but time; after it the trajectory is left out",
        gt=0,
    )
    max_failed_share: float = key(
        0.5, "the run stops when a larger share of a step's trajectories is left out", ge=0, le=1
    )
    use_proxy: bool = key(False, "true: reach it through the proxies that the environment names")
    corpus_path: str | None = key(
        None,
        "the corpus that is meant, a jsonl file: compared at the start with what each server says that it "
        "serves (null: not compared)",
        is_path=True,
    )


@dataclass(slots=True)
class FilterGroups(Block):
    """Prompts that teach nothing (DAPO)."""

    enable: bool = key(False, "leave out prompts whose trajectories all have the same reward (DAPO)")
    metric: str | None = key(
        None,
        "what must differ: seq_reward (the training reward) | acc (exact match) | a number that the reward "
        "function returns (null: seq_reward; gdpo: any of its rewards)",
    )
    max_num_gen_batches: int = key(
        10,
        "rounds of generation in a step, at most, until train_batch_size prompts teach something (1: train "
        "fewer instead; 0: until all rows were asked)",
        ge=0,
    )

    @property
    def refill(self) -> bool:
        """Whether a step that lacks groups asks more prompts."""
        return self.max_num_gen_batches != 1


@dataclass(slots=True)
class KlControl(Block):
    """The weight of the KL in the reward."""

    type: str = key("fixed", "fixed | adaptive", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL in the reward (adaptive: its start)", ge=0)
    target_kl: float | None = key(None, "adaptive: the KL to aim at", gt=0)
    horizon: float | None = key(None, "adaptive: how fast, in trajectories", gt=0)


@dataclass(slots=True)
class RolloutCorrection(Block):
    """For a rollout engine whose probabilities are not the trainer's; ratio: trainer to engine."""

    rollout_is: str | None = key(
        None,
        "weight the policy loss by the ratio: token (each token's) | sequence (its row's product) | null "
        "(no weights)",
        choices=("token", "sequence", None),
    )
    rollout_is_threshold: float = key(2.0, "weights are cut off above this", ge=1)
    rollout_is_batch_normalize: bool = key(False, "divide the weights by their mean over the step")
    rollout_rs: str | None = key(
        None,
        "don't train what is out of bounds: token | geometric (rows, by the geometric mean of their ratios) "
        "| sequence (rows, by the product) | verl's names, in quotes with commas | null (train everything)",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "upper bound of the ratio, above 1: token 2 to 5, geometric 1.001 to 1.01, sequence 2 to 10; with "
        "verl's names as in verl",
    )
    rollout_rs_threshold_lower: float | None = key(
        None, "lower bound (null: 1 / upper bound; 0: none)", ge=0, le=1
    )
    bypass_mode: bool = key(False, "true: the engine's log-probs are the old ones; no pass for old log-probs")


@dataclass(slots=True)
class AlgorithmConfig(Block):
    """From rewards to advantages."""

    adv_estimator: str = key(
        "gae",
        "gae | grpo | grpo_passk | rloo | reinforce_plus_plus | remax | opo | gpg | gdpo | "
        "reinforce_plus_plus_baseline | maxrl | rae | optimal_token_baseline | tir_optimal_token_baseline, "
        "or your own as package.module:function",
        choices=ESTIMATORS,
        importable=True,
    )
    gamma: float = key(1.0, "discount per token that the policy sampled", ge=0, le=1)
    lam: float = key(1.0, "lambda of GAE", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, "GRPO: divide by the group's standard deviation")
    gdpo_reward_keys: list[str] | None = key(
        None, "gdpo: [list] of numbers that the reward function returns, each a reward of its own"
    )
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: their weights, a [list] (null: 1 each)")
    turn_credit: float = key(
        0.0,
        "weight of the rewards of single turns (0: the outcome alone): turn_rewards of the reward function, "
        "or 1 for the first search that finds a golden answer",
        ge=0,
    )
    filter_groups: FilterGroups = group(FilterGroups)
    overlong_filter: bool = key(False, "true: trajectories that a limit of length has cut take no part")
    kl_penalty: str = key(
        "kl",
        "estimator of the KL in the reward: kl or k1 | abs | mse or k2 | low_var_kl or k3",
        choices=KL_ESTIMATORS,
    )
    kl_ctrl: KlControl = group(KlControl)
    rollout_correction: RolloutCorrection = group(RolloutCorrection)
    rae_decay: ClassVar[float] = 0.95  # what one score leaves of the running mean of its data source


@dataclass(slots=True)
class Trainer(RunSettings):
    """The run."""

    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate the model, or the checkpoint that resume_mode finds, and stop")
    val_modes: list[str] = key(
        ["greedy"],
        "ask each question in these ways: greedy | sampled (temperature 1); the first one gives "
        "val/test_score",
    )
    critic_warmup: int = key(0, "steps in which only the critic is trained", ge=0)
    max_restarts: int = key(
        0,
        "with Ray: how often the run goes on by itself from its last checkpoint when a worker, a node or a "
        "rollout engine is gone",
        ge=0,
    )
    restart_timeout: float = key(600, "seconds that a restart waits for the cluster to have room again", ge=0)
    dry_run: bool = key(
        False, "print who goes where and what memory that takes, and end: 0 if it fits, else 2"
    )
    dry_run_gpu_memory_gb: float | None = key(
        None,
        "dry run: GiB of each GPU that the run is for (null: this machine's; no GPU: its CPU memory)",
        gt=0,
    )
    num_trajectories_logged: int = key(
        16, "trajectories kept as text per step, training and validation each", ge=0
    )
    cpus_per_process: ClassVar[float] = 0.25  # of Ray's CPUs, reserved by each process: several fit on a core


@dataclass(slots=True)
class Config(Block):
    """The whole configuration of a run of reinforcement learning."""

    data: Data = group(Data)
    actor_rollout_ref: ActorRolloutRef = group(ActorRolloutRef)
    critic: Critic = group(Critic)
    reward_model: RewardModel = group(RewardModel)
    custom_reward_function: RewardFunction = group(RewardFunction)
    retriever: Retriever = group(Retriever)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    trainer: Trainer = group(Trainer)
    max_turns: int = key(10, "most searches per trajectory; then one last turn without search", ge=0)
    do_search: bool = key(True, "false: answer without a search engine")

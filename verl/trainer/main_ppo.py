"""Entry point: `python -m verl.trainer.main_ppo key=value ...` (wiring only).

Reads the configuration, checks what can be checked before anything expensive starts, and puts dataset, reward,
agent, workers and trainer together. Exact match is the reward; `verl.trainer.main_ppo_format` is the same
program with the structure reward.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl.trainer.config import parse_arguments, validate


def build_trainer(config: DictConfig, train_score: Callable[..., Any] | None = None) -> Any:
    """Put a `RayPPOTrainer` together; no process is started and no model loaded yet.

    Args:
        config: validated configuration.
        train_score: replaces the scoring of training rows (`main_ppo_format`); validation is always exact match.

    Returns:
        RayPPOTrainer: call `init_workers()`, `fit()`, and `shutdown()` whatever happens.
    """
    from transformers import AutoTokenizer

    from search_r1.llm_agent.generation import build_agent
    from search_r1.llm_agent.trajectory import env_metrics
    from verl.single_controller.base import ClassWithInitArgs
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
    from verl.workers.reward_manager import RewardManager, load_reward_function

    model = config.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    pool = "global_pool"
    pools = ResourcePoolManager(
        resource_pool_spec={pool: [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
        mapping={role: pool for role in Role},
        backend=config.trainer.backend,
        use_gpu=config.trainer.device == "cuda",
    )
    pools.create_resource_pool()
    actor_role = RayPPOTrainer.actor_role(config)
    workers = {
        actor_role: ClassWithInitArgs(
            ActorRolloutRefWorker,
            config=config.actor_rollout_ref,
            role=actor_role.value,
            agent_factory=functools.partial(build_agent, config),
        )
    }
    if RayPPOTrainer.needs_critic(config):
        workers[Role.Critic] = ClassWithInitArgs(CriticWorker, config=config.critic)
    user_score = load_reward_function(config.custom_reward_function)
    extra = config.data.extra_val_files
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=workers,
        resource_pool_manager=pools,
        reward_fn=RewardManager(tokenizer, num_examine=0, compute_score=user_score or train_score),
        val_reward_fn=RewardManager(tokenizer, num_examine=0, compute_score=user_score),
        trajectory_metrics=env_metrics,
        train_dataset=RLHFDataset(config.data.train_files, tokenizer, config.data, config.data.train_data_num),
        val_dataset=RLHFDataset(config.data.val_files, tokenizer, config.data, config.data.val_data_num),
        extra_val_dataset=RLHFDataset(extra, tokenizer, config.data, None) if extra else None,
    )


def check_retriever(config: DictConfig) -> None:
    """Ask the retrieval server one question.

    Raises:
        ValueError: it does not answer, or not in Search-R1's format.
    """
    from search_r1.search.client import SearchClient, SearchError

    client = SearchClient(config.retriever.url, topk=config.retriever.topk, timeout=min(10.0, config.retriever.timeout))
    try:
        client.batch_search(["is anybody there?"], topk=1)
    except SearchError as error:
        raise ValueError(
            f"retriever.url={config.retriever.url} does not answer searches: {error}. Start a server with "
            "`bash retrieval_launch.sh`, or set do_search=false to train without one."
        ) from error
    finally:
        client.close()


def run(argv: list[str], train_score_factory: Callable[[DictConfig], Callable[..., Any]] | None = None) -> int:
    """The program: parse, check, train. Returns the exit status; a user's mistake is one line on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` runs
    try:
        config = parse_arguments(argv)
        validate(config)
        if config.do_search:
            check_retriever(config)
        trainer = build_trainer(config, train_score_factory(config) if train_score_factory else None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        trainer.init_workers()
        trainer.fit()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        trainer.shutdown()
    return 0


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

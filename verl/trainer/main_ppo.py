"""Entry point: `python -m verl.trainer.main_ppo key=value ...` (wiring only).

The program reads the configuration, checks what can be checked before anything expensive starts, and puts
dataset, reward, agent, workers and trainer together. The reward is exact match;
`verl.trainer.main_ppo_format` is the same program with the structure reward.

Modules that need torch are imported inside the functions, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import Config, Loaded
from verl.config.checks import check_config
from verl.config.command_line import read_arguments
from verl.config.loading import absolute_folders
from verl.data.remote_rows import with_local_rows
from verl.plugins import hook
from verl.utils.announcing import announce, gc_paused
from verl.utils.early_signals import end_on_signals
from verl.utils.logs import start_logging
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.planning.placement import Role
    from verl.single_controller.base import ClassWithInitArgs, Worker
    from verl.trainer.command import Command
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.stop_request import StopRequest
    from verl.utils.reward_score import RewardFunction


# The loading of the models waits so long for mistakes in rows; the first step waits for all rows.
_SECONDS_FOR_ROWS = 2.0


def worker_classes(config: Config) -> tuple[type[Worker], type[Worker]]:
    """Return the class of the actor and that of the critic, both on FSDP2 or both on megatron-core."""
    from verl.workers import fsdp_workers, megatron_workers

    if config.actor_rollout_ref.actor.strategy == "megatron":
        return megatron_workers.MegatronActorRolloutRefWorker, megatron_workers.MegatronCriticWorker
    return fsdp_workers.ActorRolloutRefWorker, fsdp_workers.CriticWorker


def _worker(role: Role, config: Config) -> ClassWithInitArgs:
    """Return the class of a role's workers, with its arguments."""
    from verl.planning.placement import Role
    from verl.single_controller.base import ClassWithInitArgs

    actor_class, critic_class = worker_classes(config)
    block = config.actor_rollout_ref
    device = config.trainer.device
    seed = config.trainer.seed
    agent_factory = hook("agent_factory")(config)
    if role is Role.Rollout:
        from verl.workers.rollout_worker import RolloutWorker

        return ClassWithInitArgs(RolloutWorker, block, agent_factory, config.trainer.async_training, device)
    if role is Role.Critic:
        return ClassWithInitArgs(critic_class, config.critic, block.rollout.n, device, seed)
    return ClassWithInitArgs(actor_class, block, role.value, agent_factory, device, seed)


def build_trainer(
    config: Config,
    train_score: RewardFunction | None = None,
    stop_request: StopRequest | None = None,
) -> RayPPOTrainer:
    """Build a `RayPPOTrainer`; no process is started and no model is loaded yet.

    Call `init_workers()` and `fit()` next, and `shutdown()` whatever happens.

    Args:
        config: the whole configuration, validated.
        train_score: scores training rows (`main_ppo_format`), while validation stays exact match; None for
            the reward of the configuration.
        stop_request: says whether the run shall end after the present step.
    """
    with gc_paused():
        from verl.data.mixture import Mixture, training_rows
        from verl.data.rl_dataset import RLHFDataset, row_settings
        from verl.data.row_check import RowCheck
        from verl.planning.batch_sizes import fit_batch_sizes
        from verl.planning.passes import Passes
        from verl.planning.placement import Role, build_pools, roles_of, samples_apart
        from verl.trainer.ppo.held_out import HeldOutSets, read_sets
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.trainer.ppo.scoring import RewardManager
        from verl.utils import check_token_ids, hf_tokenizer
        from verl.utils.reward_score import load_reward_function
        from verl.verifiers.registry import Verifiers
        from verl.verifiers.verifier import VerifierSettings
        from verl.workers.engine.loading import load_hf_config

    folders = ("model.path", "model.lora_adapter_path", "teacher.path")
    paths = [*(f"actor_rollout_ref.{key}" for key in folders), "critic.model.path"]
    config = absolute_folders(config, paths)
    model = config.actor_rollout_ref.model
    tokenizer = hf_tokenizer(model.path, correct_pad_token=False, trust_remote_code=model.trust_remote_code)
    passes = Passes(config)
    roles = roles_of(passes)
    vocab_size = load_hf_config(model).get_text_config().vocab_size
    check_token_ids(tokenizer, vocab_size, str(model.path))
    if passes.needs_values:
        critic = config.critic.model
        check_token_ids(tokenizer, load_hf_config(critic).get_text_config().vocab_size, str(critic.path))
    user_score = load_reward_function(config.custom_reward_function)
    extra = config.data.extra_val_files
    data = row_settings(config)
    train_dataset = training_rows(config, tokenizer)
    config, notes = fit_batch_sizes(config, len(train_dataset))
    for note in notes:
        print(f"note: {note}", flush=True)
    val_dataset = RLHFDataset(config.data.val_files, tokenizer, data, config.data.val_data_num)
    evals = read_sets(config, tokenizer, data, val_dataset)
    verifiers = Verifiers(VerifierSettings(config.verifiers, Path(config.trainer.default_local_dir)))
    val_reward_fn = RewardManager(tokenizer, 0, user_score, verifiers)
    extra_val_dataset = RLHFDataset(extra, tokenizer, data, None) if extra else None
    datasets = [
        val_dataset,
        *(train_dataset.datasets if isinstance(train_dataset, Mixture) else [train_dataset]),
    ]
    datasets += [] if extra_val_dataset is None else [extra_val_dataset]
    datasets += [rows for held_out, rows in evals if not held_out.of_validation]
    row_check = RowCheck.of(config, datasets, tokenizer, vocab_size, verifiers).start()
    row_check.wait(_SECONDS_FOR_ROWS)
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={
            role: functools.partial(_worker, role)
            for role in (*roles, *[Role.Rollout] * samples_apart(config))
        },
        resource_pool_manager=build_pools(config, roles),
        reward_fn=RewardManager(tokenizer, 0, user_score or train_score, verifiers),
        val_reward_fn=val_reward_fn,
        trajectory_metrics=hook("trajectory_metrics"),
        train_dataset=train_dataset,
        val_dataset=val_dataset,
        extra_val_dataset=extra_val_dataset,
        evals=HeldOutSets(evals, val_reward_fn, config.data.val_batch_size, config.trainer.seed),
        stop_request=stop_request,
        row_check=row_check,
    )


def run(
    argv: list[str],
    train_score_factory: Callable[[Config], RewardFunction] | None = None,
    command: Command | None = None,
    stop_request: StopRequest | None = None,
) -> int:
    """Run the program: parse the arguments, check them and train.

    Args:
        argv: arguments of the command line.
        train_score_factory: makes the function that scores training rows from the configuration; None for the
            reward of the configuration.
        command: the command of `verl.rl` whose orchestrator this process is; None for a driver without one.
        stop_request: hears the signals that ask the run to stop; None for a new one.

    Returns:
        The exit status. A user's mistake (2) and a run that ends before its time (3) print one line on
        stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        program = "main_ppo" if train_score_factory is None else "main_ppo_format"
        loaded = with_local_rows(read_arguments(argv, module=f"verl.trainer.{program}"))
        check_config(loaded.config, format_reward=train_score_factory is not None)
        if not loaded.config.trainer.dry_run:
            check_before_loading(loaded.config)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    return _train(loaded, train_score_factory, command, stop_request)


def check_before_loading(config: Config) -> None:
    """Look at the user's code, at the environments and at the rows of small files, before torch is loaded.

    Raises ValueError if they can't be used.
    """
    from verl.data.row_check import check_small_files
    from verl.data.row_environments import check_environments
    from verl.utils.reward_score import load_reward_function

    load_reward_function(config.custom_reward_function)
    check_environments(config)  # rows are scored by them
    check_small_files(config)


def _train(
    loaded: Loaded,
    train_score_factory: Callable[[Config], RewardFunction] | None,
    command: Command | None,
    stop_request: StopRequest | None,
) -> int:
    """Train with arguments that have passed the first checks; return the exit status."""
    with announce("loading the libraries"), gc_paused():
        from verl.planning.placement import decide_machine_settings, process_variables, start_ray
        from verl.preflight.preflight import dry_run, passes_quick_checks
        from verl.trainer.config import settings_without_effect, validate
        from verl.trainer.restarts import RestartingRun, run_program

    config: Config = loaded.config

    def start(closing: ExitStack, stop_request: StopRequest) -> RestartingRun | int:
        validate(config, format_reward=train_score_factory is not None)
        for line in (*loaded.notes, *settings_without_effect(config)):
            print(f"note: {printable(line)}")
        if config.trainer.dry_run:
            return dry_run(config)
        with announce("checking settings, machine and search server"):
            is_sound = passes_quick_checks(config, hook("retrieval_probe")())
        if not is_sound:
            return 2
        with announce("starting Ray"):
            closing.enter_context(start_ray(config))
        placed = decide_machine_settings(config)
        for variable, value in process_variables(placed).items():  # workers inherit them
            os.environ.setdefault(variable, value)
        score = train_score_factory(placed) if train_score_factory else None
        build = functools.partial(build_trainer, train_score=score, stop_request=stop_request)
        training = RestartingRun(placed, build, command)
        closing.callback(training.shutdown)
        with announce("starting the processes and loading the models"):
            training.start()
        return training

    return run_program(start, stop_request)


def __getattr__(name: str) -> object:
    """Provide `from verl.trainer.main_ppo import RewardManager`, as in Search-R1."""
    if name == "RewardManager":
        from verl.trainer.ppo.scoring import RewardManager

        return RewardManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    end_on_signals(sys.argv[1:])
    start_logging("main_ppo")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

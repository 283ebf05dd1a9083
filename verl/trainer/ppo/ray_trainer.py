"""The driver of a run: one process that holds the loop, and worker groups that hold the models.

    prompts -> generate (with searches) -> score -> log-probs, values -> advantages
            -> update critic, update actor -> checkpoint, validation

`RayPPOTrainer.fit` reads in that order. The same trainer runs with a Ray worker group (one actor a process,
any number of machines) and with the in-process one (`trainer.backend=local`). With Ray the driver holds rows,
lengths and scores only: weights and tokens never pass through it (see `token_worker`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup
from verl.single_controller.factory import build_worker_groups
from verl.trainer.ppo import core_algos, metric_utils
from verl.trainer.ppo.advantage_inputs import record_columns
from verl.trainer.ppo.algos.aggregation import PROMPT_MEAN
from verl.trainer.ppo.balancing import attention_length
from verl.trainer.ppo.batching import Arrangement, mini_batch_rows, with_columns
from verl.trainer.ppo.checkpoint_writing import CheckpointWriting
from verl.trainer.ppo.collection import TrajectoryCollector
from verl.trainer.ppo.health import HealthMonitor
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.roles import ResourcePoolManager, Role
from verl.trainer.ppo.rollout_apart import RolloutApart
from verl.trainer.ppo.run_state import CheckpointStore, RunState, RunStopped, StoppedOnRequest
from verl.trainer.ppo.token_worker import (
    ADVANTAGE_COLUMNS,
    FIGURE_COLUMNS,
    UPDATE_COLUMNS,
    chosen,
    start_token_worker,
)
from verl.trainer.ppo.validation import ValidationReport, validate
from verl.utils.dataset.difficulty_pools import DifficultyPools
from verl.utils.dataset.rl_dataset import PromptSampler, RLHFDataset
from verl.utils.records import RunRecorder
from verl.utils.records.trajectories import spread_rows
from verl.workers.engine.micro_batches import shuffled
from verl.workers.reward_manager import RewardManager


class RayPPOTrainer:
    """PPO and its critic-free relatives over worker groups; what a run computes is said by `Passes`.

    Args:
        config: the whole configuration (`verl/trainer/config/ppo_trainer.yaml`), validated.
        tokenizer: the policy's tokenizer; used for rewards and records, never to make training ids.
        role_worker_mapping: role -> worker class with its constructor arguments.
        resource_pool_manager: which pool of processes each role lives in.
        reward_fn, val_reward_fn: DataProto -> scores (see `RewardManager`).
        trajectory_metrics: trajectories of a step -> the agent's figures (`env/*`).
        train_dataset, val_dataset: rows of prompts. `extra_val_dataset` is measured at the start and at the
            end, and reported on its own.
        stop_asked: asked after each step; True ends the run there, with a checkpoint.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, ClassWithInitArgs],
        resource_pool_manager: ResourcePoolManager,
        reward_fn: RewardManager,
        val_reward_fn: RewardManager,
        trajectory_metrics: Callable[[list[dict[str, Any]]], dict[str, float]],
        train_dataset: RLHFDataset,
        val_dataset: RLHFDataset,
        extra_val_dataset: RLHFDataset | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.trajectory_metrics = trajectory_metrics
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.extra_val_dataset = extra_val_dataset
        self.stop_asked = stop_asked

        self.passes = Passes.of(config)
        self.kl_controller = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self.health = HealthMonitor()
        self.running_baseline = core_algos.RunningBaseline(config.algorithm.rae_decay)
        self.sampler = self._prompt_sampler()
        self.total_steps = (
            config.trainer.total_training_steps or len(self.sampler) * config.trainer.total_epochs
        )
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            if optim.total_training_steps <= 0:
                optim.total_training_steps = self.total_steps
        self.state = RunState()
        self.num_restarts = 0  # of this run so far (`verl/trainer/restarts.py`)
        self.checkpoints = CheckpointStore(config.trainer.default_local_dir, config.trainer.max_ckpt_to_keep)
        self.checkpoint_writing = CheckpointWriting(self.checkpoints, config.trainer.async_checkpoint)
        trainer = config.trainer
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        if trainer.val_only and self.resume_folder is not None:
            self._check_validation_folder(RunState.load(self.resume_folder).step)
        self.recorder = RunRecorder(config, total_steps=self.total_steps)
        self.collector = TrajectoryCollector(
            config,
            self.passes,
            self._generate_sequences,
            lambda: self.tokens,
            trajectory_metrics,
            train_dataset,
            self.sampler,
            self._say,
        )
        self.worker_groups: dict[str, WorkerGroup] = {}

    def _prompt_sampler(self) -> PromptSampler:
        data = self.config.data
        order = (
            len(self.train_dataset),
            data.train_batch_size,
            data.shuffle_train_dataloader,
            self.config.trainer.seed,
        )
        pools = data.difficulty_pools
        return DifficultyPools(*order, pools) if pools.enable else PromptSampler(*order)

    def _say(self, line: str) -> None:
        self.recorder.display.say(line)

    # ---------------------------------------------------------------- workers

    def init_workers(self) -> None:
        """Take the run folder, start the processes, load the models into them and start the rollout engine.

        Raises:
            ValueError: another run is in the folder, or a model does not fit.
            EngineUnavailable: the rollout engine's servers don't start, or don't answer.
        """
        self.checkpoints.lock()
        pools: dict[int, tuple[ResourcePool, dict[str, ClassWithInitArgs]]] = {}
        for role, worker in self.role_worker_mapping.items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            pools.setdefault(id(pool), (pool, {}))[1][role.value] = worker
        for pool, workers in pools.values():
            backend = self.resource_pool_manager.backend
            self.worker_groups |= build_worker_groups(backend, pool, workers, columns_stay=True)
        actor = next(role for role in self.role_worker_mapping if role not in (Role.Critic, Role.Rollout))
        self.actor_rollout_wg = self.worker_groups[actor.value]
        self.actor_rollout_wg.init_model()
        if self.passes.values:
            self.critic_wg = self.worker_groups[Role.Critic.value]
            self.critic_wg.init_model()
        self.rollout_wg: WorkerGroup | RolloutApart = self.actor_rollout_wg
        if Role.Rollout in self.role_worker_mapping:
            self.rollout_wg = RolloutApart(self.actor_rollout_wg, self.worker_groups[Role.Rollout.value])
        self.rollout_wg.start_rollout(-(-self._most_rows() // self.rollout_wg.world_size))

    @cached_property
    def tokens(self) -> WorkerGroup:
        """The process that looks at tokens, started when it is first needed; a group of one `TokenWorker`."""
        backend, scores = self.resource_pool_manager.backend, (self.reward_fn, self.val_reward_fn)
        group = start_token_worker(backend, self.config, self.tokenizer, *scores)
        self.worker_groups["tokens"] = group
        return group

    def _most_rows(self) -> int:
        """Trajectories of the largest batch that is generated, over all processes."""
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        questions = max(len(self.val_dataset), len(self.extra_val_dataset or ()))
        return max(
            data.train_batch_size * rollout.n_agent * rollout.n,
            min(data.val_batch_size or questions, questions),
        )

    def shutdown(self) -> None:
        """End the workers that this trainer started, and close the records. Safe to call twice."""
        groups, self.worker_groups = self.worker_groups, {}
        self.__dict__.pop("tokens", None)
        try:
            self.recorder.close()
        finally:
            for group in groups.values():
                group.shutdown()
            self.checkpoints.unlock()

    def _check_validation_folder(self, step: int) -> None:
        later = [other for other in self.checkpoints.steps() if other > step]
        if later:
            raise ValueError(
                f"trainer.val_only=true on the checkpoint of step {step}, but {self.checkpoints.run_dir} "
                f"holds step {later[-1]} of a run, whose records would be cut back. Set "
                "trainer.default_local_dir to another folder."
            )

    # ------------------------------------------------------------------- loop

    def fit(self) -> dict[str, Any] | None:
        """Run to `total_steps` from where the last checkpoint stands; returns what `summary.json` holds.

        Raises:
            RunStopped: it can't go on. StoppedOnRequest: it was asked to stop.
        """
        self._resume()
        started = time.perf_counter() - self.state.wall_seconds
        trainer = self.config.trainer
        if trainer.val_only:
            when = "after" if self.state.step else "before"
            self._record_validation(self._validate(complete=True), when)
            return self.recorder.finish(self.state, time.perf_counter() - started)
        if self.state.step == 0 and trainer.val_before_train:
            self._record_validation(self._validate(complete=True), "before")

        with self.checkpoint_writing.finishing():
            self._train(started)
        return self.recorder.finish(self.state, time.perf_counter() - started)

    def _train(self, started: float) -> None:
        """The steps. RunStopped: see `fit`."""
        trainer, checkpoint_seconds = self.config.trainer, dict[str, float]()
        while self.state.step < self.total_steps:
            self.checkpoint_writing.commit_if_written()
            timer = metric_utils.Timer(checkpoint_seconds)
            last = self.state.step + 1 == self.total_steps
            with timer("step"):
                batch, metrics = self.collector.collect(self.state.step + 1, last, timer)
                self.checkpoint_writing.commit_if_written()
                batch = self._log_probs_and_values(batch, timer)
                with timer("adv"):
                    batch, figures = self._advantages(batch)
                metrics |= figures
                figures, skipped_update = self._update(batch, timer)
                metrics |= figures
                self.state.step += 1
                if last or (trainer.test_freq > 0 and self.state.step % trainer.test_freq == 0):
                    with timer("testing"):
                        report = self._validate(complete=last)
                    self._record_validation(report, "after" if last else "during")
                    metrics |= report.metrics()
            metrics = self._step_metrics(batch, timer) | metrics
            if trainer.max_restarts:
                metrics["trainer/num_restarts"] = self.num_restarts
            self.state.add_step(metrics, timer.seconds, time.perf_counter() - started)
            # the score of all trajectories: that of those chosen to be trained says little
            seen = metrics | {"critic/score/mean": metrics["train/score"]}
            warnings = self.health.check(self.state.step, seen)
            records = self._records(batch, "train")
            self.recorder.log_step(self.state, metrics, batch, records, warnings)
            self._check_updates(metrics, skipped_update)
            checkpoint_seconds = {}
            del batch  # its columns are freed before the next ones are made
            stop = self.stop_asked() and not last
            if last or stop or (trainer.save_freq > 0 and self.state.step % trainer.save_freq == 0):
                checkpoint_seconds = self._save_checkpoint()
            if stop:
                raise StoppedOnRequest(
                    f"asked to stop (SIGUSR1); the checkpoint of step {self.state.step} is written, and the "
                    "same command goes on from it."
                )

    # ----------------------------------------------------------- parts of a step

    def _generate_sequences(self, gen_batch: DataProto) -> DataProto:
        generated = self.rollout_wg.generate_sequences(gen_batch)
        self._check_searches(generated)
        return generated

    def _check_searches(self, generated: DataProto) -> None:
        """Stops the run when so many searches failed that the rest says little about the policy.

        What is left leans to trajectories that did not search, or searched before the server went away.
        """
        failures = metric_utils.search_failures(generated)
        share, limit = len(failures) / len(generated), self.config.retriever.max_failed_share
        if share <= limit and share < 1:
            return
        self.checkpoint_writing.finish()
        done = self.checkpoints.steps()
        resumes = self.config.trainer.resume_mode in ("auto", "latest")
        raise RunStopped(
            f"the retrieval server is away: after step {self.state.step} {len(failures)} of {len(generated)} "
            f"trajectories ended because a search failed (retriever.max_failed_share={limit:g}): "
            f"{failures[-1]}. Start the server and run the same command again"
            f"{'' if resumes else ' with trainer.resume_mode=auto'}: the run goes on from "
            + (f"step {done[-1]}." if done else "its beginning, as it has no checkpoint yet.")
        )

    def _log_probs_and_values(self, batch: DataProto, timer: metric_utils.Timer) -> DataProto:
        """Add what the advantages and the update need: nothing is computed that is not used."""
        passes, updates_actor = self.passes, self._updates_actor()
        columns = batch.select(non_tensor_batch_keys=["uid"])  # records are not shipped to the workers
        if passes.old_log_probs(updates_actor, self._num_updates(len(batch))):
            with timer("old_log_prob"):
                columns.meta_info = {"calculate_sum_pi_squared": passes.sum_pi_squared}
                batch = batch.union(self.actor_rollout_wg.compute_log_prob(columns))
        if passes.reference_log_probs(updates_actor):
            with timer("ref"):
                batch = batch.union(self.actor_rollout_wg.compute_ref_log_prob(columns))
        if passes.teacher and updates_actor:
            with timer("teacher"):
                batch = batch.union(self.actor_rollout_wg.compute_teacher_log_prob(columns))
        if passes.values:
            with timer("values"):
                batch = batch.union(self.critic_wg.compute_values(columns))
        return batch

    def _num_updates(self, num_rows: int) -> int:
        """Optimizer steps on the actor for a step of so many rows."""
        actor = self.config.actor_rollout_ref.actor
        return actor.ppo_epochs * -(-num_rows // self._mini_batch_rows(num_rows, actor))

    def _mini_batch_rows(self, num_rows: int, block: DictConfig) -> int:
        """Rows of the actor's or the critic's mini-batches, over all processes."""
        rollout = self.config.actor_rollout_ref.rollout
        planned = self.config.data.train_batch_size * rollout.n_agent * rollout.n
        return mini_batch_rows(num_rows, planned, block.ppo_mini_batch_size * rollout.n)

    def _updates_actor(self) -> bool:
        """Whether this step trains the actor too."""
        return self.state.step >= self.config.trainer.critic_warmup

    def _step_metrics(self, batch: DataProto, timer: metric_utils.Timer) -> dict[str, float]:
        return self.tokens.figures(chosen(batch, FIGURE_COLUMNS), timer).meta_info["metrics"]

    def _advantages(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Rewards, advantages, returns, and the tokens' weights in the update; see `TokenWorker`."""
        columns = chosen(batch, ADVANTAGE_COLUMNS, record_columns(self.passes))
        step, baseline = self.state.step + 1, self.running_baseline
        done = self.tokens.advantages(columns, step, self.kl_controller, baseline)
        self.kl_controller = done.meta_info["kl_controller"]
        self.running_baseline = done.meta_info["running_baseline"]
        return with_columns(batch, done), done.meta_info["metrics"]

    def _update(self, batch: DataProto, timer: metric_utils.Timer) -> tuple[dict[str, float], str]:
        """Train critic and actor. Returns figures, and why an update was skipped, if one was."""
        lengths = batch.tensors["prompt_length"] + batch.tensors["response_length"]
        arranged, tokens_per_rank = self._arranged(batch, self.config.actor_rollout_ref.actor)
        metrics, skipped = metric_utils.seqlen_metrics(tokens_per_rank, lengths), ""
        if self.passes.values:
            with timer("update_critic"):
                for_critic, _ = self._arranged(batch, self.config.critic)
                done = self.critic_wg.update_critic(for_critic).meta_info
                metrics, skipped = metrics | done["metrics"], done["skipped_update"]
        if self._updates_actor():
            with timer("update_actor"):
                arranged.meta_info["bypass_mode"] = self.passes.bypass
                done = self.actor_rollout_wg.update_actor(arranged).meta_info
                metrics, skipped = metrics | done["metrics"], done["skipped_update"] or skipped
            reset_every = self.config.actor_rollout_ref.ref.reset_every
            if self.passes.reference and reset_every and (self.state.step + 1) % reset_every == 0:
                self.actor_rollout_wg.reset_reference()
        return metrics, skipped

    def _check_updates(self, metrics: dict[str, float], reason: str) -> None:
        """Stops a run whose updates are skipped again and again."""
        limit = self.config.trainer.max_skipped_updates
        for name in ("actor", "critic"):
            count = metrics.get(f"{name}/num_skipped_in_a_row", 0)
            if count >= limit:
                raise RunStopped(
                    f"step {self.state.step}: {count:g} updates of the {name} in a row were skipped "
                    f"(trainer.max_skipped_updates={limit}), as loss or gradient was not finite. {reason}"
                )

    def _arranged(self, batch: DataProto, block: DictConfig) -> tuple[DataProto, list[int]]:
        """The rows as the actor's or the critic's processes get them, and the tokens of each process.

        They are shuffled here, not by the processes: so a mini-batch is the same set for any number of them.
        """
        is_actor = block is self.config.actor_rollout_ref.actor
        if block.shuffle:
            order = shuffled(len(batch), self.config.trainer.seed, self.state.step, epoch=0)
            batch = batch.select_idxs(order)
        else:
            batch = batch.select()
        group = self.actor_rollout_wg if is_actor else self.critic_wg
        num_replicas, size = group.dp_size, self._mini_batch_rows(len(batch), block)
        done = self.tokens.for_update(
            chosen(batch, UPDATE_COLUMNS),
            num_replicas,
            size,
            self._attention_length,
            block.loss_agg_mode == PROMPT_MEAN,
            is_actor and bool(block.echo_coeff),
        )
        found: Arrangement = done.meta_info["arrangement"]
        arranged = found.of(with_columns(batch, done).select(non_tensor_batch_keys=["uid"]))
        arranged.meta_info = {"mini_batch_rows": -(-size // num_replicas)}
        return arranged, found.tokens_per_rank

    @cached_property
    def _attention_length(self) -> float:
        """See `balancing`. Read once, as the model's configuration may be on another machine."""
        return attention_length(self.config.actor_rollout_ref.model)

    # ----------------------------------------------------------------- measuring

    def _validate(self, complete: bool) -> ValidationReport:
        """Every validation question in each of `trainer.val_modes`.

        Args:
            complete: the first and the last validation of a run; the questions of `data.extra_val_files` are
                asked too, and the report carries them in `extra`.
        """

        def ask(dataset: RLHFDataset) -> ValidationReport:
            return validate(
                self._generate_sequences,
                self.tokens.score_answers,
                dataset,
                list(self.config.trainer.val_modes),
                self.config.data.val_batch_size,
                self.config.trainer.seed,
            )

        report = ask(self.val_dataset)
        if complete and self.extra_val_dataset is not None:
            report.extra = ask(self.extra_val_dataset)
        return report

    def _record_validation(self, report: ValidationReport, when: str) -> None:
        if when != "during":
            self.state.validation[when] = report.summary()
        records = [] if report.samples is None else self._records(report.samples, "val")
        self.recorder.log_validation(self.state, report, records)

    def _records(self, batch: DataProto, split: str) -> list[dict[str, Any]]:
        """Those rows of a batch that are kept for the eye."""
        rows = spread_rows(len(batch), self.config.trainer.num_trajectories_logged)
        return self.tokens.records(batch.select_idxs(rows), self.state.step, split).meta_info["records"]

    # --------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> dict[str, float]:
        """Write the checkpoint of this step; returns the seconds it took, by the name of the phase."""
        started = time.perf_counter()
        self.state.sampler = self.sampler.state_dict()
        self.state.kl_controller = self.kl_controller.state_dict()
        self.state.running_baseline = self.running_baseline.state_dict()
        self.state.health = self.health.state_dict()
        groups = {"actor": self.actor_rollout_wg}
        if self.passes.values:
            groups["critic"] = self.critic_wg

        def beside(folder: Path) -> None:
            self.collector.save(folder)
            self.state.save(folder)

        self.checkpoint_writing.save(self.state.step, groups, beside)
        return {"save_checkpoint": time.perf_counter() - started}

    def _load_checkpoint(self, folder: Path) -> None:
        """Put everything where the checkpoint in `folder` left it. ValueError if it is of another run."""
        self.state = RunState.load(folder)
        if self.state.step == 0:  # weights alone, to start with
            self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
            return
        self.sampler.load_state_dict(self.state.sampler)
        self.collector.load(folder)
        self.kl_controller.load_state_dict(self.state.kl_controller)
        self.running_baseline.load_state_dict(self.state.running_baseline)
        self.health.load_state_dict(self.state.health)
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
        if isinstance(self.rollout_wg, RolloutApart):
            self.rollout_wg.forget_weights()
        if self.passes.values:
            self.critic_wg.load_checkpoint(str(folder / "critic"))

    def _resume(self) -> None:
        """Take up the checkpoint that `trainer.resume_mode` asks for; cut the records back to its step."""
        folder = self.resume_folder
        aside = self.checkpoints.set_aside() if self.config.trainer.resume_mode == "none" else None
        if aside is not None:
            self.checkpoints.lock()
        self.checkpoints.remove_incomplete()
        if folder is not None:
            try:
                self._load_checkpoint(folder)
            except ValueError as error:
                raise RunStopped(f"{folder}: {error}") from error
            for left_behind in self.checkpoints.set_aside_after(self.state.step):
                print(f"a checkpoint of a later step is now {left_behind}")
        self.recorder.start(self.state, resumed_from=folder)
        if aside is not None:
            print(f"an earlier run stood in {self.checkpoints.run_dir}; it is now {aside}")
        if self.state.step >= self.total_steps:
            print(
                f"the run in {self.checkpoints.run_dir} is finished ({self.state.step} steps). For a new one "
                "set trainer.resume_mode=none or another folder; to go on, raise "
                "trainer.total_training_steps."
            )

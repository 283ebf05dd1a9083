"""The driver of a run: one process that holds the loop, and worker groups that hold the models.

`RayPPOTrainer.fit` is a run; the body of its loop is a step, from top to bottom. The same trainer runs with a
Ray worker group (one actor per process, any number of machines) and with the in-process one
(`trainer.backend=local`). Weights never pass through the driver; the rows of a step do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from verl.algos.advantages import RunningBaseline
from verl.algos.aggregation import PROMPT_MEAN, prompt_counts
from verl.algos.kl_and_entropy import get_kl_controller
from verl.checkpoints.run_state import RunState, RunStopped
from verl.config import Config, replace_values
from verl.config.policy import Actor
from verl.config.schema import Critic
from verl.data.mixture import Mixture, prompt_sampler
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_check import RowCheck
from verl.planning.memory_plan import taken_beside_rollouts
from verl.planning.passes import Passes, num_mini_batches
from verl.planning.placement import ResourcePoolManager, Role
from verl.protocol import DataProto
from verl.records import RunRecorder
from verl.records.trajectories import TokenTexts, trajectory_records
from verl.single_controller import build_worker_groups
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.batching import arrange_for_workers, attention_length
from verl.trainer.ppo.collection import (
    TrajectoryCollector,
    with_greedy_baselines,
    without_padding,
)
from verl.trainer.ppo.episodes import FailureWatch
from verl.trainer.ppo.health import HealthFinding, HealthMonitor, check_updates
from verl.trainer.ppo.held_out import HeldOutSets
from verl.trainer.ppo.resuming import SETTINGS_FILE, ResumableRun
from verl.trainer.ppo.scoring import RewardManager, add_advantages, score
from verl.trainer.ppo.stop_request import StoppedOnRequest, StopRequest
from verl.trainer.ppo.stream import RolloutStream, weight_folder
from verl.trainer.ppo.user_loops import apply_kl_penalty as apply_kl_penalty  # where verl has these three
from verl.trainer.ppo.user_loops import compute_advantage as compute_advantage
from verl.trainer.ppo.user_loops import compute_response_mask as compute_response_mask
from verl.trainer.ppo.validation import ValidationReport, run_summary, validate
from verl.trainer.rewinds import CollapseSeen, step_before
from verl.utils.announcing import announce
from verl.workers.engine.flops import PEAK_FLOPS
from verl.workers.engine.loading import load_hf_config
from verl.workers.engine.lora import wants_adapters
from verl.workers.engine.update_loop import mini_batches, shuffled

# Columns that the passes for log-probs and values read.
PASS_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
# Attributes of the trainer whose `state_dict` is in `RunState`.
STATEFUL_ATTRIBUTES = ("sampler", "kl_controller", "running_baseline", "health")
# Columns that the update does not read.
NOT_TRAINED_ON = ("prompts", "responses", "token_level_scores", "token_level_rewards")


def with_schedule_of(config: Config, num_steps: int) -> Config:
    """Return the configuration of a run of `num_steps` steps, the length of the optimizers' schedules."""
    lengths = ("actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps")
    return replace_values(config, dict.fromkeys(lengths, num_steps))


class RayPPOTrainer(ResumableRun):
    """The trainer for PPO and its critic-free relatives over worker groups.

    `Passes` says what a run computes.

    Args:
        config: the whole configuration, validated.
        tokenizer: the policy's tokenizer; it is used for rewards and records, never to make training ids.
        role_worker_mapping: role -> function that makes its worker class, with the constructor arguments,
            from the configuration as it is when the workers start.
        resource_pool_manager: the pool of each role.
        reward_fn: scores training rows.
        val_reward_fn: scores validation rows.
        trajectory_metrics: computes the agent's metrics (`env/*`) from the trajectories of a step.
        train_dataset: the rows to train on.
        val_dataset: the validation questions.
        extra_val_dataset: questions that are measured at the start and at the end, and reported on their own.
        evals: the sets of `trainer.evals`.
        stop_request: says whether the run shall end after the present step, with a checkpoint.
    """

    recorder: RunRecorder

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        role_worker_mapping: dict[Role, Callable[[Config], ClassWithInitArgs]],
        resource_pool_manager: ResourcePoolManager,
        reward_fn: RewardManager,
        val_reward_fn: RewardManager,
        trajectory_metrics: Callable[[list[dict[str, Any]]], dict[str, float]],
        train_dataset: RLHFDataset | Mixture,
        val_dataset: RLHFDataset,
        extra_val_dataset: RLHFDataset | None = None,
        evals: HeldOutSets | None = None,
        stop_request: StopRequest | None = None,
        row_check: RowCheck | None = None,
    ) -> None:
        super().__init__(config, stop_request)
        self.row_check = row_check
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.extra_val_dataset = extra_val_dataset
        self.evals = evals or HeldOutSets([], val_reward_fn, None, config.trainer.seed)
        self.test_periods = [config.trainer.test_freq, *(held_out.every for held_out, _ in self.evals.sets)]
        self.passes = Passes(config)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.running_baseline = RunningBaseline(config.algorithm.rae_decay)
        self.health = HealthMonitor()
        self.texts = TokenTexts(tokenizer)
        self.sampler = prompt_sampler(train_dataset, config)
        trainer = config.trainer
        self.total_steps = trainer.total_training_steps or len(self.sampler) * trainer.total_epochs
        config = self.config = with_schedule_of(config, self.total_steps)
        self.num_restarts = 0  # restarts of this run so far, set by `verl/trainer/restarts.py`
        self.num_rewinds = 0  # rewinds of this run so far, set there too
        self.rewinds_left = 0  # rewinds that it may still make, set there too
        self.when_folder_is_taken: Callable[[], None] = lambda: None  # called before the workers are made
        self.recorder = RunRecorder(config, total_steps=self.total_steps)
        self.collector = TrajectoryCollector(
            config, self.passes, train_dataset, self.sampler, trajectory_metrics, self.recorder.say
        )
        self.failures = FailureWatch(config, self.recorder.say)
        self.stream: RolloutStream | None = None  # set if rollouts have processes of their own

    # ---------------------------------------------------------------- workers

    def init_workers(self) -> None:
        """Take the run folder, start the processes, load the models into them and start the rollout engine.

        Raises:
            ValueError: if another run is in the folder, its checkpoint is of a run with other settings, a
                model does not fit, or a row can't be used.
            EngineUnavailable: if the rollout engine's servers do not start or do not answer.
        """
        self._lock_folder()
        self.when_folder_is_taken()
        config = self.config
        pools: dict[int, tuple[ResourcePool, dict[str, ClassWithInitArgs]]] = {}
        for role, make_worker in self.role_worker_mapping.items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            pools.setdefault(id(pool), (pool, {}))[1][role.value] = make_worker(config)
        for pool, workers in pools.values():
            self.worker_groups |= build_worker_groups(self.resource_pool_manager.backend, pool, workers)
        actor = next(role for role in self.role_worker_mapping if role not in (Role.Critic, Role.Rollout))
        self.actor_rollout_wg = self.worker_groups[actor.value]
        self.actor_rollout_wg.init_model()
        if self.passes.needs_values:
            self.critic_wg = self.worker_groups[Role.Critic.value]
            self.critic_wg.init_model()
        if Role.Rollout not in self.role_worker_mapping:
            num_rows = -(-self._most_rows() // self.actor_rollout_wg.mesh_positions("rollout")[0].size)
            self.actor_rollout_wg.start_rollout(num_rows, taken_beside_rollouts(config))
        else:
            group = self.worker_groups[Role.Rollout.value]
            max_staleness = config.trainer.async_training.max_staleness
            num_rows = -(-self._most_rows() * (1 + max_staleness) // group.world_size)
            group.start_rollout(num_rows, self.actor_rollout_wg.rollout_dtype()[0])
            say = self.recorder.say
            self.stream = RolloutStream(config, self.collector, group, self.total_steps, say)
        if self.row_check is not None:
            with announce("looking at all rows"):
                self.row_check.wait()

    def _most_rows(self) -> int:
        """Return the number of trajectories in the largest batch that is generated, over all processes."""
        data = self.config.data
        rollout = self.config.actor_rollout_ref.rollout
        questions = max(len(self.val_dataset), len(self.extra_val_dataset or ()), self.evals.most_rollouts)
        sources = self.train_dataset.sources if isinstance(self.train_dataset, Mixture) else ()
        return max(
            data.train_batch_size
            * max([rollout.n_agent * rollout.n, *(source.n or 0 for source in sources)]),
            min(data.val_batch_size or questions, questions),
        )

    def shutdown(self) -> None:
        try:
            self.sampler.close()
            self.reward_fn.verifiers.close()
        finally:
            super().shutdown()

    # ------------------------------------------------------------------- loop

    def fit(self) -> dict[str, Any]:
        """Run to `total_steps` from where the last checkpoint stands.

        Returns:
            The contents of `summary.json`.

        Raises:
            RunStopped: if the run can't go on.
            StoppedOnRequest: if the run was asked to stop.
        """
        self._resume()
        self._say_banner()
        if self.stream is not None:
            self._sync_weights()
        trainer = self.config.trainer
        started = time.perf_counter() - self.state.wall_seconds
        with self._finishing_run():
            self._validate_if_missing()
            self._stop_at_a_collapse()
            if trainer.val_only:
                self._measure_sets()
            while self.state.step < self.total_steps and not trainer.val_only:
                step = self.state.step + 1
                self.stop_request.step = step
                timer = metric_utils.Timer()
                last = step == self.total_steps
                trains_actor = step > trainer.critic_warmup
                with timer("step"):
                    # Collect trajectories (with searches) and score them, in several rounds where groups that
                    # teach nothing are replaced.
                    num_groups = self.collector.begin()
                    while num_groups > 0:
                        with timer("gen"):
                            trajectories = self._trajectories(num_groups, step)
                        with timer("reward"):
                            score(trajectories, self.reward_fn, self.config)
                        self.collector.add(trajectories)
                        num_groups = self.collector.num_missing()
                    if self.stream is None:
                        batch, metrics = self.collector.selected(step, timer.seconds["gen"])
                    else:
                        batch, metrics = self.collector.selected(step, None, self.stream.version)
                        metrics |= self.stream.metrics()
                    if self.passes.greedy_rollouts:
                        batch, baseline_metrics = self._with_greedy_baselines(batch, step, timer)
                        metrics |= baseline_metrics
                    batch = without_padding(batch)
                    self.checkpoint_writing.commit_if_written()

                    self._add_log_probs_and_values(batch, trains_actor, timer)
                    with timer("adv"):
                        algorithm = self.config.algorithm
                        kl = self.kl_controller
                        baseline = self.running_baseline
                        metrics |= add_advantages(batch, algorithm, self.passes, kl, baseline)

                    updates, update_metrics = self._update_critic_and_actor(batch, step, trains_actor, timer)
                    metrics |= update_metrics
                    self.state.step = step
                    with timer("sync_weights"):
                        self._sync_weights()

                    search_failure: RunStopped | None = None
                    if last or any(every > 0 and step % every == 0 for every in self.test_periods):
                        with timer("testing"):
                            try:
                                metrics |= self._measure_if_due(step, last)
                            except RunStopped as failure:  # the step itself is complete
                                search_failure = failure
                metrics = metric_utils.step_metrics(batch, timer, self.passes.needs_values) | metrics
                stop = search_failure is not None or (self.stop_request.asked and not last)
                findings = self._finish_step(metrics, timer, started)
                if last or stop or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
                    with timer("save_checkpoint"):
                        self._save_checkpoint()
                    metrics["timing_s/save_checkpoint"] = timer.seconds["save_checkpoint"]
                warnings = [finding.line for finding in findings]
                self.recorder.log_step(step, metrics, self._records(batch, "train"), warnings)
                self.checkpoint_writing.commit_if_written()  # no checkpoint is ahead of the records
                check_updates(metrics, updates, step, trainer.max_skipped_updates)
                if stop:
                    raise search_failure or StoppedOnRequest(step)
                self._stop_at_a_collapse()
        return self.recorder.finish(run_summary(self.state, time.perf_counter() - started, trainer.seed))

    # ----------------------------------------------------------- parts of a step

    def _say_banner(self) -> None:
        """Say what the run is going to do."""
        rows = (len(self.train_dataset), len(self.val_dataset))
        steps = (self.state.step, self.total_steps)
        self.recorder.say(self.passes.banner(self.config, rows, steps, self.actor_rollout_wg.world_size))

    def _trajectories(self, count: int, step: int) -> DataProto:
        """Return the trajectories of `count` groups, sampled now or ahead.

        Raises SearchesFailed or EnvironmentsFailed if too many searches or episodes failed.
        """
        if self.stream is None:
            return self._generate_sequences(self.collector.prompts(step, count))
        trajectories = self.stream.take(count)
        self.failures.check(trajectories.non_tensor_batch["trajectory"])
        return trajectories

    def _sync_weights(self) -> None:
        """Give the rollouts the policy of this step."""
        if self.stream is None:
            self.actor_rollout_wg.sync_weights()
            return
        folder = weight_folder(self.config)
        deadline = self.config.trainer.async_training.group_deadline
        weights = self.actor_rollout_wg.export_weights(self.state.step, folder, deadline)
        self.stream.send_weights(self.state.step, weights, begin=not self.config.trainer.val_only)
        # Wait until the weights are exported, so that the timer shows how long that took.
        self.actor_rollout_wg.data_position()

    def _generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return a trajectory for each row of the prompts, with the prompts' columns.

        Raises SearchesFailed or EnvironmentsFailed if too many searches or episodes failed; see
        `FailureWatch`.
        """
        columns = prompts.non_tensor_batch
        shipped = [name for name in ("raw_prompt_ids", "uid", "episode") if name in columns]
        workers = self.actor_rollout_wg
        if self.stream is not None:
            self.stream.settle()  # so that no older weights are measured
            workers = self.stream.workers
        generated = workers.generate_sequences(prompts.select(non_tensor_batch_keys=shipped))
        trajectories = generated.non_tensor_batch["trajectory"]
        self.failures.check(trajectories)
        return DataProto(generated.batch, columns | {"trajectory": trajectories}, dict(generated.meta_info))

    def _with_greedy_baselines(
        self, batch: DataProto, step: int, timer: metric_utils.Timer
    ) -> tuple[DataProto, dict[str, float]]:
        """Generate and score a greedy trajectory for each prompt, the baseline of its rows (remax).

        Returns what `with_greedy_baselines` returns.
        """
        with timer("gen_max"):
            greedy = self._generate_sequences(self.collector.greedy_prompts(batch, step))
        with timer("reward"):
            score(greedy, self.reward_fn, self.config)
        return with_greedy_baselines(batch, greedy)

    def _add_log_probs_and_values(
        self, batch: DataProto, trains_actor: bool, timer: metric_utils.Timer
    ) -> None:
        """Add what the advantages and the update need; nothing is computed that is not used."""
        passes = self.passes
        actor = self.config.actor_rollout_ref.actor
        num_updates = actor.ppo_epochs * num_mini_batches(self.config, len(batch), actor)
        columns = batch.select(list(PASS_COLUMNS), [])
        if passes.old_log_probs(trains_actor, num_updates):
            with timer("old_log_prob"):
                columns.meta_info = {"calculate_sum_pi_squared": passes.sum_pi_squared}
                batch.union(self.actor_rollout_wg.compute_log_prob(columns))
        if passes.reference_log_probs(trains_actor):
            with timer("ref"):
                batch.union(self.actor_rollout_wg.compute_ref_log_prob(columns))
        if passes.needs_teacher and trains_actor:
            with timer("teacher"):
                batch.union(self.actor_rollout_wg.compute_teacher_log_prob(columns))
        if passes.needs_values:
            with timer("values"):
                batch.union(self.critic_wg.compute_values(columns))

    def _arranged(
        self, batch: DataProto, group: WorkerGroup, block: Actor | Critic
    ) -> tuple[DataProto, list[int]]:
        """Return the columns that an update reads, with the rows in order for the processes of a group.

        Rows are shuffled here, so that a mini-batch is the same set for any number of processes.

        Args:
            batch: the rows of the step.
            group: the workers of the actor or the critic.
            block: the configuration of the actor or the critic.

        Returns:
            The columns, with the rows in the order in which the processes get them, and the number of tokens
            of each process.
        """
        columns = [str(name) for name, _ in batch.tensors.items() if name not in NOT_TRAINED_ON]
        rows = batch.select(columns, ["uid"], [])
        if block.shuffle:
            rows = rows.select_idxs(shuffled(len(batch), self.config.trainer.seed, self.state.step, epoch=0))
        tensors = rows.tensors
        count = num_mini_batches(self.config, len(batch), block)
        if block.loss_agg_mode == PROMPT_MEAN:
            # The loss of a row is divided by what its uid's rows of the mini-batch sampled.
            mask = tensors["response_mask"]
            uids = rows.non_tensor_batch["uid"]
            spans = [
                slice(mini_batch.start, mini_batch.stop) for mini_batch in mini_batches(len(batch), count)
            ]
            counts = [prompt_counts(mask[span], uids[span]) for span in spans]
            tensors["prompt_tokens"], tensors["prompt_rows"] = map(torch.cat, zip(*counts, strict=True))
        if isinstance(block, Actor) and block.echo_coeff:
            # The actor also learns the tokens of the response that the policy read and did not sample.
            sampled = tensors["sampled_mask" if "sampled_mask" in tensors else "response_mask"]
            tensors["observation_mask"] = tensors["attention_mask"][:, -sampled.shape[1] :] * (1 - sampled)
        if group.dp_size == 1:
            tokens_per_rank = [int(tensors["attention_mask"].sum())]
        else:
            rows, tokens_per_rank = arrange_for_workers(rows, group.dp_size, count, self._attention_length)
        rows.meta_info = {"num_mini_batches": count, "bypass_mode": self.passes.bypass}
        return rows, tokens_per_rank

    @cached_property
    def _attention_length(self) -> float:
        """Return the model's attention length, which is read once; see `batching`."""
        return attention_length(self._hf_configs["actor"])

    @cached_property
    def _hf_configs(self) -> dict[str, PretrainedConfig]:
        """Return the configurations of the models that are trained, which are read once."""
        configs = {"actor": load_hf_config(self.config.actor_rollout_ref.model)}
        if self.passes.needs_values:
            configs["critic"] = load_hf_config(self.config.critic.model)
        return configs

    def _update_critic_and_actor(
        self, batch: DataProto, step: int, trains_actor: bool, timer: metric_utils.Timer
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Train the critic, if there is one, and then the actor.

        Args:
            batch: rows with advantages.
            step: the step.
            trains_actor: false while the critic warms up.
            timer: takes the time of either update.

        Returns:
            The `meta_info` of the updates, by "critic" and "actor", and the metrics of both.
        """
        updates: dict[str, dict[str, Any]] = {}
        actor = self.config.actor_rollout_ref.actor
        for_actor, tokens_per_rank = self._arranged(batch, self.actor_rollout_wg, actor)
        metrics = metric_utils.seqlen_metrics(tokens_per_rank, batch)
        if self.passes.needs_values:
            with timer("update_critic"):
                for_critic, _ = self._arranged(batch, self.critic_wg, self.config.critic)
                updates["critic"] = self.critic_wg.update_critic(for_critic).meta_info
        if trains_actor:
            with timer("update_actor"):
                updates["actor"] = self._update_actor(for_actor, step)
        for name, update in updates.items():
            metrics |= update["metrics"]
            metrics |= self._utilization(name, batch, update, timer.seconds[f"update_{name}"])
        return updates, metrics

    def _utilization(
        self, name: str, batch: DataProto, update: dict[str, Any], seconds: float
    ) -> dict[str, float]:
        """Return the MFU of an update of the actor or the critic, where the rate of its devices is known."""
        rate = update.get(PEAK_FLOPS)
        if rate is None:
            return {}
        is_actor = name == "actor"
        block = self.config.actor_rollout_ref.actor if is_actor else self.config.critic
        model = self.config.actor_rollout_ref.model if is_actor else self.config.critic.model
        group = self.actor_rollout_wg if is_actor else self.critic_wg
        return metric_utils.utilization(
            name,
            self._hf_configs[name],
            batch,
            seconds,
            rate * group.world_size,
            has_head=is_actor,
            has_adapters=wants_adapters(model),
            num_epochs=block.ppo_epochs,
        )

    def _update_actor(self, rows: DataProto, step: int) -> dict[str, Any]:
        """Train the policy, and make the result the new reference where that is due."""
        update = self.actor_rollout_wg.update_actor(rows).meta_info
        reset_every = self.config.actor_rollout_ref.ref.reset_every
        if self.passes.needs_reference and reset_every and step % reset_every == 0:
            self.actor_rollout_wg.reset_reference()
        return update

    def _finish_step(
        self, metrics: dict[str, float], timer: metric_utils.Timer, started: float
    ) -> list[HealthFinding]:
        """Bring `state` to the end of this step, and return the findings to report.

        A run that resumes from a checkpoint goes on from this state.
        """
        if self.config.trainer.max_restarts:
            metrics["trainer/num_restarts"] = self.num_restarts
        if self.config.trainer.on_collapse == "rewind":
            metrics["trainer/num_rewinds"] = self.num_rewinds
        self.state.add_step(metrics, timer.seconds, time.perf_counter() - started)
        # The score is that of all trajectories: that of the ones chosen for training says little.
        findings = self.health.check(self.state.step, metrics | {"critic/score/mean": metrics["train/score"]})
        for name in STATEFUL_ATTRIBUTES:
            setattr(self.state, name, getattr(self, name).state_dict())
        self.collector.take_state()
        return findings

    def _stop_at_a_collapse(self) -> None:
        """Raise CollapseSeen if the run has collapsed and may not go on as it is (`trainer.on_collapse`)."""
        trainer = self.config.trainer
        collapses = self.health.open_collapses
        if not collapses or trainer.val_only or trainer.on_collapse == "warn":
            return
        is_over = self.state.step >= self.total_steps
        if trainer.on_collapse == "rewind":
            if self.rewinds_left > 0:
                raise CollapseSeen(self.state.step, collapses[0])
            return
        if is_over:  # the last line of the run names the collapse
            return
        earlier = step_before(self.checkpoints, collapses[0].onset, 0)
        path = self.checkpoints.folder(earlier)
        resume_settings = (
            f" and trainer.resume_mode=from_path trainer.resume_from_path={path}" if earlier else ""
        )
        raise CollapseSeen(
            self.state.step,
            collapses[0],
            " The run stops (trainer.on_collapse=stop). To go on as it is, set trainer.on_collapse=warn; to "
            f"go back, set trainer.on_collapse=rewind, or a smaller learning rate{resume_settings}.",
        )

    def _save_checkpoint(self) -> None:
        def write_rest(folder: Path) -> None:
            settings = json.dumps(self.learning_settings, indent=1)
            (folder / SETTINGS_FILE).write_text(settings, encoding="utf-8")
            self.collector.save(folder)
            if self.stream is not None:  # the sampler has drawn the prompts of the stream by now
                self.state.sampler = self.sampler.state_dict()
                self.stream.save(folder, step_is_over=not self.stream.taken)
            self.state.save(folder)

        critic = {"critic": self.critic_wg} if self.passes.needs_values else {}
        self.checkpoint_writing.save(self.state.step, {"actor": self.actor_rollout_wg, **critic}, write_rest)

    def _load_checkpoint(self, folder: Path) -> int:
        self.state = RunState.load(folder)
        self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
        if self.state.step == 0:  # the checkpoint has only weights to start with
            return 0
        for name in STATEFUL_ATTRIBUTES:
            getattr(self, name).load_state_dict(getattr(self.state, name))
        self.collector.load(folder)
        if self.stream is not None:
            self.stream.load(folder, self.state.step)
        if self.passes.needs_values:
            self.critic_wg.load_checkpoint(str(folder / "critic"))
        return self.state.step

    # ----------------------------------------------------------------- measuring

    def _validate(self, complete: bool) -> ValidationReport:
        """Ask every validation question in each of `trainer.val_modes`.

        Args:
            complete: whether the questions of `data.extra_val_files` are asked too, for the report's `extra`;
                true at the beginning and at the end of a run.
        """
        trainer = self.config.trainer
        size = self.config.data.val_batch_size

        def ask(rows: RLHFDataset) -> ValidationReport:
            modes = list(trainer.val_modes)
            generate = self._generate_sequences
            return validate(generate, self.val_reward_fn, rows, modes, size, trainer.seed)

        report = ask(self.val_dataset)
        if complete and self.extra_val_dataset is not None:
            report.extra = ask(self.extra_val_dataset)
        if self.stream is not None:
            self.stream.workers.figures()  # so that the figures of the next step do not count these
        return report

    def _measure_if_due(self, step: int, last: bool) -> dict[str, float]:
        """Validate, if that is due, and measure the sets of `trainer.evals` that are due."""
        metrics, lines = self.evals.measure(self._generate_sequences, step, last)
        self.recorder.log_evaluation(step, lines)
        if lines and self.stream is not None:
            self.stream.workers.figures()  # so that the figures of the next step do not count these
        if last or (self.test_periods[0] > 0 and step % self.test_periods[0] == 0):
            report = self._validate(complete=last)
            self._record_validation(report, "after" if last else "during")
            metrics |= report.metrics()
        return metrics

    def _measure_sets(self) -> None:
        """Measure the sets of `trainer.evals` in a run that does not train."""
        metrics, lines = self.evals.measure(self._generate_sequences, self.state.step, last=True)
        self.recorder.log_evaluation(self.state.step, lines)
        for name, value in metrics.items():
            self.recorder.say(f"{name} at step {self.state.step}: {value:.4g}")

    def _validate_if_missing(self) -> None:
        """Validate, if the run does nothing else, or if an earlier run has not come to it."""
        if self.config.trainer.val_only or self._validation_is_missing():
            report = self._validate(complete=True)
            self._record_validation(report, "after" if self.state.step else "before")

    def _validation_is_missing(self) -> bool:
        """Return whether the validation before the first step, or after the last one, is still to be made."""
        if self.state.step >= self.total_steps:
            return "after" not in self.state.validation
        return self.state.step == 0 and self.config.trainer.val_before_train

    def _record_validation(self, report: ValidationReport, when: str) -> None:
        if when != "during":
            self.state.validation[when] = report.summary()
        records = [] if report.samples is None else self._records(report.samples, "val")
        self.recorder.log_validation(
            self.state.step, report.metrics(), report.summary(), records, report.lines()
        )

    def _records(self, batch: DataProto, split: str) -> list[dict[str, Any]]:
        """Return the records of those rows of a batch that are kept for a reader."""
        count = self.config.trainer.num_trajectories_logged
        return trajectory_records(batch, self.texts, self.state.step, split, count)

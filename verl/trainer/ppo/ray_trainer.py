"""The driver of a run: one process that holds the loop, and worker groups that hold the models.

    prompts -> generate (with searches) -> score -> log-probs, values -> advantages
            -> update critic, update actor -> checkpoint, validation

`RayPPOTrainer.fit` reads in that order. The driver holds token ids and scores only; weights never pass
through it. The same trainer runs with a Ray worker group (one actor a process, any number of machines) and
with the in-process one (`trainer.backend=local`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerGroup
from verl.single_controller.factory import build_worker_groups
from verl.trainer.ppo import core_algos, metric_utils
from verl.trainer.ppo.batching import (
    TRAIN_STREAM,
    arrange_for_workers,
    mini_batch_rows,
    prompt_batch,
    sampling_seeds,
    usable_rows,
    with_samples,
)
from verl.trainer.ppo.partial_groups import PartialGroups, newest_version, staleness, straggler_metrics
from verl.trainer.ppo.roles import ResourcePoolManager, Role
from verl.trainer.ppo.run_state import CheckpointStore, RunState, RunStopped
from verl.trainer.ppo.validation import ValidationReport, validate
from verl.utils.dataset.rl_dataset import PromptSampler, RLHFDataset
from verl.utils.records import RunRecorder
from verl.workers.engine.micro_batches import shuffled
from verl.workers.reward_manager import RewardManager, apply_search_cost

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role"]


def needs_critic(config: DictConfig) -> bool:
    """Whether the advantages are computed from values."""
    return config.algorithm.adv_estimator == core_algos.AdvantageEstimator.GAE


def compares_group(config: DictConfig) -> bool:
    """Whether a trajectory's advantage is relative to the others of its prompt."""
    return config.algorithm.adv_estimator in (
        core_algos.AdvantageEstimator.GRPO,
        core_algos.AdvantageEstimator.RLOO,
    )


def needs_reference(config: DictConfig) -> bool:
    """Whether a KL to the reference policy is asked for, in the loss or in the reward."""
    actor = config.actor_rollout_ref.actor
    return (actor.kl_loss_coef if actor.use_kl_loss else config.algorithm.kl_ctrl.kl_coef) > 0


def actor_role(config: DictConfig) -> Role:
    """The role of the actor's workers: with or without a reference model beside it."""
    return Role.ActorRolloutRef if needs_reference(config) else Role.ActorRollout


class RayPPOTrainer:
    """PPO and its critic-free relatives (GRPO, RLOO, REINFORCE++) over worker groups.

    Args:
        config: the whole configuration (`verl/trainer/config/ppo_trainer.yaml`), validated.
        tokenizer: the policy's tokenizer; used for rewards and records, never to make training ids.
        role_worker_mapping: role -> worker class with its constructor arguments.
        resource_pool_manager: which pool of processes each role lives in.
        reward_fn, val_reward_fn: DataProto -> scores (see `RewardManager`).
        trajectory_metrics: trajectories of a step -> the agent's figures (`env/*`).
        train_dataset, val_dataset: rows of prompts. `extra_val_dataset` is measured at the start and at the
            end, and reported on its own.
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

        self.use_critic = needs_critic(config)
        self.use_reference = needs_reference(config)
        self.kl_in_reward = self.use_reference and not config.actor_rollout_ref.actor.use_kl_loss
        self.kl_controller = core_algos.get_kl_controller(config.algorithm.kl_ctrl)
        self.sampler = PromptSampler(
            len(train_dataset),
            config.data.train_batch_size,
            config.data.shuffle_train_dataloader,
            config.trainer.seed,
        )
        self.total_steps = (
            config.trainer.total_training_steps or len(self.sampler) * config.trainer.total_epochs
        )
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            if optim.total_training_steps <= 0:
                optim.total_training_steps = self.total_steps
        self.state = RunState()
        self.partial_groups = PartialGroups()
        self.checkpoints = CheckpointStore(config.trainer.default_local_dir, config.trainer.max_ckpt_to_keep)
        trainer = config.trainer
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        if trainer.val_only and self.resume_folder is not None:
            self._check_validation_folder(RunState.load(self.resume_folder).step)
        self.recorder = RunRecorder(config, total_steps=self.total_steps)
        self.worker_groups: dict[str, WorkerGroup] = {}

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
            self.worker_groups |= build_worker_groups(self.resource_pool_manager.backend, pool, workers)
        self.actor_rollout_wg = self.worker_groups[actor_role(self.config).value]
        self.actor_rollout_wg.init_model()
        if self.use_critic:
            self.critic_wg = self.worker_groups[Role.Critic.value]
            self.critic_wg.init_model()
        self.actor_rollout_wg.start_rollout(-(-self._most_rows() // self.actor_rollout_wg.world_size))

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
        """Run to `total_steps` from where the last checkpoint stands; returns what `summary.json` holds."""
        self._resume()
        started = time.perf_counter() - self.state.wall_seconds
        trainer = self.config.trainer
        if trainer.val_only:
            when = "after" if self.state.step else "before"
            self._record_validation(self._validate(complete=True), when)
            return self.recorder.finish(self.state, time.perf_counter() - started)
        if self.state.step == 0 and trainer.val_before_train:
            self._record_validation(self._validate(complete=True), "before")

        checkpoint_seconds: dict[str, float] = {}
        for rows in self._training_prompts():
            timer = metric_utils.Timer(checkpoint_seconds)
            with timer("step"):
                with timer("gen"):
                    batch, generation_metrics = self._generate(rows)
                with timer("reward"):
                    batch = self._score(batch)
                batch = self._log_probs_and_values(batch, timer)
                with timer("adv"):
                    metrics = generation_metrics | self._advantages(batch)
                metrics |= self._update(batch, timer)
                self.state.step += 1
                last = self.state.step >= self.total_steps
                if last or (trainer.test_freq > 0 and self.state.step % trainer.test_freq == 0):
                    with timer("testing"):
                        report = self._validate(complete=last)
                    self._record_validation(report, "after" if last else "during")
                    metrics |= report.metrics()
            metrics |= metric_utils.step_metrics(batch, timer, self.use_critic)
            self.state.add_step(metrics, timer.seconds, time.perf_counter() - started)
            self.recorder.log_step(self.state, metrics, batch, self.tokenizer)
            checkpoint_seconds = {}
            if last or (trainer.save_freq > 0 and self.state.step % trainer.save_freq == 0):
                checkpoint_seconds = self._save_checkpoint()
        return self.recorder.finish(self.state, time.perf_counter() - started)

    # ----------------------------------------------------------- parts of a step

    def _training_prompts(self) -> Iterator[list[dict[str, Any]]]:
        while self.state.step < self.total_steps:
            yield [self.train_dataset[i] for i in self.sampler.next_batch()]

    def _generate(self, rows: list[dict[str, Any]]) -> tuple[DataProto, dict[str, float]]:
        """Sample a group of trajectories for each prompt, and go on with those kept from the step before.

        Those that can't be learnt from (a failed search, a straggler) are left out.
        """
        rollout = self.config.actor_rollout_ref.rollout
        step = self.state.step + 1
        prompts = prompt_batch(rows, f"step{step}").repeat(rollout.n_agent * rollout.n, interleave=True)
        prompts, continuation = self.partial_groups.join(prompts)
        columns = {name: prompts.non_tensor_batch[name] for name in ("raw_prompt_ids", "uid")}
        if continuation is not None:
            columns["continuation"] = continuation
        gen_batch = DataProto.from_dict(
            tensors={
                "sampling_seeds": sampling_seeds(self.config.trainer.seed, TRAIN_STREAM, step, len(prompts))
            },
            non_tensors=columns,
        )
        gen_batch.meta_info = {
            "do_sample": rollout.do_sample,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "validate": False,
            "keep_partial": rollout.keep_partial and step < self.total_steps,
        }
        batch = with_samples(prompts, self._generate_sequences(gen_batch))
        metrics = batch.meta_info.pop("metrics", {})
        version = newest_version(batch)
        batch = self.partial_groups.take(batch)
        metrics |= straggler_metrics(batch) | {"env/kept_groups": float(self.partial_groups.num_groups)}
        metrics |= self.trajectory_metrics(list(batch.non_tensor_batch["trajectory"]))
        usable = usable_rows(batch, compares_group(self.config))
        if not usable.any():
            raise RunStopped(f"Step {step}: no trajectory has a token to learn from.")
        metrics["env/left_out"] = float((~usable).sum())
        batch = batch if usable.all() else batch.select_idxs(usable)
        ages = staleness(batch, version)
        return batch, metrics | {
            "rollout/staleness/mean": float(ages.mean()),
            "rollout/staleness/max": float(ages.max()),
        }

    def _generate_sequences(self, gen_batch: DataProto) -> DataProto:
        generated = self.actor_rollout_wg.generate_sequences(gen_batch)
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
        done = self.checkpoints.steps()
        resumes = self.config.trainer.resume_mode in ("auto", "latest")
        raise RunStopped(
            f"the retrieval server is away: after step {self.state.step} {len(failures)} of {len(generated)} "
            f"trajectories ended because a search failed (retriever.max_failed_share={limit:g}): "
            f"{failures[-1]}. Start the server and run the same command again"
            f"{'' if resumes else ' with trainer.resume_mode=auto'}: the run goes on from "
            + (f"step {done[-1]}." if done else "its beginning, as it has no checkpoint yet.")
        )

    def _score(self, batch: DataProto) -> DataProto:
        scores = self.reward_fn(batch, return_dict=True)
        num_searches = [trajectory["num_searches"] for trajectory in batch.non_tensor_batch["trajectory"]]
        batch.tensors["token_level_scores"] = apply_search_cost(
            scores["reward_tensor"], num_searches, self.config.reward_model.search_cost
        )
        batch.non_tensor_batch["em"] = np.array(scores["em"], dtype=object)
        return batch

    def _log_probs_and_values(self, batch: DataProto, timer: metric_utils.Timer) -> DataProto:
        """Add what the update needs: nothing is computed that is not used."""
        are_used = self._updates_actor() or self.kl_in_reward
        if are_used and self._needs_old_log_probs(len(batch)):
            with timer("old_log_prob"):
                batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        if are_used and self.use_reference:
            with timer("ref"):
                batch = batch.union(self.actor_rollout_wg.compute_ref_log_prob(batch))
        if self.use_critic:
            with timer("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        return batch

    def _needs_old_log_probs(self, num_rows: int) -> bool:
        """False when the update is one optimizer step on the sampling policy: its ratio is 1 anyway."""
        actor = self.config.actor_rollout_ref.actor
        single_update = actor.ppo_epochs == 1 and num_rows <= self._mini_batch_rows(num_rows, actor)
        return self.kl_in_reward or not single_update

    def _mini_batch_rows(self, num_rows: int, block: DictConfig) -> int:
        """Rows of the actor's or the critic's mini-batches, over all processes."""
        rollout = self.config.actor_rollout_ref.rollout
        planned = self.config.data.train_batch_size * rollout.n_agent * rollout.n
        return mini_batch_rows(num_rows, planned, block.ppo_mini_batch_size * rollout.n)

    def _updates_actor(self) -> bool:
        """Whether this step trains the actor too."""
        return self.state.step >= self.config.trainer.critic_warmup

    def _advantages(self, batch: DataProto) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self.kl_in_reward:
            metrics = core_algos.apply_kl_penalty(batch, self.kl_controller, self.config.algorithm.kl_penalty)
        else:
            batch.tensors["token_level_rewards"] = batch.tensors["token_level_scores"]
        algorithm = self.config.algorithm
        batch.tensors["advantages"], batch.tensors["returns"] = core_algos.compute_advantage(
            algorithm.adv_estimator,
            batch.tensors["token_level_rewards"],
            batch.tensors["response_mask"],
            values=batch.tensors["values"] if self.use_critic else None,
            index=batch.non_tensor_batch["uid"],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )
        return metrics

    def _update(self, batch: DataProto, timer: metric_utils.Timer) -> dict[str, float]:
        lengths = batch.tensors["attention_mask"].sum(-1)
        arranged, tokens_per_rank = self._arranged(batch, self.config.actor_rollout_ref.actor)
        metrics = metric_utils.seqlen_metrics(tokens_per_rank, lengths)
        if self.use_critic:
            with timer("update_critic"):
                for_critic, _ = self._arranged(batch, self.config.critic)
                metrics |= self._update_metrics(self.critic_wg.update_critic(for_critic), "critic")
        if self._updates_actor():
            with timer("update_actor"):
                metrics |= self._update_metrics(self.actor_rollout_wg.update_actor(arranged), "actor")
        return metrics

    def _update_metrics(self, result: DataProto, name: str) -> dict[str, float]:
        """What an update reports; stops the run when its optimizer steps are skipped one after another."""
        metrics = result.meta_info["metrics"]
        num_skipped = metrics.get(f"{name}/num_skipped_in_a_row", 0)
        limit = self.config.trainer.max_skipped_updates
        if num_skipped >= limit:
            raise RunStopped(
                f"the last {num_skipped:.0f} updates of the {name} had a loss or gradient that was not "
                f"finite and were skipped (trainer.max_skipped_updates={limit}): "
                f"{result.meta_info['skipped_update']}."
            )
        return metrics

    def _arranged(self, batch: DataProto, block: DictConfig) -> tuple[DataProto, list[int]]:
        """The rows as the actor's or the critic's processes get them, and the tokens of each process.

        They are shuffled here, not by the processes: so a mini-batch is the same set for any number of them.
        """
        if block.shuffle:
            order = shuffled(len(batch), self.config.trainer.seed, self.state.step, epoch=0)
            batch = batch.select_idxs(order)
        world_size, size = self.actor_rollout_wg.world_size, self._mini_batch_rows(len(batch), block)
        arranged, tokens = arrange_for_workers(batch, world_size, size)
        arranged = arranged.select()  # its meta_info is not the batch's
        arranged.meta_info["mini_batch_rows"] = -(-size // world_size)
        return arranged, tokens

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
                self.val_reward_fn,
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
        self.recorder.log_validation(self.state, report, self.tokenizer)

    # --------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> dict[str, float]:
        """Write the checkpoint of this step; returns the seconds it took, by the name of the phase."""
        started = time.perf_counter()
        self.state.sampler = self.sampler.state_dict()
        self.state.kl_controller = self.kl_controller.state_dict()
        with self.checkpoints.writing(self.state.step) as folder:
            self.actor_rollout_wg.save_checkpoint(str(folder / "actor"))
            if self.use_critic:
                self.critic_wg.save_checkpoint(str(folder / "critic"))
            self.partial_groups.save(folder)
            self.state.save(folder)
        return {"save_checkpoint": time.perf_counter() - started}

    def _resume(self) -> None:
        """Take up the checkpoint that `trainer.resume_mode` asks for; cut the records back to its step."""
        folder = self.resume_folder
        aside = self.checkpoints.set_aside() if self.config.trainer.resume_mode == "none" else None
        if aside is not None:
            self.checkpoints.lock()
        self.checkpoints.remove_incomplete()
        if folder is not None:
            self.state = RunState.load(folder)
            try:
                self.sampler.load_state_dict(self.state.sampler)
            except ValueError as error:
                raise RunStopped(f"{folder}: {error}") from error
            self.kl_controller.load_state_dict(self.state.kl_controller)
            self.partial_groups.load(folder)
            self.actor_rollout_wg.load_checkpoint(str(folder / "actor"))
            if self.use_critic:
                self.critic_wg.load_checkpoint(str(folder / "critic"))
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

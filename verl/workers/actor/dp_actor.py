"""The policy: log-probabilities of the sampled tokens, and the policy's update.

    rows -> mini-batches (one optimizer step each) -> micro-batches (one forward and backward pass each)

`UpdateLoop` makes the steps. `PolicyObjective` is the loss of one mini-batch, put together from the
configuration:

    policy loss (policy_loss.loss_mode) - entropy_coeff * entropy + kl_loss_coef * KL + echo_coeff * echo

Each term is a sum over tokens divided by counts of the mini-batch over all ranks. The policy loss, the KL and
the entropy are of the tokens that the policy sampled. Echo, the cross-entropy of the observations, is of
tokens that it read.

A loss may choose tokens out of a whole mini-batch (`clip_cov`, `kl_cov`). For such a loss the log-probs of a
pass without gradient are gathered over ranks, and each rank takes its own rows of the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algos.aggregation import PROMPT_MEAN, LossDenominator, agg_loss, echo_loss
from verl.algos.kl_and_entropy import compute_kl_loss, get_entropy_controller
from verl.algos.policy_losses import LossInputs, SelectFn, loss_traits, policy_loss, policy_loss_inputs
from verl.algos.rollout_correction import rollout_agreement
from verl.config.policy import Actor
from verl.packing.packs import PackedMicroBatch
from verl.packing.turn_rows import TRAJECTORY, rows_to_trajectories, split_into_turns
from verl.protocol import DataProto
from verl.utils.device import to_device
from verl.workers.actor.step_bound import StepBound
from verl.workers.engine.training_engine import Engine, MicroBatchLoss, Outputs
from verl.workers.engine.update_loop import (
    EXTRA_LOSS_KEY,
    MicroBatchLimits,
    MiniBatch,
    UpdateLoop,
    UpdateSchedule,
    infer_rows,
    tensors_of,
)


def uses_kl_loss(config: Actor) -> bool:
    """Return whether the loss of this `actor` block has a KL to the reference."""
    return bool(config.use_kl_loss) and config.kl_loss_coef > 0


def loss_columns(config: Actor) -> tuple[list[str], list[str]]:
    """Return the columns that the loss of this `actor` block reads.

    Returns:
        (columns that the loss needs, columns that it uses if they exist). All are [N, R], except for
        `prompt_tokens` and `prompt_rows` [N]: the numbers of sampled tokens, and of rows with a sampled
        token, among the rows of the mini-batch with the row's uid.
    """
    needed = ["advantages"]
    if uses_kl_loss(config):
        needed.append("ref_log_prob")
    if config.echo_coeff:
        needed.append("observation_mask")
    if config.loss_agg_mode == PROMPT_MEAN:
        needed += ["prompt_tokens", "prompt_rows"]
    optional = ["old_log_probs", "rollout_log_probs", "rollout_is_weights", "teacher_log_prob"]
    return needed, optional


def rows_without_gradient(
    config: Actor, entropy_coeff: float, batch: Mapping[str, Tensor], rows: list[int]
) -> list[int]:
    """Return the rows that no term of the loss has a gradient for.

    Such rows exist if the policy loss vanishes with the advantages and the loss has no other term. They are
    the rows whose advantages are all exactly 0 (a group whose members scored the same). Of a trajectory's
    turns either all or none are returned, because they share a pass.

    Args:
        config: the `actor` block.
        entropy_coeff: the present coefficient of the entropy.
        batch: this rank's columns.
        rows: the rows to choose from.
    """
    vanishes = loss_traits(config.policy_loss.loss_mode).vanishes_with_advantage
    if not vanishes or entropy_coeff or uses_kl_loss(config) or config.echo_coeff:
        return []
    mask = batch["response_mask"][rows].bool()
    pulled = (batch["advantages"][rows].masked_fill(~mask, 0.0) != 0).any(dim=1)
    if TRAJECTORY in batch:
        trajectory = batch[TRAJECTORY][rows]
        pulled = torch.isin(trajectory, trajectory[pulled])
    return [row for row, is_idle in zip(rows, (mask.any(dim=1) & ~pulled).tolist(), strict=True) if is_idle]


@dataclass
class PolicyObjective:
    """The loss of one mini-batch of the policy; an `Objective` of the update loop. See the top of the file.

    Attributes:
        config: the `actor` block.
        engine: this rank's share of the policy.
        temperature: the temperature that the rows were sampled with.
        batch: this rank's columns, [N, R] where they are per token.
        mini_batch: the rows and the counts of the mini-batch.
        on_policy: whether the weights are those of `old_log_probs`. Then the ratio is 1, and `old_log_probs`
            are not read. (If it is False and they are missing, the loss must do without them.)
        entropy_coeff: the present coefficient of the entropy.
        rows_without_gradient: rows that are known to have no gradient.
        limits: the limits of a pass, for a loss that chooses tokens out of the mini-batch.
        seed: the seed of that choice.
        first_log_probs: [N, R] on the device, or None. If given, it is filled with this pass's log-probs.
        step_bound: the bound of `actor.max_step_kl`, or None. It also needs this pass's log-probs.
    """

    config: Actor
    engine: Engine
    temperature: float
    batch: Mapping[str, Tensor]
    mini_batch: MiniBatch
    on_policy: bool
    entropy_coeff: float
    rows_without_gradient: list[int]
    limits: MicroBatchLimits
    seed: int
    first_log_probs: Tensor | None = None
    step_bound: StepBound | None = None

    def __post_init__(self) -> None:
        select = loss_traits(self.config.policy_loss.loss_mode).select
        self.selection = None if select is None else self._selected(select)
        extra = self.batch.get(EXTRA_LOSS_KEY)
        if extra is not None:
            count = self.engine.reduce([float(extra[self.mini_batch.rows].sum())], "sum")[0]
            self.echo_denominator = LossDenominator(max(count, 1.0), 1.0)

    @property
    def options(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "with_entropy": True}

    def loss_of(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> MicroBatchLoss:
        """Return the micro-batch's share of the loss and of the metrics."""
        log_prob = micro_batch.unpack(outputs[0])
        entropy = micro_batch.unpack(outputs[1])
        if self.first_log_probs is not None and len(micro_batch.cells):
            self.first_log_probs[to_device(micro_batch.rows, log_prob.device)] = log_prob.detach()
        if self.step_bound is not None and len(micro_batch.cells):
            self.step_bound.record_log_probs(micro_batch.rows, log_prob)
        old_log_prob = self._rows_or_none("old_log_probs", micro_batch)
        if self.on_policy:
            old_log_prob = log_prob.detach()
        selection = self.selection
        inputs = LossInputs(
            log_prob=log_prob,
            response_mask=micro_batch.mask,
            loss_agg_mode=self.config.loss_agg_mode,
            config=self.config,
            denominator=self.mini_batch.denominator.of_rows(micro_batch.rows),
            old_log_prob=old_log_prob,
            advantages=self._rows("advantages", micro_batch),
            rollout_is_weights=self._rows_or_none("rollout_is_weights", micro_batch),
            rollout_log_prob=self._rows_or_none("rollout_log_probs", micro_batch),
            teacher_log_prob=self._rows_or_none("teacher_log_prob", micro_batch),
            selection=None if selection is None else to_device(selection[micro_batch.rows], log_prob.device),
        )
        loss, metrics = policy_loss(self.config.policy_loss.loss_mode, inputs)
        metrics = {**metrics, "actor/pg_loss": loss}
        for name, weight, term in self._other_terms(micro_batch, log_prob, entropy):
            metrics[name] = term
            loss = loss + weight * term if weight else loss
        if old_log_prob is not None:
            metrics |= _ratio_extremes(log_prob.detach() - old_log_prob, micro_batch.mask)
        return MicroBatchLoss(loss, {name: figure.detach() for name, figure in metrics.items()})

    def _selected(self, select: SelectFn) -> Tensor:
        """Return the tokens that the loss chooses, [N, R] bool on CPU.

        They are chosen out of the mini-batch's rows of all ranks, with the same seed on every rank. Ranks
        with fewer or narrower rows fill them up.
        """
        batch = self.batch
        rows = self.mini_batch.rows
        engine = self.engine
        log_prob = infer_rows(batch, rows, engine, self.limits, self.options)[0]
        old_log_prob = log_prob if self.on_policy else batch["old_log_probs"]
        mask = batch["response_mask"][rows].bool()
        local_columns = [
            x[rows].float().masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob, batch["advantages"])
        ]
        columns = torch.stack([*local_columns, mask.float()]).to(engine.device)
        max_rows, width = (int(size) for size in engine.reduce([float(size) for size in mask.shape], "max"))
        columns = F.pad(columns, (0, width - mask.shape[1], 0, max_rows - len(mask)))
        log_probs, old_log_probs, advantages, sampled = torch.cat(engine.gather(columns), dim=1)
        chosen = select(log_probs, old_log_probs, advantages, sampled.bool(), self.config, self.seed)
        first = engine.data.rank * max_rows
        selection = torch.zeros(log_prob.shape, dtype=torch.bool)
        selection[rows] = chosen[first : first + len(mask), : mask.shape[1]].cpu()
        return selection

    def _other_terms(
        self, micro_batch: PackedMicroBatch, log_prob: Tensor, entropy: Tensor
    ) -> list[tuple[str, float, Tensor]]:
        """Return (name of the metric, weight in the loss, term) of the loss's other terms.

        A term that is only a metric has weight 0.
        """
        config = self.config
        mask = micro_batch.mask
        mode = self.config.loss_agg_mode
        denominator = self.mini_batch.denominator.of_rows(micro_batch.rows)
        entropy = entropy if self.entropy_coeff else entropy.detach()
        mean_entropy = agg_loss(entropy.detach(), mask, "token-mean", denominator=denominator)
        entropy_loss = agg_loss(entropy, mask, mode, denominator=denominator)
        terms = [
            ("actor/entropy", 0.0, mean_entropy),
            ("actor/entropy_loss", -self.entropy_coeff, entropy_loss),
        ]
        if uses_kl_loss(config):
            reference = self._rows("ref_log_prob", micro_batch)
            kl_loss = compute_kl_loss(log_prob, reference, mask, config.kl_loss_type, mode, denominator)
            terms.append(("actor/kl_loss", config.kl_loss_coef, kl_loss))
            kl = compute_kl_loss(
                log_prob.detach(), reference, mask, config.kl_loss_type, "token-mean", denominator
            )
            terms.append(("actor/ref_kl", 0.0, kl))
        if config.echo_coeff:
            echo = echo_loss(log_prob, micro_batch.extra_mask, self.echo_denominator)
            terms.append(("actor/echo_loss", config.echo_coeff, echo))
        return terms

    def _rows(self, key: str, micro_batch: PackedMicroBatch) -> Tensor:
        """Return the micro-batch's rows of a column of the batch, on the engine's device."""
        return to_device(self.batch[key][micro_batch.rows], self.engine.device)

    def _rows_or_none(self, key: str, micro_batch: PackedMicroBatch) -> Tensor | None:
        """Return what `_rows` returns, or None if the batch has no such column."""
        return self._rows(key, micro_batch) if key in self.batch else None


def _ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the smallest and the largest ratio of new to old probability."""
    return {
        "actor/ratio/min": log_ratio.masked_fill(~mask, torch.inf).min().exp(),
        "actor/ratio/max": log_ratio.masked_fill(~mask, -torch.inf).max().exp(),
    }


def compute_log_prob(engine: Engine, data: DataProto, limits: MicroBatchLimits, temperature: float) -> Tensor:
    """Return the log-probs of the response tokens, [N, R] float32 on CPU, 0 where nothing was sampled."""
    return token_statistics(engine, data, limits, temperature)["log_probs"]


def token_statistics(
    engine: Engine,
    data: DataProto,
    limits: MicroBatchLimits,
    temperature: float,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> dict[str, Tensor]:
    """Return statistics of the sampled tokens, each [N, R] float32 on CPU, 0 where nothing was sampled.

    They are `log_probs` and, if requested, `entropys` (nats) and `sum_pi_squared`. The latter two are of the
    distribution that the tokens were drawn from.
    """
    options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
    options["with_sum_pi_squared"] = with_sum_pi_squared
    requested = {"log_probs": True, "entropys": with_entropy, "sum_pi_squared": with_sum_pi_squared}
    wanted = [number for number, is_on in enumerate(requested.values()) if is_on]
    results = infer_rows(tensors_of(data), range(len(data)), engine, limits, options, wanted)
    return dict(zip([name for name, is_on in requested.items() if is_on], results, strict=True))


class DataParallelPPOActor:
    """The updates of a policy from trajectories with advantages.

    Args:
        config: the `actor_rollout_ref.actor` block.
        engine: this rank's share of the policy.
        limits: the limits of the update's micro-batches.
        temperature: the temperature that the trajectories were sampled with.
        rollout_n: `rollout.n`, which multiplies `ppo_mini_batch_size`.
        seed: the seed of `shuffle`, and of losses that choose tokens at random.
    """

    def __init__(
        self,
        config: Actor,
        engine: Engine,
        limits: MicroBatchLimits,
        temperature: float,
        rollout_n: int = 1,
        seed: int = 0,
    ):
        self.config = config
        self.engine = engine
        self.limits = limits
        self.temperature = temperature
        self.seed = seed
        self.loop = UpdateLoop(
            "actor", UpdateSchedule.of(config), engine, limits, rollout_n, seed, config.loss_scale_factor
        )
        self.entropy_controller = get_entropy_controller(config)

    def update_policy(self, data: DataProto) -> dict[str, float]:
        """Make `ppo_epochs` passes over the rows, with one optimizer step per mini-batch.

        meta_info `num_mini_batches` is the number of mini-batches. Without it, the configured size determines
        the number from this rank's rows.

        The method reads input_ids, attention_mask, position_ids, response_mask, and the columns of
        `loss_columns`. In the first mini-batch the policy is still the one that `old_log_probs` are of, so
        the ratio is 1 and they are not read. With meta_info `bypass_mode` they are the rollout engine's, and
        are read there too. They may be missing if there is only one optimizer step, or if the policy loss
        does without them. In the latter case, with several steps, there are no metrics of the ratio.

        With `turn_ids` [N, R] in the batch each turn is a row of the loss (`verl/packing/turn_rows.py`).
        Losses and aggregations that know sequences then see it as a sequence. Mini-batches stay sets of
        trajectories.

        Returns:
            Metrics `actor/*`, and `rollout_corr/*` if the `rollout_log_probs` have not been compared with
            anything yet.
        """
        trajectories = batch = self._batch(data)
        if "turn_ids" in data.tensors:
            batch = split_into_turns(trajectories, data.tensors["turn_ids"])
        bypass = bool(data.meta_info.get("bypass_mode", False))
        first_log_probs: Tensor | None = None
        if "rollout_log_probs" in batch and (bypass or "old_log_probs" not in batch):
            shape = batch["response_mask"].shape
            device = self.engine.device
            first_log_probs = torch.full(shape, torch.nan, device=device)
        entropy_coeff = self.entropy_controller.value
        has_ratio = "old_log_probs" in batch or self.loop.num_steps(data) == 1

        def objective_of(mini_batch: MiniBatch) -> PolicyObjective:
            is_first = mini_batch.number == 0
            bound: StepBound | None = None
            if self.config.max_step_kl is not None:
                bound = StepBound(
                    self.config.max_step_kl,
                    self.engine,
                    batch,
                    mini_batch.rows,
                    self.limits,
                    self.temperature,
                )
            return PolicyObjective(
                config=self.config,
                engine=self.engine,
                temperature=self.temperature,
                batch=batch,
                mini_batch=mini_batch,
                on_policy=is_first and has_ratio and not bypass,
                entropy_coeff=entropy_coeff,
                rows_without_gradient=rows_without_gradient(
                    self.config, entropy_coeff, batch, mini_batch.rows
                ),
                limits=self.limits,
                seed=(self.seed * 1_000_003 + self.engine.num_training_steps) * 1_009 + mini_batch.number,
                first_log_probs=first_log_probs if is_first else None,
                step_bound=bound,
            )

        metrics = self.loop.run(data, batch, objective_of)
        metrics["actor/entropy_coeff"] = entropy_coeff
        if uses_kl_loss(self.config):
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        if "actor/entropy" in metrics:
            self.entropy_controller.update(metrics["actor/entropy"])
        if first_log_probs is not None:  # the comparison is over trajectories, even if turns are rows
            first_log_probs = first_log_probs.cpu()
            mask = trajectories["response_mask"].bool()
            rollout = trajectories["rollout_log_probs"]
            if TRAJECTORY in batch:
                first_log_probs = rows_to_trajectories(first_log_probs, batch, mask.shape)
            compared = mask & ~first_log_probs.isnan()
            metrics |= rollout_agreement(rollout, first_log_probs, compared, self.engine.reduce)
        return metrics

    def _batch(self, data: DataProto) -> dict[str, Tensor]:
        """Return the columns that the update reads.

        Raises ValueError if one is missing.
        """
        needed, optional = loss_columns(self.config)
        batch = tensors_of(data, needed, optional)
        if "observation_mask" in batch:  # a row without a sampled token has no part in the loss
            has_tokens = batch["response_mask"].bool().any(dim=1, keepdim=True)
            batch[EXTRA_LOSS_KEY] = batch["observation_mask"].bool() & has_tokens
        num_steps = self.loop.num_steps(data)
        needs_old = "old_log_prob" in policy_loss_inputs(self.config.policy_loss.loss_mode)
        if needs_old and "old_log_probs" not in batch and num_steps > 1:
            raise ValueError(
                f"update_policy takes {num_steps} optimizer steps on {len(data)} rows, but the batch has no "
                "old_log_probs; call compute_log_prob before the update."
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next training step depends on, besides the engine."""
        return {"loop": self.loop.state_dict(), "entropy_controller": self.entropy_controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loop.load_state_dict(state["loop"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])

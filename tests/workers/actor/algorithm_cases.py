"""A batch with every column that a loss can ask for, and actors on one model for any configuration; child
processes import it too.
"""

import copy
import math

import torch
from tiny_training import VOCABULARY, gradients_of, make_actor, make_batch, make_config

from verl.algos.aggregation import prompt_counts
from verl.config import replace_values
from verl.protocol import DataProto, object_array
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.engine.update_loop import MicroBatchLimits

ALL_ROWS = MicroBatchLimits(None, None, padded=False)
SPLITS = {
    "rows of 1": MicroBatchLimits(1, None, padded=False),
    "rows of 3, padded": MicroBatchLimits(3, None, padded=True),
    "60 tokens": MicroBatchLimits(None, 60, padded=False),
    "20 tokens preferred": MicroBatchLimits(None, None, padded=False, preferred_tokens=20),
}
PER_TOKEN = ("advantages", "old_log_probs", "ref_log_prob", "teacher_log_prob", "rollout_is_weights")


def full_batch(num_rows=7, seed=0, pad_id=0) -> DataProto:
    """Groups of 3 rows (the last may be smaller). Every row ends in an observation of two tokens that nothing
    was sampled after; row 3 sampled nothing; the advantages of rows 4 and 5 are 0.
    """
    batch = make_batch(num_rows, seed, pad_id, shift=0.3)
    tensors = batch.batch
    generator = torch.Generator().manual_seed(seed + 1)
    mask = tensors["response_mask"]
    width = tensors["response_mask"].shape[1]
    attention = tensors["attention_mask"][:, -width:]
    last = attention.sum(dim=1, keepdim=True) - torch.arange(width) <= 2
    mask[last] = 0
    tensors["observation_mask"] = attention * (1 - mask)
    tensors["advantages"][4:6] = 0.0
    for key, scale, offset in (("teacher_log_prob", 0.5, -3.0), ("rollout_is_weights", 0.2, 1.0)):
        tensors[key] = torch.randn(mask.shape, generator=generator) * scale + offset
    for key in PER_TOKEN:
        tensors[key] = tensors[key] * mask
    del tensors["rollout_log_probs"]
    uids = [f"step1-{row // 3}" for row in range(num_rows)]
    batch.non_tensor_batch["uid"] = object_array(uids)
    tensors["prompt_tokens"], tensors["prompt_rows"] = prompt_counts(mask, uids)
    batch.meta_info |= {"bypass_mode": True, "num_mini_batches": 1}  # old_log_probs count at once
    return batch


def with_other_masked_values(batch: DataProto, keep_observations=False) -> DataProto:
    """The same trajectories, with other numbers wherever the policy sampled nothing: NaN in every column, ids
    and positions of padding, the whole row that sampled nothing, ids after the last sampled token.
    """
    dirty = copy.deepcopy(batch)
    tensors = dirty.batch
    mask = tensors["response_mask"].bool()
    prompt_width = tensors["input_ids"].shape[1] - mask.shape[1]
    for key in PER_TOKEN:
        tensors[key][~mask] = math.nan
    padding = tensors["attention_mask"] == 0
    tensors["input_ids"][padding] = 17
    tensors["position_ids"][padding] = 77
    tensors["input_ids"][~mask.any(dim=1)] = 11
    if not keep_observations:
        after_last = ~mask.flip(1).cumsum(1).bool().flip(1)
        tail = tensors["input_ids"][:, prompt_width:]
        tail[after_last] = (tail[after_last] + 5) % VOCABULARY
    return dirty


def reordered(batch: DataProto) -> DataProto:
    """The same rows the other way round."""
    return batch.select_idxs(list(reversed(range(len(batch)))))


class Steep(torch.autograd.Function):
    """The identity, with an infinite derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def own_loss(log_prob, advantages, response_mask, denominator):
    """A user's loss: REINFORCE on the sum of each row's tokens."""
    losses = -log_prob * advantages.masked_fill(~response_mask.bool(), 0.0)
    return losses.sum() / denominator.num_sequences, {"actor/own": losses.detach().sum()}


class ActorFactory:
    """Actors of any configuration on one engine."""

    def __init__(self, model_path, world_size=1, *overrides):
        config = make_config(model_path, *overrides)
        self.engine = make_actor(config, world_size).engine
        self.block = config.actor_rollout_ref.actor

    def actor(self, limits=ALL_ROWS, **settings) -> DataParallelPPOActor:
        """settings: of the `actor` block; of a block in it as <block>__<key>."""
        values = {name.replace("__", "."): value for name, value in settings.items()}
        block = replace_values(self.block, values)
        return DataParallelPPOActor(block, self.engine, limits, 0.9)

    def update(self, batch, limits=ALL_ROWS, **settings):
        """(metrics, gradient) of an update of one mini-batch that is not applied."""
        self.engine.scheduler.last_epoch = 0  # always the same training step
        actor = self.actor(limits, **settings)
        metrics, (gradient,) = gradients_of(self.engine, lambda: actor.update_policy(batch))
        return metrics, gradient

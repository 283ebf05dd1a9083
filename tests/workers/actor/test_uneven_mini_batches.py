"""Rows that no mini-batch size divides: equal parts, with the same loss and gradient for every split."""

from types import SimpleNamespace

import pytest
import step_wise_cases
from algorithm_cases import ALL_ROWS, SPLITS, ActorFactory, full_batch
from tiny_training import assert_same_gradients, gradients_of, make_config, make_critic

from verl.config import replace_values
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.engine.update_loop import mini_batches

NUM_ROWS = 11
SIZE = 5  # rows of a mini-batch as configured: 5, 5 and 1, where they were taken in order
COUNT = 3
BATCHES = {"trajectories": full_batch, "turns": step_wise_cases.trajectories}


def arranged(batch, world_size, block_name, **settings) -> list[DataProto]:
    """Return each rank's rows, as the trainer deals them out."""
    config = make_config("unread")
    block = config.actor_rollout_ref.actor if block_name == "actor" else config.critic
    block = replace_values(block, {"ppo_mini_batch_size": SIZE, **settings})
    trainer = SimpleNamespace(
        config=config,
        passes=SimpleNamespace(bypass=True),
        state=SimpleNamespace(step=4),
        _attention_length=64.0,
    )
    group = SimpleNamespace(dp_size=world_size)
    rows, _ = RayPPOTrainer._arranged(trainer, batch, group, block)
    return rows.chunk(world_size)


def of_mini_batch(ranks: list[DataProto], number: int) -> DataProto:
    """Return the rows of all ranks in a mini-batch, as a batch of one mini-batch."""
    parts = []
    for rank in ranks:
        rows = mini_batches(len(rank), rank.meta_info["num_mini_batches"])[number]
        parts.append(rank.select_idxs(list(rows)))
    batch = DataProto.concat(parts)
    batch.meta_info = {"bypass_mode": True, "num_mini_batches": 1}
    return batch


@pytest.fixture(scope="module")
def factory(model_path):
    """Actors in float64, which leaves only the arithmetic to differ."""
    made = ActorFactory(model_path)
    made.engine.module.double()
    return made


@pytest.mark.parametrize(
    ("kind", "loss_agg_mode", "shuffle", "world_size", "split"),
    [
        ("trajectories", "token-mean", False, 3, "rows of 1"),
        ("trajectories", "prompt-mean", True, 2, "60 tokens"),
        ("turns", "prompt-mean", True, 2, "60 tokens"),
    ],
)
def test_rule_5_the_actor_s_gradients_of_uneven_rows_are_the_same_for_every_split(
    factory, kind, loss_agg_mode, shuffle, world_size, split
):
    batch = BATCHES[kind](NUM_ROWS)
    settings = {"shuffle": shuffle, "loss_agg_mode": loss_agg_mode}
    (alone,) = arranged(batch, 1, "actor", **settings)
    actor = factory.actor(ALL_ROWS, loss_agg_mode=loss_agg_mode)
    assert actor.loop.num_steps(alone) == COUNT
    _, expected = gradients_of(factory.engine, lambda: actor.update_policy(alone))
    assert len(expected) == COUNT
    ranks = arranged(batch, world_size, "actor", **settings)
    assert {rank.meta_info["num_mini_batches"] for rank in ranks} == {COUNT}
    for number, gradient in enumerate(expected):
        rows = of_mini_batch(ranks, number)
        _, of_ranks = factory.update(rows, SPLITS[split], loss_agg_mode=loss_agg_mode)
        assert_same_gradients(of_ranks, gradient, tolerance=1e-6)


def test_rule_5_the_critic_s_gradients_of_uneven_rows_are_the_same_for_every_split(model_path):
    batch = full_batch(NUM_ROWS)
    critic = make_critic(make_config(model_path))
    (alone,) = arranged(batch, 1, "critic")
    _, expected = gradients_of(critic.engine, lambda: critic.update_critic(alone))
    assert len(expected) == COUNT
    ranks = arranged(batch, 2, "critic")
    for number, gradient in enumerate(expected):
        rows = of_mini_batch(ranks, number)
        _, (of_ranks,) = gradients_of(critic.engine, lambda rows=rows: critic.update_critic(rows))
        assert_same_gradients(of_ranks, gradient)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_optimizer_step_is_made_of_a_row_that_is_left_over(world_size):
    ranks = arranged(full_batch(NUM_ROWS), world_size, "actor")
    sizes = []
    for number in range(COUNT):
        mask = of_mini_batch(ranks, number).tensors["response_mask"]
        sizes.append(int(mask.any(dim=1).sum()))
    assert sizes == [3, 4, 3]  # of 4, 4 and 3 rows; one of the first sampled nothing


def test_each_epoch_has_the_mini_batches_in_an_order_of_its_own_and_metrics_are_means(factory):
    batch = full_batch(NUM_ROWS)
    batch.meta_info["num_mini_batches"] = COUNT

    def update(num_epochs, shuffle):
        factory.engine.scheduler.last_epoch = 0
        actor = factory.actor(ALL_ROWS, ppo_epochs=num_epochs, shuffle=shuffle)
        return gradients_of(factory.engine, lambda: actor.update_policy(batch))

    metrics, in_order = update(1, shuffle=False)
    shuffled_metrics, gradients = update(4, shuffle=True)
    (name, *_) = in_order[0]
    numbers = []
    for gradient in gradients:
        distances = [float((gradient[name] - other[name]).norm()) for other in in_order]
        numbers.append(distances.index(min(distances)))
    orders = [tuple(numbers[start : start + COUNT]) for start in range(0, len(numbers), COUNT)]
    assert len(orders) == 4 and all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) > 1
    assert shuffled_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"])

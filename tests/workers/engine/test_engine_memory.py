"""What moves between the device and CPU memory, and that it changes no number.

The keys act on CUDA; here their parts are switched on by hand.
"""

from tiny_training import assert_same_gradients, gradients_of, make_actor, make_batch, make_config

from verl.workers.engine.fsdp_engine import HostGradients

ROWS_OF_ONE = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"


def with_host_gradients(model_path, *overrides):
    actor = make_actor(make_config(model_path, *overrides))
    actor.engine.host_gradients = HostGradients(actor.engine.module.parameters())
    return actor


def test_gradients_that_add_up_on_the_host_are_the_same(model_path):
    for overrides in ([], [ROWS_OF_ONE], [ROWS_OF_ONE, "actor_rollout_ref.model.lora_rank=2"]):
        plain = make_actor(make_config(model_path, *overrides))
        offloading = with_host_gradients(model_path, *overrides)
        runs = [
            gradients_of(actor.engine, lambda actor=actor: actor.update_policy(make_batch()))
            for actor in (plain, offloading)
        ]
        assert runs[0][0] == runs[1][0]
        for got, want in zip(runs[1][1], runs[0][1], strict=True):
            assert_same_gradients(got, want, tolerance=1e-6)


def test_between_micro_batches_the_device_holds_no_gradient(model_path):
    actor = with_host_gradients(model_path, ROWS_OF_ONE)
    parameters = list(actor.engine.module.parameters())
    backward, seen = actor.engine._backward, []

    def watched(loss, is_last):
        backward(loss, is_last)
        seen.append((is_last, sum(p.grad is not None for p in parameters)))

    actor.engine._backward = watched
    actor.update_policy(make_batch())
    assert len(seen) == 7  # one of the eight rows sampled nothing
    assert seen == [(False, 0)] * 6 + [(True, len(parameters))]
    assert all(p.grad is None for p in parameters)


def test_nested_blocks_move_weights_and_state_once(model_path):
    engine = make_actor(make_config(model_path)).engine
    engine.offloads_params = engine._offloads_optimizer = True
    moves, module_to, move_optimizer = [], engine.module.to, engine._move_optimizer

    def move_module(device):
        moves.append("weights")
        return module_to(device)

    def move_state(device):
        moves.append("state")
        move_optimizer(device)

    engine.module.to, engine._move_optimizer = move_module, move_state
    with engine.loaded():
        with engine.loaded(optimizer=True):
            assert moves == ["weights", "state"]
            with engine.loaded(optimizer=True):
                pass
            assert moves == ["weights", "state"]
        assert moves == ["weights", "state", "state"]
    assert moves == ["weights", "state", "state", "weights"]

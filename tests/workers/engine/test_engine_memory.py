"""What moves between the device and CPU memory, and that it changes no number.

The keys act on CUDA; here their parts are switched on by hand.
"""

from tiny_training import make_actor, make_config


def test_nested_blocks_move_weights_and_state_once(model_path):
    engine = make_actor(make_config(model_path)).engine
    engine.offloads_params = engine._offloads_optimizer = True
    moves = []
    module_to = engine.module.to
    move_optimizer = engine._move_optimizer

    def move_module(device):
        moves.append("weights")
        return module_to(device)

    def move_state(device):
        moves.append("state")
        move_optimizer(device)

    engine.module.to = move_module
    engine._move_optimizer = move_state
    with engine.loaded():
        with engine.loaded(optimizer=True):
            assert moves == ["weights", "state"]
            with engine.loaded(optimizer=True):
                pass
            assert moves == ["weights", "state"]
        assert moves == ["weights", "state", "state"]
    assert moves == ["weights", "state", "state", "weights"]

"""Rollouts ahead of training get the same weights by files as over Ray: whole runs, compared bit by bit."""

import pytest
from safetensors.torch import load_file
from small_runs import arguments, metrics

from verl.trainer import main_ppo

# They depend on the clock, or on when the engine was asked.
CLOCK = ("timing", "perf/", "async/", "retrieval/", "rollout/seconds", "rollout/tokens", "rollout/generated")
CLOCK += ("rollout/kv", "rollout/parked", "rollout/pre", "rollout/queued", "rollout/running", "rollout/steps")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_with_what_changed_alone_a_repeatable_run_is_that_of_whole_weights(world, url, tmp_path):
    rows, weights, sent = {}, {}, {}
    for transfer in ("ray", "delta"):
        folder = tmp_path / transfer
        line = arguments(
            world,
            url,
            folder,
            actor_rollout_ref__rollout__name="native",
            actor_rollout_ref__rollout__placement="apart",
            actor_rollout_ref__rollout__weight_transfer=transfer,
            actor_rollout_ref__actor__optim__lr=1e-6,
            algorithm__rollout_correction__bypass_mode="true",
            trainer__async_training__max_staleness=1,
            trainer__async_training__repeatable="true",
            trainer__backend="ray",
            trainer__total_training_steps=4,
            trainer__save_freq=2,
        )
        if transfer == "delta":
            elsewhere = tmp_path / "weights"
            line += [
                f"actor_rollout_ref.rollout.weight_dir={elsewhere}",
                "actor_rollout_ref.rollout.anchor_every=3",
            ]
        assert main_ppo.run(line) == 0
        logged = metrics(folder)
        rows[transfer] = [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in logged]
        sent[transfer] = [row["async/sync_bytes"] for row in logged if "async/sync_bytes" in row]
        weights[transfer] = load_file(folder / "global_step_4/actor/huggingface/model.safetensors")
    assert len(rows["ray"]) >= 4 and rows["ray"] == rows["delta"]
    assert all((weights["ray"][name] == tensor).all() for name, tensor in weights["delta"].items())
    assert sent["delta"][1] < 0.7 * sent["ray"][1]
    assert list(elsewhere.iterdir()) == []  # versions go with the run

"""fsdp_size and sequence parallelism against the number of processes and of attention heads."""

import json

import pytest

from verl.trainer.config.layout_checks import check_layout
from verl.trainer.config.loading import load_config
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.loading import check_heads

FSDP, SHARING = "fsdp_config.fsdp_size", "ulysses_sequence_parallel_size"


def check(*overrides):
    config = load_config(["trainer.nnodes=2", "trainer.n_gpus_per_node=4", *overrides])
    check_layout(config, Passes.of(config))


@pytest.mark.parametrize("size", [-1, 1, 2, 4, 8, 64])
def test_a_size_that_divides_the_processes_or_exceeds_them_is_taken(size):
    check(f"actor_rollout_ref.actor.{FSDP}={size}")


@pytest.mark.parametrize(
    "key, extra",
    [
        (f"actor_rollout_ref.actor.{FSDP}", []),
        (f"actor_rollout_ref.ref.{FSDP}", ["actor_rollout_ref.actor.use_kl_loss=true"]),
        (f"critic.model.{FSDP}", ["algorithm.adv_estimator=gae"]),
        (f"actor_rollout_ref.actor.{SHARING}", []),
        (f"critic.{SHARING}", ["algorithm.adv_estimator=gae"]),
    ],
)
def test_a_size_that_does_not_divide_the_processes_is_named(key, extra):
    with pytest.raises(ValueError, match=f"Found {key}=3 with 8 processes .* expected a number that divides"):
        check(f"{key}=3", *extra)


def test_megatron_does_not_take_an_fsdp_size():
    with pytest.raises(ValueError, match="fsdp_size=2 with actor_rollout_ref.actor.strategy=megatron"):
        check("actor_rollout_ref.actor.strategy=megatron", f"actor_rollout_ref.actor.{FSDP}=2")


def test_a_model_whose_heads_do_not_divide_is_named_with_what_would_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 14}))
    (tmp_path / "model.safetensors").touch()
    check_heads({"path": str(tmp_path)}, 7)
    with pytest.raises(ValueError, match="size=4, but .* has 14 attention heads; .* divides them: 2, 7, 14"):
        check_heads({"path": str(tmp_path)}, 4)

"""Which GPUs the processes of a run ask for."""

import json

import pytest
from quick_config import config_with

from verl.planning.passes import Passes
from verl.planning.placement import build_pools, gpus_of_sampling, roles_of

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def apart(tmp_path):
    """apart(*settings): a configuration with rollouts apart on GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def make(*settings):
        fixed = [f"actor_rollout_ref.model.path={tmp_path}", f"{ROLLOUT}.placement=apart"]
        return config_with(*fixed, "trainer.device=cuda", "trainer.backend=ray", *settings)

    return make


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ([f"{ROLLOUT}.name=native"], 1),
        ([f"{ROLLOUT}.name=vllm"], 1),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=4"], 4),
        ([f"{ROLLOUT}.name=remote", f"{ROLLOUT}.remote.urls=['http://a:1','http://b:1','http://c:1']"], 0),
    ],
)
def test_each_process_that_samples_asks_for_the_gpus_of_its_engine_on_any_node(
    settings, gpus, apart, monkeypatch
):
    base = pytest.importorskip("verl.single_controller.ray.base")
    asked = []

    class Group:
        def wait(self, seconds):
            return True

    def reserve(bundles, strategy):
        asked.append((strategy, bundles))
        return Group()

    monkeypatch.setattr(base, "placement_group", reserve)
    config = apart(*settings, f"{ROLLOUT}.num_processes=3", "trainer.n_gpus_per_node=2")
    assert gpus_of_sampling(config) == 3 * gpus
    pools = build_pools(config, roles_of(Passes(config))).resource_pool_dict
    for pool in pools.values():
        pool.create_placement_group()
    sampling = {"CPU": 0.25} | ({"GPU": float(gpus)} if gpus else {})
    assert asked == [("STRICT_SPREAD", [{"CPU": 0.5, "GPU": 2.0}]), ("PACK", [sampling] * 3)]
    assert pools["rollout_pool"].gpus_per_process == gpus

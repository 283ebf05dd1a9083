"""Plans of whole runs: who goes where, what fits, and what is said when it doesn't."""

import re

import pytest
from known_models import search_r1_settings, write_config, write_small

from verl.trainer.config import load_config
from verl.trainer.dry_run.hardware import GIB, Hardware
from verl.trainer.dry_run.plan import Models, Plan, build_plan
from verl.trainer.dry_run.remedies import cheapest_change
from verl.trainer.dry_run.report import report, verdict

H80 = Hardware("cuda", 80 * GIB, 8, "80 GB")


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("7B"), "7B")
    return folder, Models.of(load_config(search_r1_settings(folder, "gae")))


@pytest.fixture(scope="module")
def seventy_two(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("72B"), "72B")
    return folder, Models.of(load_config(search_r1_settings(folder, "grpo")))


def plan_of(model, estimator: str, *settings: str, hardware: Hardware = H80) -> tuple[Plan, list[str]]:
    """The plan, and the lines that a dry run prints about it."""
    folder, models = model
    config = load_config([*search_r1_settings(folder, estimator), *settings])
    plan = build_plan(config, hardware, models)
    changes = None if plan.fits else cheapest_change(config, hardware, models)
    return plan, [*report(plan, config), *verdict(plan, changes, config)]


def gib_of(plan: Plan, name: str, rank: int = 0) -> float:
    item = next(item for item in plan.processes[rank].items if item.name == name)
    return max(item.phases.values()) / GIB


def test_ppo_of_7b_fits_on_8_gpus_of_80_gb(seven):
    plan, lines = plan_of(seven, "gae", "trainer.n_gpus_per_node=8")
    assert plan.fits and lines[-1].startswith("fits: node 0, GPU 0 has ")
    assert [(p.rank, p.node, p.device) for p in plan.processes] == [(i, 0, i) for i in range(8)]
    assert plan.processes[5].position == "dp 5 shard 5/8"
    numel = 7_615_616_512
    assert gib_of(plan, "actor: weights") == pytest.approx(4 * numel / 8 / GIB, rel=1e-3)
    assert gib_of(plan, "actor: optimizer state") == pytest.approx(8 * numel / 8 / GIB, rel=1e-3)
    assert gib_of(plan, "reference: weights") == pytest.approx(2 * numel / 8 / GIB, rel=1e-3)
    assert gib_of(plan, "rollout: weights of its own") == pytest.approx(2 * numel / GIB, rel=1e-3)
    # 28 layers x (key and value) x 4 heads x 128 x 2 bytes for each of 4,096 positions of 128 trajectories
    assert gib_of(plan, "rollout: KV cache") == pytest.approx(28 * 2 * 4 * 128 * 2 * 4096 * 128 / GIB)
    assert "  rank 7: node 0, GPU 7, dp 7 shard 7/8" in lines
    text = "\n".join(lines)
    for column in ("rollout", "log-probs", "reference", "values", "critic's update", "actor's update"):
        assert column in text


def test_grpo_of_72b_on_4_nodes_names_the_device_the_lack_and_the_cheapest_way_out(seventy_two):
    plan, lines = plan_of(seventy_two, "grpo", "trainer.nnodes=4", "trainer.n_gpus_per_node=8")
    assert not plan.fits and len(plan.processes) == 32 and plan.processes[31].node == 3
    load, phase, over = plan.shortfall
    assert phase == "update_actor" and over == load.total(phase) - 80 * GIB > 100 * GIB
    assert f"{load.name} would need" in "\n".join(lines)
    assert "placement=apart" in lines[-1]  # vLLM splits it
    changes = re.findall(r"(\S+)=(\S+)", lines[-1])
    fitting, after = plan_of(
        seventy_two,
        "grpo",
        "trainer.nnodes=4",
        "trainer.n_gpus_per_node=8",
        *(f"{key}={value}" for key, value in changes),
    )
    assert fitting.fits and after[-1].startswith("fits")
    weights, cache = fitting.server  # of each of 8 GPUs of a server: bf16, and the rest of half a GPU
    assert weights == 2 * 72_706_203_648 // 8 and cache == 40 * GIB - weights - 2 * GIB


def test_a_single_cheap_change_is_preferred_to_several(seven):
    settings = ("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.free_cache_engine=false")
    plan, lines = plan_of(seven, "gae", *settings)
    assert not plan.fits and lines[-1].endswith("free_cache_engine=true (a moment at each rollout)")


def test_what_is_offloaded_moves_to_the_nodes_memory(seven):
    off = [f"actor_rollout_ref.actor.fsdp_config.{kind}_offload=true" for kind in ("param", "optimizer")]
    plan, _ = plan_of(seven, "gae", "trainer.n_gpus_per_node=8")
    less, _ = plan_of(seven, "gae", "trainer.n_gpus_per_node=8", *off)
    moved = 12 * 7_615_616_512  # float32 weights and two moments, over all processes
    assert less.host_bytes(0) - plan.host_bytes(0) == pytest.approx(moved, rel=1e-3)
    assert less.loads[0].total("update_critic") < plan.loads[0].total("update_critic") - moved / 8 * 0.99


def test_hybrid_sharding_names_the_copy_and_the_shard(seven):
    settings = (
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
    )
    plan, _ = plan_of(seven, "gae", *settings)
    assert plan.processes[9].position == "dp 9 shard 1/8 copy 1"
    assert gib_of(plan, "actor: weights") == pytest.approx(4 * 7_615_616_512 / 8 / GIB, rel=1e-3)


def test_sequence_parallel_processes_share_tokens_and_rows(seven):
    size = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    wide, _ = plan_of(seven, "gae", "trainer.n_gpus_per_node=8")
    plan, _ = plan_of(seven, "gae", "trainer.n_gpus_per_node=8", size)
    assert plan.processes[3].position == "dp 1 sp 1 shard 3/8"
    assert gib_of(plan, "actor: activations") == pytest.approx(gib_of(wide, "actor: activations") / 2)
    assert gib_of(plan, "critic: activations") == gib_of(
        wide, "critic: activations"
    )  # it has a size of its own


@pytest.mark.slow
def test_megatron_processes_have_stages_and_slices(seven):
    settings = (
        "actor_rollout_ref.actor.strategy=megatron",
        "critic.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "trainer.n_gpus_per_node=8",
    )
    plan, _ = plan_of(seven, "gae", *settings)
    assert [plan.processes[rank].position for rank in (0, 3, 6)] == [
        "dp 0 tp 0 pp 0 cp 0",
        "dp 1 tp 1 pp 0 cp 0",
        "dp 1 tp 0 pp 1 cp 0",
    ]
    both = gib_of(plan, "actor: weights", 0) + gib_of(plan, "actor: weights", 4)
    assert 2 * both == pytest.approx(2 * 7_615_616_512 / GIB, rel=1e-3)  # bf16, over both tensor ranks
    assert len(plan.loads) == 8 and plan.loads[0].items != plan.loads[7].items


def test_a_rollout_pool_takes_the_engine_out_of_the_training_processes(seven):
    pool = ("trainer.rollout_pool.n_gpus_per_node=4", "trainer.n_gpus_per_node=4")
    plan, lines = plan_of(seven, "gae", *pool, "critic.model.fsdp_config.optimizer_offload=true")
    trainers = [p for p in plan.processes if p.pool == "global_pool"]
    rollouts = [p for p in plan.processes if p.pool == "rollout_pool"]
    assert [p.device for p in rollouts] == [4, 5, 6, 7] and {p.node for p in plan.processes} == {0}
    assert trainers[0].roles == ("actor_ref", "critic") and rollouts[0].roles == ("rollout",)
    assert not any(item.name.startswith("rollout") for item in trainers[0].items)
    assert not any(item.name.startswith(("actor", "critic")) for item in rollouts[0].items)
    bigger, _ = plan_of(seven, "gae", "trainer.n_gpus_per_node=8", "trainer.rollout_pool.n_gpus_per_node=4")
    assert {p.node for p in bigger.processes if p.pool == "rollout_pool"} == {1}  # node 0 is full
    assert any(line.startswith("rollout_pool: 4 processes on node 0; each: rollout") for line in lines)


def test_processes_without_gpus_share_their_nodes_memory(tmp_path):
    folder = write_small(tmp_path)
    config = load_config(
        [
            *search_r1_settings(folder, "grpo"),
            "trainer.n_gpus_per_node=3",
            "trainer.rollout_pool.n_gpus_per_node=1",
        ]
    )
    plan = build_plan(config, Hardware("cpu", 8 * GIB, 8, "a laptop"), Models.of(config))
    assert len(plan.loads) == 1 and plan.loads[0].name == "node 0"
    one = sum(sum(i.phases["rollout"] for i in p.items if "rollout" in i.phases) for p in plan.processes)
    driver = plan.loads[0].total("rollout") - one
    assert 0.5 * GIB < driver < GIB


def test_a_cache_below_one_trajectory_is_a_problem_of_its_own(tmp_path):
    folder = write_small(tmp_path)
    config = load_config(
        [*search_r1_settings(folder, "grpo"), "actor_rollout_ref.rollout.kv_cache_gb=0.0001"]
    )
    plan = build_plan(config, Hardware("cpu", 8 * GIB, 8, "a laptop"), Models.of(config))
    assert plan.shortfall is None and not plan.fits
    assert "one trajectory of 4096 tokens needs" in plan.problems[0]

"""What a dry run says to change: who follows it has a configuration that validation takes, and that fits."""

import re
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from known_models import search_r1_settings, write_config

from verl.trainer.config import load_config, validate
from verl.trainer.dry_run.changes import applied, parallel_ladder
from verl.trainer.dry_run.hardware import GIB, Hardware
from verl.trainer.dry_run.plan import Models, Plan, build_plan
from verl.trainer.dry_run.remedies import cheapest_change
from verl.trainer.dry_run.report import verdict

pytestmark = pytest.mark.slow

FSDP, MEGATRON = "ppo_trainer", "ppo_megatron_trainer"
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
APART = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.placement=apart",
    f"{ROLLOUT}.tensor_model_parallel_size=8",
    f"{ROLLOUT}.vllm.server_urls=http://H:80",
)
FOUR_NODES = ("trainer.nnodes=4", "trainer.n_gpus_per_node=8")
ONE_NODE = ("trainer.n_gpus_per_node=8",)


def cut(tensor: int, pipeline: int, block: str = ACTOR) -> tuple[str, str]:
    return (
        f"{block}.megatron.tensor_model_parallel_size={tensor}",
        f"{block}.megatron.pipeline_model_parallel_size={pipeline}",
    )


class DryRuns:
    """Dry runs of the known models, which are read once for each kind of run."""

    def __init__(self, folder):
        self.folders = {size: write_config(folder / size, size) for size in ("7B", "72B")}
        self.models = cache(self._models)

    def _models(self, size: str, estimator: str, lora_rank: int) -> Models:
        lora = f"actor_rollout_ref.model.lora_rank={lora_rank}"
        return Models.of(load_config([*search_r1_settings(self.folders[size], estimator), lora]))

    def plan(self, size, estimator, gib, name, line) -> tuple[Plan, str, list[str]]:
        """The plan, the last line of its verdict, and the settings that this names."""
        line = [*search_r1_settings(self.folders[size], estimator), "trainer.dry_run=true", *line]
        config = load_config(line, name)
        validate(config, config_name=name)
        models = self.models(size, estimator, config.actor_rollout_ref.model.lora_rank)
        hardware = Hardware("cuda", int(gib * GIB), 8, "of a test")
        plan = build_plan(config, hardware, models)
        changes = None if plan.fits else cheapest_change(config, hardware, models)
        last = list(verdict(plan, changes, config))[-1]
        return plan, last, [f"{key}={value}" for key, value in re.findall(r"(\S+)=(\S+)", last)]

    def follow(self, size, estimator, gib, name, line) -> tuple[str, list[str]]:
        """As `plan`, of one that does not fit; what it says is done, and then it fits."""
        plan, last, changes = self.plan(size, estimator, gib, name, line)
        assert not plan.fits
        assert last.startswith("the cheapest way out: "), last
        followed, _, _ = self.plan(size, estimator, gib, name, [*line, *changes])
        assert followed.fits, (last, followed.shortfall, followed.problems)
        return last, changes


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory):
    return DryRuns(tmp_path_factory.mktemp("models"))


def test_smaller_log_prob_passes_are_found_where_they_alone_make_room(dry_runs):
    line = [*FOUR_NODES, *cut(8, 4), *APART, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"]
    plan, _, _ = dry_runs.plan("72B", "grpo", 80, MEGATRON, line)
    assert plan.shortfall[1] == "log_probs"
    _, changes = dry_runs.follow("72B", "grpo", 80, MEGATRON, line)
    assert changes == [
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        f"{REF}.log_prob_micro_batch_size_per_gpu=32",
    ]


def test_passes_by_tokens_get_fewer_tokens(dry_runs):
    line = [
        *(*FOUR_NODES, *cut(8, 4), *APART, f"{ACTOR}.use_dynamic_bsz=true"),
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=500000",
    ]
    _, changes = dry_runs.follow("72B", "grpo", 80, MEGATRON, line)
    assert changes == [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=250000"]


@pytest.mark.parametrize("kind", ["ppo", "forward"])
def test_the_critics_passes_are_among_what_can_be_smaller(dry_runs, kind):
    line = [*ONE_NODE, f"critic.{kind}_micro_batch_size_per_gpu=64", f"{ACTOR}.ppo_micro_batch_size=8"]
    last, changes = dry_runs.follow("7B", "gae", 50, FSDP, [*line, *APART])
    assert any(change.startswith(f"critic.{kind}_micro_batch_size_per_gpu=") for change in changes), last


def test_passes_without_gradient_are_made_of_the_whole_step(dry_runs):
    line = [*ONE_NODE, *APART, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=128"]
    plan, _, _ = dry_runs.plan("7B", "grpo", 80, FSDP, line)  # 320 rows for each process, 32 of a mini-batch
    less, _, _ = dry_runs.plan("7B", "grpo", 80, FSDP, [*line, f"{ACTOR}.ppo_mini_batch_size=8"])
    sizes = [
        next(item for item in one.loads[0].items if item.name == "actor: activations").phases["log_probs"]
        for one in (plan, less)
    ]
    assert sizes[0] == sizes[1]


def test_with_lora_the_references_passes_have_the_references_size(dry_runs):
    line = [*ONE_NODE, *APART, "actor_rollout_ref.model.lora_rank=16"]
    sizes = [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1", f"{REF}.log_prob_micro_batch_size_per_gpu=200"]
    plan, _, _ = dry_runs.plan("7B", "grpo", 60, FSDP, [*line, *sizes])
    assert plan.loads[0].total("reference") > 2 * plan.loads[0].total("log_probs")


def test_megatron_gets_tensor_parallelism_within_a_node_and_then_stages(dry_runs):
    last, changes = dry_runs.follow("72B", "grpo", 80, MEGATRON, [*FOUR_NODES, *APART])
    for block in (ACTOR, REF):
        assert set(cut(8, 2, block)) <= set(changes)
    assert "offload" not in last and "nnodes" not in last
    last, changes = dry_runs.follow("7B", "grpo", 40, MEGATRON, [*ONE_NODE, *APART])
    assert f"{ACTOR}.megatron.tensor_model_parallel_size=4" in changes  # it has 4 key and value heads
    assert "pipeline" not in last


def test_sizes_of_megatron_that_are_tried_are_those_that_validation_takes(dry_runs):
    line = [*search_r1_settings(dry_runs.folders["72B"], "gae"), "trainer.nnodes=3", "trainer.dry_run=true"]
    line += ["trainer.n_gpus_per_node=8", *APART, *cut(2, 1), "critic.strategy=megatron"]
    config = load_config(line, MEGATRON)
    ladder = parallel_ladder(config, dry_runs.models("72B", "gae", 0))
    found = [
        tuple(change.settings.get(f"{ACTOR}.{key}") for key in ("megatron.tensor_model_parallel_size",
              "megatron.pipeline_model_parallel_size"))
        for change in ladder
    ]  # fmt: skip
    assert found == [(4, None), (8, None)]  # 3 stages of 8 processes don't divide 80 layers
    for change in ladder:
        validate(load_config([*line, *change.words.split(" (")[0].split()], MEGATRON), config_name=MEGATRON)


def test_blocks_that_say_the_same_as_the_actors_are_told_too(dry_runs):
    line = [*FOUR_NODES, *APART, *cut(2, 1), *cut(2, 1, REF)]
    dry_runs.follow("72B", "grpo", 80, MEGATRON, line)


def test_lora_is_named_where_it_can_be_had(dry_runs):
    _, last, _ = dry_runs.plan("72B", "grpo", 8, FSDP, [*ONE_NODE, *APART])
    assert last.startswith("no offloading, no smaller passes") and "lora_rank" in last
    _, last, _ = dry_runs.plan("72B", "grpo", 4, MEGATRON, [*ONE_NODE, *APART])
    assert last.startswith("no offloading") and "pipeline parallelism" in last and "LoRA" not in last
    _, last, _ = dry_runs.plan("72B", "grpo", 3, FSDP, [*APART, "actor_rollout_ref.model.lora_rank=8"])
    assert last.startswith("no offloading") and "LoRA" not in last


@pytest.mark.parametrize("explicit", [False, True])
def test_passes_that_follow_the_number_of_replicas_are_counted_as_they_will_be(dry_runs, explicit):
    """Whether the user has said their size or not: the line that is printed fits both."""
    said = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"] * explicit  # of 64 in all
    dry_runs.follow("7B", "grpo", 60, MEGATRON, [*ONE_NODE, *APART, *said])


def test_applied_is_what_a_command_line_gives(dry_runs):
    line = [*search_r1_settings(dry_runs.folders["7B"], "gae"), "trainer.n_gpus_per_node=8"]
    config = load_config(line, MEGATRON)
    for change in parallel_ladder(config, dry_runs.models("7B", "gae", 0)):
        there = load_config([*line, *change.words.split(" (")[0].split()], MEGATRON)
        assert applied(config, [change]) == there


def test_servers_take_the_place_of_a_rollout_pool(dry_runs):
    pool = ["trainer.rollout_pool.n_gpus_per_node=8", "trainer.rollout_pool.nnodes=2"]
    _, changes = dry_runs.follow("72B", "grpo", 80, FSDP, [*FOUR_NODES, *pool])
    assert "trainer.rollout_pool.n_gpus_per_node=null" in changes


def test_servers_are_as_wide_as_the_models_heads_allow(dry_runs):
    _, changes = dry_runs.follow("7B", "grpo", 24, FSDP, ["trainer.nnodes=2", *ONE_NODE])
    assert f"{ROLLOUT}.tensor_model_parallel_size=4" in changes  # of 28 heads, 4 of them of keys and values


def test_servers_whose_share_leaves_no_cache_get_a_larger_one(dry_runs):
    line = [*FOUR_NODES, *APART, f"{ROLLOUT}.gpu_memory_utilization=0.1"]
    last, _ = dry_runs.follow("72B", "grpo", 80, FSDP, line)
    assert "gpu_memory_utilization=0.6" in last


@pytest.mark.parametrize("size", ["7B", "72B"])
@pytest.mark.parametrize("name", [FSDP, MEGATRON])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_what_is_printed_fits_when_it_is_followed(dry_runs, size, name, estimator):
    nodes = ONE_NODE if size == "7B" else FOUR_NODES
    dry_runs.follow(size, estimator, 40 if size == "7B" else 80, name, list(nodes))


@st.composite
def command_lines(draw):
    """(size, estimator, GiB, file, settings)"""
    name, size = draw(st.sampled_from([FSDP, MEGATRON])), draw(st.sampled_from(["7B", "72B"]))
    nodes, on_node = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 4, 8]))
    flag = st.sampled_from(["true", "false"])
    line = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={on_node}"]
    if name == MEGATRON:
        tensor = draw(st.sampled_from([n for n in (1, 2, 4) if on_node % n == 0]))
        pipeline = draw(st.sampled_from([n for n in (1, 2, 4) if nodes * on_node % (tensor * n) == 0]))
        line += cut(tensor, pipeline)
    else:
        line += [f"{ACTOR}.fsdp_config.fsdp_size={draw(st.sampled_from([-1, 1, on_node]))}"]
        line += [f"{ACTOR}.ulysses_sequence_parallel_size={draw(st.sampled_from([1, on_node]))}"]
        line += [f"critic.model.fsdp_config.reshard_after_forward={draw(flag)}"]
        line += [f"actor_rollout_ref.model.lora_rank={draw(st.sampled_from([0, 0, 16]))}"]
    line += draw(st.sampled_from([(), APART, ("trainer.rollout_pool.n_gpus_per_node=2",)]))
    for block, prefix in ((ACTOR, "ppo"), (ROLLOUT, "log_prob"), (REF, "log_prob"), ("critic", "forward")):
        rows = draw(st.sampled_from([None, 1, 3, 16, 200]))
        line += [f"{block}.{prefix}_micro_batch_size_per_gpu={rows}"] if rows else []
    line += [f"{ACTOR}.use_dynamic_bsz={draw(flag)}", f"{ROLLOUT}.free_cache_engine={draw(flag)}"]
    line += [f"{ACTOR}.ppo_max_token_len_per_gpu={draw(st.sampled_from([5000, 16384, 300000]))}"]
    line += [f"actor_rollout_ref.model.enable_gradient_checkpointing={draw(flag)}"]
    line += [f"{ROLLOUT}.gpu_memory_utilization={draw(st.sampled_from([0.1, 0.5, 0.9]))}"]
    estimator = draw(st.sampled_from(["gae", "grpo"]))
    return size, estimator, draw(st.sampled_from([16, 24, 40, 80, 141])), name, line


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(command_lines())
def test_what_is_printed_of_any_command_line_fits_when_it_is_followed(dry_runs, command_line):
    plan, last, _ = dry_runs.plan(*command_line)
    if plan.fits or last.startswith("no offloading"):
        return
    dry_runs.follow(*command_line)

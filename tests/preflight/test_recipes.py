"""The recipes in configs/: each is a whole, valid configuration of its program, and its plan fits."""

import pytest
import yaml
from known_models import NUM_PARAMETERS, write_config
from megatron.core import parallel_state

from verl.config import SFTConfig, get_value, load, load_config
from verl.config.__main__ import ROOT
from verl.config.checks import check_sft_config
from verl.planning.hardware import GIB, Hardware
from verl.planning.memory_plan import Plan, report
from verl.planning.model_memory import Layout
from verl.planning.placement import gpus_of_sampling, processes_on_nodes
from verl.trainer.config import settings_without_effect, validate

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
ON_TOP = {"megatron"}  # of another recipe
# what a run of it looks like: recipe, model, nodes, GPUs of 80 GiB of each, more settings
PLANS = [
    ("search_r1_grpo", "3B", 1, 1, ""),
    ("search_r1_grpo", "7B", 1, 8, ""),
    ("search_r1_ppo", "3B", 1, 2, ""),
    ("megatron", "3B", 1, 2, ""),
]
# File -> size of its model, layout of training, GPUs of an engine of rollouts
LARGE = {
    "search_r1_grpo_32b": ("32B", Layout(32), 4),
    "search_r1_grpo_72b": ("72B", Layout(64, is_megatron=True, tensor=8, pipeline=2), 8),
}
MOST_OF_A_NODE = 512  # GiB of its memory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows and a model, as far as validation looks at them."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet"):
        (folder / name).touch()
    write_config(folder / "model", "3B")
    for size, _, _ in LARGE.values():
        write_config(folder / size, size)
    return folder


def is_sft(recipe) -> bool:
    return "sft" in recipe.stem


def arguments(recipe, files) -> list[str]:
    base = [f"@{recipe.parent}/search_r1_grpo.yaml"] if recipe.stem in ON_TOP else []
    model = "model.partial_pretrain" if is_sft(recipe) else "actor_rollout_ref.model.path"
    rows = [
        f"data.{kind}_files={files}/{name}.parquet" for kind, name in (("train", "train"), ("val", "test"))
    ]
    size = LARGE[recipe.stem][0] if recipe.stem in LARGE else "model"
    return [*base, f"@{recipe}", *rows, f"{model}={files}/{size}"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_valid_and_each_of_its_keys_changes_something(recipe, files):
    more = ["trainer.n_gpus_per_node=2"] if recipe.stem == "megatron" else []
    more += ["actor_rollout_ref.rollout.name=auto"] if recipe.stem in LARGE else []  # vLLM is not here
    loaded = load([*arguments(recipe, files), *more], "sft_trainer" if is_sft(recipe) else "ppo_trainer")
    assert loaded.notes == []
    if isinstance(loaded.config, SFTConfig):
        check_sft_config(loaded.config)
    else:
        validate(loaded.config)
        assert settings_without_effect(loaded.config) == []


@pytest.mark.parametrize("name", ["search_r1_grpo", "search_r1_ppo", "sft"])
def test_settings_for_real_models_have_token_budgets(name):
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    if name != "sft":  # whose passes always have one
        assert content["actor_rollout_ref"]["actor"]["use_dynamic_bsz"] is True
    assert "micro_batch_size" not in str(content)


@pytest.mark.parametrize(("name", "size", "num_nodes", "num_gpus", "more"), PLANS)
def test_the_plan_of_a_recipe_fits(name, size, num_nodes, num_gpus, more, tmp_path, files):
    model = write_config(tmp_path / size, size)
    line = [
        *arguments(ROOT / "configs" / f"{name}.yaml", files),
        f"actor_rollout_ref.model.path={model}",
        f"trainer.nnodes={num_nodes}",
        f"trainer.n_gpus_per_node={num_gpus}",
        *more.split(),
        "trainer.dry_run=true",
        "trainer.dry_run_gpu_memory_gb=80",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    config = load_config(line)
    validate(config)
    plan = Plan(config, Hardware.of(config))
    assert plan.fits
    assert max(load.host_bytes for load in plan.loads) * num_gpus < MOST_OF_A_NODE * GIB
    assert get_value(config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu") is None


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_s_file_says_who_goes_where_on_several_nodes_and_fits(name, files):
    size, layout, gpus_of_engine = LARGE[name]
    settings = ["trainer.dry_run=true", "trainer.dry_run_gpu_memory_gb=80"]
    config = load_config([*arguments(ROOT / "configs" / f"{name}.yaml", files), *settings])
    plan = Plan(config, Hardware.of(config))
    assert plan.fits and plan.layout == layout
    assert f"{NUM_PARAMETERS[size] / 1e6:,.1f} M" in "\n".join(report(plan))
    # The memory of a GPU, in its fullest phase, of 80 GiB; of a node.
    assert 60 < max(load.total(phase) for load in plan.loads for phase in plan.phases) / GIB <= 80
    assert max(load.host_bytes for load in plan.loads) * 8 < MOST_OF_A_NODE * GIB
    # Nodes, and engines of which none lies on two nodes. Each replica and each engine gets whole rows.
    assert processes_on_nodes(config) == [8] * (layout.num_processes // 8)
    assert plan.devices_apart == gpus_of_engine and 8 % gpus_of_engine == 0 and gpus_of_sampling(config) == 0
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n_agent
    assert rows % (layout.num_processes // gpus_of_engine) == 0
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert mini_batch % layout.replicas == 0
    if layout.is_megatron:  # the GPUs of a node share a layer's matrices, and two nodes the layers
        ranks = parallel_state.RankGenerator(
            layout.tensor, 1, layout.replicas, layout.pipeline, 1, "tp-cp-ep-dp-pp"
        )
        assert ranks.get_ranks("tp") == [list(range(node * 8, node * 8 + 8)) for node in range(8)]
        assert ranks.get_ranks("pp") == [[rank, rank + 32] for rank in range(32)]
        assert ranks.get_ranks("dp")[0] == [0, 8, 16, 24]

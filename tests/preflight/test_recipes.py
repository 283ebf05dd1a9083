"""The recipes in configs/: each is a whole, valid configuration of its program, and its plan fits."""

import pytest
import yaml
from known_models import write_config

from verl.config import SFTConfig, get_value, load, load_config
from verl.config.__main__ import ROOT
from verl.config.checks import check_sft_config
from verl.planning.hardware import GIB, Hardware
from verl.planning.memory_plan import Plan
from verl.trainer.config import settings_without_effect, validate

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
ON_TOP = {"megatron"}  # of another recipe
# what a run of it looks like: recipe, model, nodes, GPUs of 80 GiB of each, more settings
CUT = "actor_rollout_ref.actor.megatron"
PLANS = [
    ("search_r1_grpo", "3B", 1, 1, ""),
    ("search_r1_grpo", "7B", 1, 8, ""),
    ("search_r1_grpo", "32B", 4, 8, ""),
    ("search_r1_ppo", "3B", 1, 2, ""),
    ("megatron", "3B", 1, 2, ""),
    ("megatron", "72B", 8, 8, f"{CUT}={{tensor_model_parallel_size:8,pipeline_model_parallel_size:2}}"),
]
MOST_OF_A_NODE = 512  # GiB of its memory


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows and a model, as far as validation looks at them."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("train.parquet", "test.parquet"):
        (folder / name).touch()
    write_config(folder / "model", "3B")
    return folder


def is_sft(recipe) -> bool:
    return "sft" in recipe.stem


def arguments(recipe, files) -> list[str]:
    base = [f"@{recipe.parent}/search_r1_grpo.yaml"] if recipe.stem in ON_TOP else []
    model = "model.partial_pretrain" if is_sft(recipe) else "actor_rollout_ref.model.path"
    rows = [
        f"data.{kind}_files={files}/{name}.parquet" for kind, name in (("train", "train"), ("val", "test"))
    ]
    return [*base, f"@{recipe}", *rows, f"{model}={files}/model"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_valid_and_each_of_its_keys_changes_something(recipe, files):
    more = ["trainer.n_gpus_per_node=2"] if recipe.stem == "megatron" else []
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

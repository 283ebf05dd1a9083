"""strategy=megatron and its keys: where they stand, what is refused before the start, which workers run."""

import json
import re
from pathlib import Path

import pytest
from config_places import is_read
from omegaconf import OmegaConf

from verl.trainer.config import parse_arguments, settings_without_effect
from verl.trainer.config.loading import known_keys, load_config, take_config_name
from verl.trainer.config.megatron_checks import check_megatron
from verl.trainer.config.megatron_keys import ALIASES, CONFIG_NAME, MORE_FIXED, MORE_NO_EFFECT
from verl.trainer.config.validation import TABLES_OF
from verl.trainer.main_ppo import run, worker_classes
from verl.trainer.placement import order_of_kernels
from verl.trainer.ppo.passes import Passes
from verl.workers import fsdp_workers, megatron_workers

ACTOR = "actor_rollout_ref.actor"
MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=8"]
TENSOR, PIPELINE, CONTEXT = (
    f"{ACTOR}.megatron.{name}"
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
)
SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return f"actor_rollout_ref.model.path={folder}"


def check(*overrides):
    config = load_config([*MEGATRON, *overrides])
    check_megatron(config, Passes.of(config))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{TENSOR}=4", f"{PIPELINE}=2"],
        [f"{TENSOR}=2", f"{CONTEXT}=4"],
        [f"{PIPELINE}=2", f"{ACTOR}.megatron.num_layers_per_virtual_pipeline_stage=1"],
    ],
)
def test_a_model_that_can_be_cut_is_taken(overrides, model):
    check(model, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"{TENSOR}=3"], "8 in all"),
        ([f"{TENSOR}=8"], "key and value heads"),
        ([f"{PIPELINE}=8"], "4 layers"),
        ([f"{TENSOR}=4", f"{CONTEXT}=2", "trainer.n_gpus_per_node=12"], "12 in all"),
        ([f"{ACTOR}.megatron.num_layers_per_virtual_pipeline_stage=2"], "virtual"),
        (["actor_rollout_ref.model.lora_rank=8"], "trains whole models"),
        (["critic.model.lora_rank=8"], "critic.model.lora_rank"),
        ([f"{ACTOR}.optim.name=muon"], "adamw"),
        ([f"{ACTOR}.fsdp_config.model_dtype=bf16"], "fp32"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], "context_parallel_size"),
        (["critic.strategy=fsdp"], "both to be megatron"),
        ([f"{ACTOR}.strategy=fsdp", "critic.strategy=fsdp", f"{TENSOR}=2"], "strategy=megatron"),
    ],
)
def test_what_can_not_work_says_what_was_found_and_expected(overrides, words, model):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        check(model, *overrides)
    assert re.search("expected|multiple|divide|change", str(error.value))


def test_a_model_below_the_home_folder_is_looked_at_too(model, monkeypatch):
    folder = Path(model.partition("=")[2])
    monkeypatch.setenv("HOME", str(folder.parent))
    with pytest.raises(ValueError, match="4 layers"):
        check(f"actor_rollout_ref.model.path=~/{folder.name}", f"{PIPELINE}=8")


def test_the_reference_and_the_critic_are_cut_as_the_actor_is():
    config = load_config([f"{ACTOR}.strategy=megatron", f"{TENSOR}=2"])
    assert config.critic.strategy == "megatron"
    assert config.critic.megatron.tensor_model_parallel_size == 2
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2


def test_a_micro_batch_is_dealt_out_to_replicas():
    config = load_config([*MEGATRON, f"{TENSOR}=2", f"{PIPELINE}=2"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size == 64
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 32
    assert config.critic.ppo_micro_batch_size_per_gpu == 32


def test_search_r1s_keys_of_megatron_are_all_there():
    text = (Path(__file__).parent / "search_r1_keys.txt").read_text(encoding="utf-8")
    keys = text[text.index("[megatron]\n") :].split()[1:]
    assert len(keys) == 119
    assert set(keys) <= set(known_keys(CONFIG_NAME))


def test_rule_12_every_key_that_the_file_adds_is_in_exactly_one_table():
    added = set(known_keys(CONFIG_NAME)) - set(known_keys())
    tables = [set(MORE_FIXED), set(MORE_NO_EFFECT), set(ALIASES)]
    assert added == set().union(*tables)
    assert len(added) == sum(map(len, tables))


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_rule_12_a_key_that_the_file_adds_gives_another_its_default(alias, key):
    default = OmegaConf.select(load_config([], CONFIG_NAME), alias)
    other = True if default is False else 0.25
    assert OmegaConf.select(load_config([f"{alias}={other}"], CONFIG_NAME), key) == other
    config = load_config([f"{alias}={other}", f"{key}={default}"], CONFIG_NAME)
    assert OmegaConf.select(config, key) == default


def test_the_keys_of_the_layout_are_read_where_the_workers_are_made():
    for size in (TENSOR, PIPELINE, CONTEXT):
        assert is_read(size, "verl/workers/megatron_workers.py:layout_of")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config-name", CONFIG_NAME, "trainer.seed=1"],
        ["trainer.seed=1", f"--config-name={CONFIG_NAME}"],
        ["--config-name", "ppo_trainer", f"--config-name={CONFIG_NAME}.yaml", "trainer.seed=1"],
    ],
)
def test_the_file_is_chosen_as_with_hydra(arguments):
    name, rest = take_config_name(arguments)
    assert (name, rest) == (CONFIG_NAME, ["trainer.seed=1"])
    config = parse_arguments(rest, name)
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "megatron"
    assert settings_without_effect(config, name) == []
    assert name in TABLES_OF


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config-name"], "without a name"),
        (["--config-name", "sft_trainer"], "expected one of: ppo_trainer"),
    ],
)
def test_a_file_of_another_program_is_refused(arguments, words, capsys):
    assert run(arguments) == 2
    assert words in capsys.readouterr().err


def test_help_prints_both_files(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], CONFIG_NAME)
    printed = capsys.readouterr().out
    assert "layer_name_map" in printed and "max_prompt_length" in printed


def test_a_setting_of_fsdp_alone_is_said_to_do_nothing():
    settings = [*MEGATRON, f"{ACTOR}.fsdp_config.reshard_after_forward=false"]
    (line,) = settings_without_effect(load_config(settings))
    assert line.startswith(f"{ACTOR}.fsdp_config.reshard_after_forward=False has no effect")
    assert settings_without_effect(load_config(settings[2:])) == []


def test_the_strategy_chooses_the_workers():
    assert worker_classes(load_config([])) == (
        fsdp_workers.ActorRolloutRefWorker,
        fsdp_workers.CriticWorker,
    )
    assert worker_classes(load_config(MEGATRON)) == (
        megatron_workers.ActorRolloutRefWorker,
        megatron_workers.CriticWorker,
    )


def test_processes_that_share_matrices_on_cuda_have_one_queue_of_kernels():
    shared = [*MEGATRON, f"{TENSOR}=2"]
    assert order_of_kernels(load_config([*shared, "trainer.device=cuda"])) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"
    }
    assert order_of_kernels(load_config([*shared, "trainer.device=cpu"])) == {}
    assert order_of_kernels(load_config([*MEGATRON, "trainer.device=cuda"])) == {}
    assert order_of_kernels(load_config(["trainer.device=cuda"])) == {}

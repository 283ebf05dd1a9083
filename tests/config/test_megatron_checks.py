"""strategy=megatron and its keys: what is refused before the start, and which workers run."""

import re
from pathlib import Path

import pytest

from verl.config import load_config
from verl.planning.config_validation import check_megatron, settings_without_effect
from verl.planning.passes import Passes
from verl.planning.placement import process_variables
from verl.trainer.main_ppo import worker_classes
from verl.workers import fsdp_workers, megatron_workers

ACTOR = "actor_rollout_ref.actor"
MEGATRON = [f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=8"]
TENSOR, PIPELINE, CONTEXT = (
    f"{ACTOR}.megatron.{name}"
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
)


@pytest.fixture(scope="module")
def model(files):
    return f"actor_rollout_ref.model.path={files}/model"


def check(*overrides):
    config = load_config([*MEGATRON, *overrides])
    check_megatron(config, Passes(config))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [f"{TENSOR}=4", f"{PIPELINE}=2"],
        [f"{TENSOR}=2", f"{CONTEXT}=4"],
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
        (["actor_rollout_ref.model.lora_rank=8"], "trains whole models"),
        (["critic.model.lora_rank=8"], "critic.model.lora_rank"),
        ([f"{ACTOR}.optim.name=muon"], "adamw"),
        ([f"{ACTOR}.fsdp_config.model_dtype=bf16"], "fp32"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], "context_parallel_size"),
        ([f"{ACTOR}.strategy=fsdp", f"{TENSOR}=2"], "strategy=megatron"),
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
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 32
    assert config.critic.ppo_micro_batch_size_per_gpu == 32


def test_a_setting_of_fsdp_alone_is_said_to_do_nothing():
    settings = [*MEGATRON, f"{ACTOR}.fsdp_config.reshard_after_forward=false"]
    (line,) = settings_without_effect(load_config(settings))
    assert line.startswith(f"{ACTOR}.fsdp_config.reshard_after_forward=false has no effect")
    assert settings_without_effect(load_config(settings[1:])) == []


def test_the_strategy_chooses_the_workers():
    assert worker_classes(load_config([])) == (
        fsdp_workers.ActorRolloutRefWorker,
        fsdp_workers.CriticWorker,
    )
    assert worker_classes(load_config(MEGATRON)) == (
        megatron_workers.MegatronActorRolloutRefWorker,
        megatron_workers.MegatronCriticWorker,
    )


def test_processes_that_share_matrices_on_cuda_have_one_queue_of_kernels():
    shared = [*MEGATRON, f"{TENSOR}=2"]
    assert process_variables(load_config([*shared, "trainer.device=cuda"])) == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1"
    }
    assert process_variables(load_config([*shared, "trainer.device=cpu"])) == {}
    assert process_variables(load_config([*MEGATRON, "trainer.device=cuda"])) == {}
    assert process_variables(load_config(["trainer.device=cuda"])) == {}

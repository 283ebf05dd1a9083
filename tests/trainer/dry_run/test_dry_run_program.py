"""`trainer.dry_run=true`: the program prints a plan and ends, without data, weights, Ray or searches."""

import pytest
from known_models import search_r1_settings, write_config, write_small

from verl.trainer import main_ppo
from verl.trainer.config import load_config, validate


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch):
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a dry run starts nothing")

    for name in ("start_ray", "start_is_sound", "build_trainer"):
        monkeypatch.setattr(main_ppo, name, refuse)


def test_a_run_that_fits_ends_with_0(tmp_path, capsys):
    assert main_ppo.run([*search_r1_settings(write_small(tmp_path), "grpo"), "trainer.dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "driver: this process, on " in out and "rank 0: node 0, CPU, dp 0" in out and "\nfits: " in out


def test_a_run_that_cannot_fit_ends_with_2_and_says_why(tmp_path, capsys):
    line = [
        *search_r1_settings(write_config(tmp_path, "7B"), "gae"),
        "trainer.n_gpus_per_node=8",
        "trainer.dry_run=true",
        "trainer.dry_run_gpu_memory_gb=69",
    ]
    assert main_ppo.run(line) == 2
    out, err = capsys.readouterr()
    assert "69.00 GiB for each GPU" in out
    assert "error: node 0, GPU 0 would need" in err and "GiB too much" in err
    assert "error: the cheapest way out: " in err


def test_the_same_of_megatron_by_its_own_configuration(tmp_path, capsys):
    line = [
        "--config-name=ppo_megatron_trainer",
        *search_r1_settings(write_config(tmp_path, "7B"), "grpo"),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "trainer.n_gpus_per_node=8",
        "trainer.dry_run=true",
        "trainer.dry_run_gpu_memory_gb=80",
    ]
    assert main_ppo.run(line) == 0
    assert "rank 5: node 0, GPU 5, dp 1 tp 1 pp 0 cp 0" in capsys.readouterr().out


def test_gpus_without_a_size_are_asked_for(tmp_path, capsys):
    line = [*search_r1_settings(write_small(tmp_path), "grpo"), "trainer.dry_run=true", "trainer.device=cuda"]
    assert main_ppo.run(line) == 2
    assert "trainer.dry_run_gpu_memory_gb=80" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["trainer.rollout_pool.nnodes=2"], "without n_gpus_per_node"),
        (["trainer.rollout_pool.n_gpus_per_node=1", "trainer.backend=local"], "backend=local"),
        (["trainer.rollout_pool.n_gpus_per_node=1", "trainer.val_only=true"], "val_only"),
        (
            [
                "trainer.rollout_pool.n_gpus_per_node=1",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.placement=apart",
            ],
            "placement=apart",
        ),
    ],
)
def test_a_rollout_pool_that_cannot_work_is_refused(settings, words, tmp_path):
    line = [*search_r1_settings(write_small(tmp_path), "grpo"), "trainer.dry_run=true", *settings]
    with pytest.raises(ValueError, match=words):
        validate(load_config(line))

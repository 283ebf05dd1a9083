"""Search-R1's 13 command lines: each is a valid configuration, with the values that it sets."""

import json

import pytest
from omegaconf import DictConfig, OmegaConf
from search_r1_command_lines import SCRIPTS, command_lines

from verl.trainer.config import load_config, validate


@pytest.fixture()
def lines(tmp_path, monkeypatch) -> dict[str, list[str]]:
    """All of them ask for vLLM: a package of that name is found, and nothing of it is read."""
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return command_lines(
        {
            "DATA_DIR": str(tmp_path),
            "TRAIN_DATA_DIR": str(tmp_path),
            "TEST_DATA_DIR": str(tmp_path),
            "BASE_MODEL": str(tmp_path / "model"),
            "EXPERIMENT_NAME": "nq-search-r1",
            "WAND_PROJECT": "Search-R1",
            "N_NODES": "4",
        }
    )


def check(script: str, arguments: list[str]) -> DictConfig:
    config = load_config(arguments)
    validate(config, format_reward="format" in script)
    return config


def test_there_are_thirteen_scripts_and_sixty_six_keys():
    assert len(SCRIPTS) == 13
    assert len({key.lstrip("+") for overrides in SCRIPTS.values() for key in overrides}) == 66


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_search_r1_command_line_is_a_valid_configuration(script, lines):
    config = check(script, lines[script])
    for argument in lines[script]:
        key, _, text = argument.lstrip("+").partition("=")
        expected = OmegaConf.create(f"value: {text}").value
        assert OmegaConf.select(config, key) == expected, key


def test_the_group_and_the_batches_mean_what_they_mean_in_search_r1(lines):
    config = check("train_grpo.sh", lines["train_grpo.sh"])
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    assert rollout.n * rollout.n_agent == 5
    assert config.data.train_batch_size * 5 // (actor.ppo_mini_batch_size * rollout.n) == 10  # updates
    assert actor.ppo_micro_batch_size_per_gpu == 64 // 8
    assert config.trainer.logger == ["wandb"]


def test_format_scores_need_the_format_program(lines):
    script = "scripts/nq_hotpotqa/v0.3/train_ppo_format.sh"
    with pytest.raises(ValueError, match="main_ppo_format"):
        validate(load_config(lines[script]))

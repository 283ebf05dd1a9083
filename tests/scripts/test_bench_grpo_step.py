"""scripts/bench_grpo_step.py: both contenders are told the same."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_prep.microworld import write_world
from verl.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import bench_grpo_step  # noqa: E402

SMALL = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n_agent=4"]
SMALL += ["actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def test_trl_is_told_the_settings_of_the_configuration_and_of_the_command_line(tmp_path):
    write_world(0, tmp_path, num_train=4, num_test=2, num_3hop=2)
    config_file = bench_grpo_step.ROOT / "configs" / "microworld_grpo.yaml"
    options = argparse.Namespace(config=config_file, model=tmp_path, steps=3, micro_batch=4)
    options.overrides = [*SMALL, "data.max_obs_length=99", "actor_rollout_ref.actor.clip_ratio_low=0.1"]
    settings = bench_grpo_step.our_settings(options, tmp_path)
    config = load_config([*settings, "retriever.url=http://127.0.0.1:1/retrieve"])
    task = bench_grpo_step.trl_task(config, options, tmp_path)
    assert (task["prompts_per_step"], task["group"], task["micro_batch"]) == (2, 4, 4)
    assert (task["max_obs_length"], task["max_response_length"], task["max_completion"]) == (99, 32, 704)
    assert task["clip"] == [0.1, 0.28] and task["lr"] == config.actor_rollout_ref.actor.optim.lr == 8e-4
    assert len(task["rows"]) == 4 and config.reward_model.search_cost == config.algorithm.thrift == 0
    assert config.actor_rollout_ref.rollout.temperature == 1


def test_both_sides_of_a_cell_get_prompts_of_so_many_tokens_and_the_same_sizes(tmp_path):
    cell = bench_grpo_step.Cell.of("1.3M:100:32:4")
    bench_grpo_step.write_prompts(cell, tmp_path, 3)
    options = argparse.Namespace(model=tmp_path / "model", steps=2, micro_batch=4, overrides=[])
    config = load_config(bench_grpo_step.cell_settings(cell, options, tmp_path))
    task = bench_grpo_step.trl_task(config, options, tmp_path)
    assert (task["prompts_per_step"], task["group"], task["max_completion"]) == (1, 4, 32)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 4 and not config.do_search
    tokenizer = AutoTokenizer.from_pretrained(bench_grpo_step.SHIPPED_MODEL)
    assert [len(tokenizer.encode(row["prompt"])) for row in task["rows"]] == [100] * 3


@pytest.mark.parametrize("text", ["2B:100:32:4", "1.3M:100:32", "1.3M:100:32:x"])
def test_a_cell_that_cannot_be_read_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected SIZE:PROMPT:COMPLETION:GROUP"):
        bench_grpo_step.Cell.of(text)

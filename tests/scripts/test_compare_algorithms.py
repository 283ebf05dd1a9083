"""scripts/compare_algorithms.py: the intervals, and a whole short comparison."""

from __future__ import annotations

import functools
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from verl.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import compare_algorithms  # noqa: E402


def text_of(values, sign=""):
    return compare_algorithms.format_interval(compare_algorithms.mean_with_interval(np.array(values)), sign)


def test_an_interval_holds_95_percent_of_the_resampled_means():
    assert text_of([0.5] * 20, "+") == "+0.500 [+0.500, +0.500]"
    mean, low, high = text_of([0.0, 1.0] * 200).replace("[", "").rstrip("]").split(" ")
    assert mean == "0.500"  # standard error .025
    assert float(low.rstrip(",")) == pytest.approx(0.45, abs=0.006)
    assert float(high) == pytest.approx(0.55, abs=0.006)


@pytest.mark.parametrize("name", [name for name in compare_algorithms.REAL if name != "sft_only"])
def test_each_variant_of_a_real_model_is_a_configuration(name):
    recipe = compare_algorithms.ROOT / "configs" / "real_model_grpo.yaml"
    settings = compare_algorithms.real_settings(name, 16).split()
    told = [f"@{recipe}", "retriever.url=http://127.0.0.1:1/retrieve"]
    trajectories = [
        config.data.train_batch_size * config.actor_rollout_ref.rollout.n_agent
        for config in (load_config(told), load_config([*told, *settings]))
    ]
    assert trajectories[0] == trajectories[1]


@pytest.mark.slow
def test_two_algorithms_become_a_table(capsys, monkeypatch, request):
    told = "compare --only grpo lora --seeds 987 --steps 1 data.val_data_num=8 data.train_batch_size=4"
    told += " actor_rollout_ref.actor.ppo_mini_batch_size=16 trainer.val_before_train=false"
    monkeypatch.setattr(sys, "argv", told.split())
    folder = compare_algorithms.ROOT / "verl_checkpoints"
    for name in ("grpo", "lora"):
        made = folder / f"compare-{name}-seed987"
        request.addfinalizer(functools.partial(shutil.rmtree, made, ignore_errors=True))
    compare_algorithms.main()
    grpo, lora = capsys.readouterr().out.splitlines()[-2:]
    assert grpo.startswith("| grpo | 1 | 0.") and "| +0.000 [+0.000, +0.000] |" in grpo
    assert lora.startswith("| lora | 1 | 0.") and (folder / "compare-lora-seed987" / "summary.json").is_file()

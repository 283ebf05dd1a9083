"""scripts/compare_algorithms.py: the intervals, the settings of each run, and the table."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("name", compare_algorithms.ALGORITHMS)
def test_each_variant_of_the_microworld_is_a_configuration(name):
    recipe = compare_algorithms.ROOT / "configs" / f"microworld_{'ppo' if name == 'gae' else 'grpo'}.yaml"
    load_config([f"@{recipe}", *compare_algorithms.ALGORITHMS[name].split()])


def test_two_algorithms_become_a_table(capsys, monkeypatch, tmp_path):
    """The runs are stand-ins, which write what runs write: train_grpo.sh and train_ppo.sh have tests."""
    ems = {"grpo": (1.0, 0.0, 1.0, 0.0), "gae": (1.0, 1.0, 1.0, 0.0)}
    started = []

    def run(command, env, cwd, check):
        started.append((command[1], env["SEED"]))
        folder = tmp_path / "verl_checkpoints" / env["EXPERIMENT_NAME"]
        folder.mkdir(parents=True)
        name = env["EXPERIMENT_NAME"].split("-")[1]
        with (folder / "validation.jsonl").open("w") as file:
            for step in (0, 1):  # the last counts
                for mode in ("sampled", "greedy"):
                    for number, em in enumerate(ems[name]):
                        line = {"step": step, "questions": "val", "mode": mode, "question": f"q{number}"}
                        file.write(json.dumps(line | {"em": em if step else 1 - em}) + "\n")

    monkeypatch.setattr(compare_algorithms.subprocess, "run", run)
    monkeypatch.setattr(compare_algorithms, "ROOT", tmp_path)
    told = "compare --only grpo gae --seeds 3 4 --steps 1"
    monkeypatch.setattr(sys, "argv", told.split())
    compare_algorithms.main()
    grpo, gae = capsys.readouterr().out.splitlines()[-2:]
    assert grpo.startswith("| grpo | 2 | 0.500 [") and "| +0.000 [+0.000, +0.000] |" in grpo
    assert gae.startswith("| gae | 2 | 0.750 [") and "| +0.250 [" in gae
    assert started == [
        ("train_grpo.sh", "3"),
        ("train_ppo.sh", "3"),
        ("train_grpo.sh", "4"),
        ("train_ppo.sh", "4"),
    ]

"""Runs over a mixture, one source of it streamed: killed in a prefetch they go on with the same rows."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from instant_runs import WORDS, Policy, instant_trainer, run
from quick_config import config_with
from test_whole_runs import rows_of

from verl.checkpoints.run_state import RunStopped
from verl.trainer.ppo.resuming import SETTINGS_FILE, check_learning_settings, learning_settings

KILLED = """
import os, signal, sys
from pathlib import Path
from instant_runs import instant_trainer, run
from verl.data.streaming import RowStream

made, encode_row = [], RowStream.encode_row

def counted(self, row, index):
    global made
    made += [index] * (self.files[0].stem == "many")
    if len(made) == 21:  # two steps ahead of what step 4 asks
        os.kill(os.getpid(), signal.SIGKILL)
    return encode_row(self, row, index)

RowStream.encode_row = counted
run(instant_trainer(Path(sys.argv[1]), *sys.argv[2:], reads_files=True))
"""


def settings(folder: Path, *more: str) -> list[str]:
    """Three prompts of a step are of `many`, which is streamed, and one is of `few`."""
    paths = {}
    for name, count in (("many", 90), ("few", 9)):
        paths[name] = folder / f"{name}.jsonl"
        row = {"data_source": "nq", "reward_model": {"ground_truth": {"target": ["Oslo"]}}}
        lines = [json.dumps(row | {"prompt": f"{WORDS * 20}{name} {i}: who?"}) for i in range(count)]
        paths[name].write_text("\n".join(lines))
    sources = f"[{{path: {paths['many']}, ratio: 3}}, {{path: {paths['few']}, ratio: 1, n: 4}}]"
    keys = [f"data.mixture={sources}", "data.streaming=true", "data.truncation=left"]
    keys += ["data.max_start_length=100", "trainer.total_training_steps=7"]
    return [*keys, "trainer.save_freq=1", "trainer.async_checkpoint=false", *more]


@pytest.mark.slow
def test_a_mixed_run_draws_by_ratio_and_tells_of_each_source(tmp_path):
    trainer = instant_trainer(tmp_path / "run", *settings(tmp_path), reads_files=True)
    run(trainer)
    rows = rows_of(tmp_path / "run")
    assert all(row["data/many/share"] == 0.75 and row["data/few/share"] == 0.25 for row in rows)
    assert all(0 <= row[f"data/{name}/{of}"] <= 1 for row in rows for name in ("many", "few") for of in
               ("score", "solved"))  # fmt: skip
    assert [len(asked) for asked in Policy.asked[:7]] == [3 * 8 + 4] * 7  # `few` has 4 answers to a prompt


@pytest.mark.slow
def test_rule_10_killed_inside_a_prefetch_a_run_asks_the_same_rows(tmp_path):
    line = settings(tmp_path, "prompt_selection.retire_solved=0.7")
    run(instant_trainer(tmp_path / "whole", *line, reads_files=True))
    undisturbed = rows_of(tmp_path / "whole")
    asked = Policy.asked
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), *line]
    killed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = instant_trainer(tmp_path / "run", *line, reads_files=True)
    assert resumed.checkpoints.steps() == [1, 2, 3]
    run(resumed)
    assert Policy.asked == asked[3:]
    assert rows_of(tmp_path / "run") == undisturbed and undisturbed[-1]["filter/retired"] > 0


@pytest.mark.slow
def test_another_mixture_is_another_run(tmp_path):
    line = settings(tmp_path)
    run(instant_trainer(tmp_path / "run", *line, reads_files=True))
    other = [each.replace("ratio: 3", "ratio: 2") for each in line]
    with pytest.raises(ValueError, match="the run of .* has other settings than this command: data.mixture="):
        run(instant_trainer(tmp_path / "run", *other, reads_files=True))
    (tmp_path / "few.jsonl").write_text((tmp_path / "few.jsonl").read_text().replace("few 8", "few x"))
    with pytest.raises(
        ValueError, match=r"data.mixture paths=.*few.jsonl.* \(what it names was changed since"
    ):
        run(instant_trainer(tmp_path / "run", *line, reads_files=True))


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path):
    """It knew neither environments nor mixtures."""
    settings(tmp_path)
    data = [f"data.train_files={tmp_path / 'few.jsonl'}", f"actor_rollout_ref.model.path={tmp_path}"]
    settings_now = learning_settings(config_with(*data))
    earlier = copy.deepcopy(settings_now)
    for key in ("environment.env_class", "data.mixture", "prompt_selection.retire_solved"):
        del earlier["values"][key]
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(earlier))
    check_learning_settings(settings_now, tmp_path, tmp_path)
    other = learning_settings(config_with(*data, "environment.env_class=gsm8k"))
    with pytest.raises(ValueError, match=r"environment.env_class=search \(now gsm8k\)"):
        check_learning_settings(other, tmp_path, tmp_path)


def test_a_checkpoint_with_earlier_names_of_keys_goes_on_with_the_same_selection_alone(tmp_path):
    settings(tmp_path)
    data = [f"data.train_files={tmp_path / 'few.jsonl'}", f"actor_rollout_ref.model.path={tmp_path}"]
    chosen = ["prompt_selection.filter_groups.metric=acc", "prompt_selection.retire_solved=0.5"]
    settings_now = learning_settings(config_with(*data, *chosen))
    assert not any("pools" in key for key in settings_now["values"])  # a run may go on with other shares
    earlier = copy.deepcopy(settings_now)
    values = earlier["values"]
    values["algorithm.filter_groups.retire_solved"] = values.pop("prompt_selection.retire_solved")
    for name in ("enable", "metric", "max_num_gen_batches"):
        values[f"algorithm.filter_groups.{name}"] = values.pop(f"prompt_selection.filter_groups.{name}")
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(earlier))
    check_learning_settings(settings_now, tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"prompt_selection.retire_solved=0.5 \(now null\)"):
        check_learning_settings(learning_settings(config_with(*data, chosen[0])), tmp_path, tmp_path)


def test_a_run_ends_when_too_few_prompts_are_left(tmp_path):
    """At once retired, 9 prompts are too few for a third step of 4."""
    line = settings(tmp_path, "prompt_selection.retire_solved=0", "data.streaming=false")
    sources = f"[{{path: {tmp_path / 'few.jsonl'}}}]"
    trainer = instant_trainer(tmp_path / "run", *line, f"data.mixture={sources}", reads_files=True)
    with pytest.raises(RunStopped, match=r"step 3: 1 prompts are left that .*retire_solved has not retired"):
        run(trainer)
    assert trainer.checkpoints.steps() == [1, 2]

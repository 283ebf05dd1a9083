"""Groups that a step does not wait for: what leaves the batch, what comes back, and resuming to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import arguments

from verl.protocol import DataProto
from verl.trainer.main_ppo import run
from verl.trainer.ppo.collection import prompt_batch, split_unfinished


def prompts(*uids: str) -> DataProto:
    """One row a letter; its uid is the letter."""
    batch = prompt_batch(
        [{"raw_prompt_ids": [ord(uid)], "extra_info": {"name": uid}} for uid in uids], "step"
    )
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    return batch


def generated(rows: DataProto, reasons: list[str]) -> DataProto:
    """Row i has i + 1 response tokens, 10 * i, 10 * i + 1, ... with -0.5 each; the first is observed."""
    num = len(reasons)
    width = num + 2
    real = torch.arange(width)[None] < torch.arange(1, num + 1)[:, None]
    mask = real.long()
    mask[:, 0] = 0
    records = [
        {"finish_reason": reason, "turns": [], "version_first": 3, "version_last": 3 + row, "num_begun": 1}
        for row, reason in enumerate(reasons)
    ]
    tensors = {
        "responses": (torch.arange(width)[None] + 10 * torch.arange(num)[:, None]) * real,
        "attention_mask": torch.cat([torch.ones(num, 2, dtype=torch.long), real.long()], dim=1),
        "response_mask": mask,
        "rollout_log_probs": -0.5 * mask,
    }
    return DataProto.from_dict(
        tensors, rows.non_tensor_batch | {"trajectory": np.array(records, dtype=object)}
    )


def test_a_group_with_an_unfinished_member_leaves_whole_with_what_it_goes_on_from():
    batch = generated(prompts("a", "a", "b", "b", "c"), ["answer", "kept", "answer", "eos", "answer"])
    now, unfinished = split_unfinished(batch)
    assert now.non_tensor_batch["uid"].tolist() == ["b", "b", "c"]
    assert torch.equal(now.tensors["responses"], batch.tensors["responses"][2:])
    assert unfinished is not None and unfinished.non_tensor_batch["uid"].tolist() == ["a", "a"]
    assert set(unfinished.non_tensor_batch) == {*prompts("d").non_tensor_batch, "continuation"}
    assert unfinished.non_tensor_batch["continuation"][1] == {
        "response_ids": [10, 11],
        "response_mask": [0, 1],
        "log_probs": [0.0, -0.5],
        "record": batch.non_tensor_batch["trajectory"][1],
    }
    assert split_unfinished(now)[1] is None


def steps(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step, without times and what depends on the search client's memory."""
    times = ("timing_", "perf/", "retrieval/", "rollout/seconds", "rollout/tokens_per_second")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(times)} for line in lines]


@pytest.mark.slow
def test_rule_10_a_run_that_is_killed_resumes_to_the_same_step_with_the_kept_groups(world, url, tmp_path):
    line = arguments(
        world,
        url,
        tmp_path,
        data__train_batch_size=6,
        data__max_prompt_length=768,
        data__max_obs_length=250,
        actor_rollout_ref__rollout__straggler_factor=2.0,
        actor_rollout_ref__rollout__keep_partial="true",
        actor_rollout_ref__rollout__max_in_flight=14,
        actor_rollout_ref__actor__ppo_mini_batch_size=24,
        trainer__total_training_steps=4,
        trainer__max_ckpt_to_keep=5,
        trainer__test_freq=-1,
        trainer__val_before_train="false",
    )
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    assert run([*line, f"trainer.default_local_dir={whole}"]) == 0
    rows = {row["step"]: row for row in steps(whole)}
    kept = next(step for step in (1, 2, 3) if rows[step]["env/kept_groups"])
    assert (whole / f"global_step_{kept}" / "partial_groups.npz").exists()
    assert rows[kept + 1]["rollout/staleness/max"] == 1 and rows[1]["rollout/staleness/max"] == 0
    assert rows[4]["env/kept_groups"] == 0  # nothing is kept at the end

    resumed.mkdir()
    shutil.copytree(whole / f"global_step_{kept}", resumed / f"global_step_{kept}")
    shutil.copy(whole / "metrics.jsonl", resumed)
    assert run([*line, f"trainer.default_local_dir={resumed}"]) == 0
    again = {row["step"]: row for row in steps(resumed)}
    for step in range(kept + 1, 4):
        assert again[step] == rows[step], step

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
from verl.trainer.ppo.batching import prompt_batch
from verl.trainer.ppo.partial_groups import PartialGroups, newest_version, staleness, straggler_metrics


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


def test_a_group_with_an_unfinished_member_leaves_whole_and_comes_back_before_the_next_prompts():
    groups = PartialGroups()
    batch = generated(prompts("a", "a", "b", "b", "c"), ["answer", "kept", "answer", "eos", "answer"])
    left = groups.take(batch)
    assert left.non_tensor_batch["uid"].tolist() == ["b", "b", "c"]
    assert torch.equal(left.tensors["responses"], batch.tensors["responses"][2:])
    assert (len(groups), groups.num_groups) == (2, 1)

    joined, continuation = groups.join(prompts("d", "e"))
    assert joined.non_tensor_batch["uid"].tolist() == ["a", "a", "d", "e"]
    assert [ids[0] for ids in joined.non_tensor_batch["raw_prompt_ids"]] == [ord(uid) for uid in "aade"]
    assert list(joined.non_tensor_batch) == list(prompts("d").non_tensor_batch)
    assert continuation is not None and continuation[2:].tolist() == [None, None]
    assert continuation[1] == {
        "response_ids": [10, 11],
        "response_mask": [0, 1],
        "log_probs": [0.0, -0.5],
        "record": batch.non_tensor_batch["trajectory"][1],
    }
    groups.take(generated(joined, ["answer"] * 4))
    assert len(groups) == 0 and groups.join(prompts("f"))[1] is None


def test_members_count_as_one_group_wherever_they_were_generated():
    groups = PartialGroups()
    left = groups.take(generated(prompts("a", "b", "a"), ["kept", "answer", "answer"]))
    assert left.non_tensor_batch["uid"].tolist() == ["b"] and len(groups) == 2


def test_a_step_is_never_left_without_a_row():
    groups = PartialGroups()
    left = groups.take(generated(prompts("a", "a", "b", "b"), ["answer", "kept", "kept", "answer"]))
    assert len(left) == 4 and len(groups) == 0
    assert (left.tensors["response_mask"].sum(-1) > 0).tolist() == [False, False, False, True]
    assert left.tensors["rollout_log_probs"][1:3].abs().sum() == 0
    assert straggler_metrics(left) == {"env/cut_trajectories": 2.0, "env/cut_groups": 2.0}


def test_what_is_cut_is_counted_by_trajectory_and_by_group():
    batch = generated(prompts("a", "a", "b", "c"), ["cut", "cut", "answer", "cut"])
    assert straggler_metrics(batch) == {"env/cut_trajectories": 3.0, "env/cut_groups": 2.0}


def test_a_row_is_as_old_as_its_first_token_also_if_it_had_ended_in_the_step_before():
    batch = generated(prompts("a", "a", "b", "c"), ["answer"] * 4)
    records = batch.non_tensor_batch["trajectory"]
    spans = [(3, 3), (3, 5), (5, 5), (None, None)]  # ended before, went on, fresh, without a token
    for record, (first, last) in zip(records, spans, strict=True):
        record |= {"version_first": first, "version_last": last}
    assert newest_version(batch) == 5
    assert staleness(batch, 5).tolist() == [2, 2, 0, 0]


def test_rule_10_kept_groups_are_in_the_checkpoint(tmp_path):
    groups = PartialGroups()
    groups.take(generated(prompts("a", "a", "b"), ["answer", "kept", "answer"]))
    groups.save(tmp_path)
    loaded = PartialGroups()
    loaded.load(tmp_path)
    (rows, states), (rows_again, states_again) = groups.join(prompts("c")), loaded.join(prompts("c"))
    assert states is not None and states_again is not None
    assert states.tolist() == states_again.tolist()
    assert rows.non_tensor_batch["extra_info"].tolist() == rows_again.non_tensor_batch["extra_info"].tolist()
    empty = tmp_path / "empty"
    empty.mkdir()
    PartialGroups().save(empty)
    assert not list(empty.iterdir())
    loaded.load(empty)
    assert len(loaded) == 0


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
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run([*line, f"trainer.default_local_dir={whole}"]) == 0
    rows = {row["step"]: row for row in steps(whole)}
    kept = next(step for step in (1, 2, 3) if rows[step]["env/kept_groups"])
    assert (whole / f"global_step_{kept}" / "partial_groups.pkl").exists()
    assert rows[kept + 1]["rollout/staleness/max"] == 1 and rows[1]["rollout/staleness/max"] == 0
    assert rows[4]["env/kept_groups"] == 0  # nothing is kept at the end

    resumed.mkdir()
    shutil.copytree(whole / f"global_step_{kept}", resumed / f"global_step_{kept}")
    shutil.copy(whole / "metrics.jsonl", resumed)
    assert run([*line, f"trainer.default_local_dir={resumed}"]) == 0
    again = {row["step"]: row for row in steps(resumed)}
    for step in range(kept + 1, 4):
        assert again[step] == rows[step], step

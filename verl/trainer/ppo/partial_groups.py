"""Groups that a step did not wait for, on their way into the next one (`rollout.keep_partial`).

    step k     generated rows -> PartialGroups.take -> rows to train on now
                                      |  all rows of each group with a "kept" member, as they are
    step k+1   fresh prompts  -> PartialGroups.join -> the kept rows, then the fresh ones -> generation
    checkpoint PartialGroups.save, load

A step that generates several times (`algorithm.filter_groups`) takes and joins each time: what one of its
rounds keeps goes on in the next. A row goes on with its token ids, log-probs and turns; one that had ended
stays as it was. The seeds are new, so no random number is used twice. A group is kept once: in its second
generation it is waited for or cut like the others, so no token that is trained is older than one step. Groups
are known by uid alone, wherever their rows were generated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto, object_array

KEPT, CUT = "kept", "cut"  # finish reasons of trajectories that a batch did not wait for
FILE_NAME = "partial_groups.pkl"


class PartialGroups:
    """The rows that wait for the next step: their prompts' columns, and `continuation` (see `_state`)."""

    def __init__(self) -> None:
        self.rows: DataProto | None = None

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    @property
    def num_groups(self) -> int:
        return 0 if self.rows is None else len(set(self.rows.non_tensor_batch["uid"]))

    def join(self, prompts: DataProto) -> tuple[DataProto, np.ndarray | None]:
        """Puts the kept rows before `prompts` [N]. Returns them all, and the `continuation` of each (None for
        a fresh one); without kept rows no column. The rows stay kept until `take`."""
        if self.rows is None:
            return prompts, None
        states = self.rows.non_tensor_batch["continuation"]
        kept = self.rows.select(non_tensor_batch_keys=list(prompts.non_tensor_batch))
        return DataProto.concat([kept, prompts]), np.concatenate(
            [states, object_array([None] * len(prompts))]
        )

    def take(self, batch: DataProto) -> DataProto:
        """Keeps the groups of the generated `batch` that have a "kept" member instead of those kept so far.

        Returns the other rows. If there are none, nothing is kept: what is unfinished is cut (in place), so
        that the step has something to learn from. Reads the tensors of generation and the columns `uid` and
        `trajectory`.
        """
        records, uids = batch.non_tensor_batch["trajectory"], batch.non_tensor_batch["uid"]
        open_uids = {
            uid for uid, record in zip(uids, records, strict=True) if record["finish_reason"] == KEPT
        }
        leaves = np.array([uid in open_uids for uid in uids], dtype=bool)
        self.rows = None
        if not open_uids:
            return batch
        if leaves.all():
            _cut_unfinished(batch)
            return batch
        kept = batch.select_idxs(leaves)
        columns = {key: value for key, value in kept.non_tensor_batch.items() if key != "trajectory"}
        columns["continuation"] = object_array([_state(kept, row) for row in range(len(kept))])
        self.rows = DataProto(None, columns)
        return batch.select_idxs(~leaves)

    def save(self, folder: Path) -> None:
        """Writes the rows into a checkpoint's folder; nothing when there are none."""
        if self.rows is not None:
            self.rows.save_to_disk(folder / FILE_NAME)

    def load(self, folder: Path) -> None:
        """Takes the rows of a checkpoint."""
        path = folder / FILE_NAME
        self.rows = DataProto.load_from_disk(path) if path.exists() else None


def _state(batch: DataProto, row: int) -> dict[str, Any]:
    """What the agent makes a trajectory from: ids, mask and log-probs without padding, and its record."""
    tensors = batch.tensors
    width = tensors["responses"].shape[1]
    length = int(tensors["attention_mask"][row, -width:].sum())
    return {
        "response_ids": tensors["responses"][row, :length].tolist(),
        "response_mask": tensors["response_mask"][row, :length].tolist(),
        "log_probs": tensors["rollout_log_probs"][row, :length].tolist(),
        "record": batch.non_tensor_batch["trajectory"][row],
    }


def _cut_unfinished(batch: DataProto) -> None:
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        if record["finish_reason"] == KEPT:
            record["finish_reason"] = CUT
            batch.tensors["response_mask"][row] = 0
            batch.tensors["rollout_log_probs"][row] = 0


def straggler_metrics(batch: DataProto) -> dict[str, float]:
    """`env/cut_trajectories`, `env/cut_groups`: how many of a batch were not waited for and are lost.

    Beside them the trainer reports `env/kept_groups` (they go on in the next step), `env/left_out` (rows that
    are not learnt from: cut, failed, or the last of their group), `rollout/staleness/mean` and `/max`.
    """
    reasons = [record["finish_reason"] for record in batch.non_tensor_batch["trajectory"]]
    groups = {
        uid for uid, reason in zip(batch.non_tensor_batch["uid"], reasons, strict=True) if reason == CUT
    }
    return {"env/cut_trajectories": float(reasons.count(CUT)), "env/cut_groups": float(len(groups))}


def newest_version(batch: DataProto) -> int:
    """The version of the weights that `batch` was generated with: that of its newest token."""
    return max(record["version_last"] or 0 for record in batch.non_tensor_batch["trajectory"])


def staleness(batch: DataProto, version: int) -> np.ndarray:
    """How many versions (optimizer steps) before `version` each row's first token was sampled; [N] int64.

    A row that had ended in the step before is as old as one that went on. 0 for a row without a token.
    """
    first = [record["version_first"] for record in batch.non_tensor_batch["trajectory"]]
    return np.array([0 if it is None else version - it for it in first], dtype=np.int64)

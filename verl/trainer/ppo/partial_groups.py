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

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.batching import with_columns

KEPT, CUT = "kept", "cut"  # finish reasons of trajectories that a batch did not wait for
FILE_NAME = "partial_groups.pkl"


class PartialGroups:
    """The rows that wait for the next step: their prompts' columns, and `continuation` (see `continuations`).

    Args:
        states, cut: `continuations` and `without_unfinished`, run where the tokens are.
    """

    def __init__(
        self,
        states: Callable[[DataProto], DataProto] | None = None,
        cut: Callable[[DataProto], DataProto] | None = None,
    ) -> None:
        self.states, self.cut = states or continuations, cut or without_unfinished
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

        Returns the other rows. If there are none, nothing is kept: what is unfinished is cut, so that the
        step has something to learn from. Reads the tensors of generation and the columns `uid` and
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
            return with_columns(batch, self.cut(batch))
        kept = batch.select_idxs(leaves)
        columns = {key: value for key, value in kept.non_tensor_batch.items() if key != "trajectory"}
        columns |= self.states(kept).non_tensor_batch
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


def continuations(batch: DataProto) -> DataProto:
    """`continuation` of each row, what the agent makes a trajectory from: `response_ids`, `response_mask` and
    `log_probs` without padding, and its `record`.
    """
    tensors = batch.tensors
    width = tensors["responses"].shape[1]
    lengths = tensors["attention_mask"][:, -width:].sum(-1).tolist()
    names = {"response_ids": "responses", "response_mask": "response_mask", "log_probs": "rollout_log_probs"}
    states = [
        {name: tensors[column][row, :length].tolist() for name, column in names.items()}
        | {"record": batch.non_tensor_batch["trajectory"][row]}
        for row, length in enumerate(lengths)
    ]
    return DataProto(None, {"continuation": object_array(states)})


def without_unfinished(batch: DataProto) -> DataProto:
    """response_mask and rollout_log_probs with 0 in rows that were not waited for, whose records now say that
    they are cut.
    """
    records = [dict(record) for record in batch.non_tensor_batch["trajectory"]]
    unfinished = torch.tensor([record["finish_reason"] == KEPT for record in records])[:, None]
    for record in records:
        record["finish_reason"] = CUT if record["finish_reason"] == KEPT else record["finish_reason"]
    names = ("response_mask", "rollout_log_probs")
    columns = {name: batch.tensors[name].masked_fill(unfinished, 0) for name in names}
    return DataProto.from_dict(columns, {"trajectory": object_array(records)})


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

"""From dataset rows to the batch that is sampled from, and from trajectories to the order workers want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.balancing import balanced_parts

TRAIN_STREAM, VALIDATION_STREAM = 0, 1


def sampling_seeds(run_seed: int, stream: int, step: int, num_rows: int, round_: int = 0) -> torch.Tensor:
    """One 64-bit seed for each row of a step; [num_rows] int64.

    A function of its arguments alone, so a resumed run draws what the undisturbed one would have drawn, and
    the number of processes has no influence. `round_`: for a step that generates more than once.
    """
    words = np.random.SeedSequence([run_seed, stream, step, round_]).generate_state(num_rows, np.uint64)
    return torch.from_numpy(words.view(np.int64).copy())


def prompt_batch(rows: list[dict[str, Any]], uid_prefix: str) -> DataProto:
    """Rows of `RLHFDataset` -> DataProto of non-tensors, with a `uid` for each prompt of this step."""
    arrays: dict[str, np.ndarray] = {}
    for key in rows[0]:
        arrays[key] = np.empty(len(rows), dtype=object)
        arrays[key][:] = [row[key] for row in rows]
    arrays["uid"] = np.array([f"{uid_prefix}-{i}" for i in range(len(rows))], dtype=object)
    return DataProto(batch=None, non_tensor_batch=arrays, meta_info={})


def with_samples(prompts: DataProto, generated: DataProto) -> DataProto:
    """What was known of each row with what was generated for it (same rows, same order)."""
    columns = prompts.non_tensor_batch | {"trajectory": generated.non_tensor_batch["trajectory"]}
    return DataProto(generated.batch, columns, dict(generated.meta_info), generated.stored)


def with_columns(batch: DataProto, made: DataProto) -> DataProto:
    """The batch with columns that were made from it, in place of those of the same name; without the
    meta_info of `made`.
    """
    kept = batch.select()
    names = [*made.widths, *([] if made.batch is None else made.batch.keys())]
    known = [*kept.widths, *([] if kept.batch is None else kept.batch.keys())]
    kept.pop([name for name in known if name in names])
    kept.non_tensor_batch |= made.non_tensor_batch
    return kept.union(made.select(non_tensor_batch_keys=[], meta_info_keys=[]))


def without_padding(batch: DataProto) -> DataProto:
    """The batch without the columns that are padding in every row, on both sides of its tensors. Reads
    prompt_length and response_length.
    """
    widths, prompt_width = batch.widths, batch.widths["prompts"]
    first = prompt_width - int(batch.tensors["prompt_length"].max())
    end = prompt_width + max(int(batch.tensors["response_length"].max()), 1)
    windows = {}
    for key, width in widths.items():
        if key == "prompts":
            windows[key] = (first, prompt_width)
        elif width == widths["attention_mask"]:
            windows[key] = (first, end)
        else:
            windows[key] = (0, end - prompt_width)
    return batch.narrowed(windows)


def mini_batch_rows(num_rows: int, num_planned: int, size: int) -> int:
    """Rows of a mini-batch, so that a batch has no more of them than planned.

    `size` as configured; more only where the batch holds more than the `num_planned` rows of a step (groups
    of the step before have joined it): a few rows too many must not get an optimizer step of their own.
    """
    if num_rows <= num_planned:
        return size
    return -(-num_rows // -(-num_planned // size))


@dataclass(frozen=True)
class Arrangement:
    """The order in which rows go to the workers.

    Attributes:
        order: [M] rows, M a multiple of the number of workers, each of which gets a contiguous chunk; None:
            as they stand.
        is_fill: [M] bool, rows that are there to fill up and take part in nothing; None: there is none.
        tokens_per_rank: tokens of each worker's rows.
    """

    order: list[int] | None
    is_fill: np.ndarray | None
    tokens_per_rank: list[int]

    def of(self, batch: DataProto) -> DataProto:
        """The rows in this order, with an empty response_mask where they fill up."""
        if self.order is None:
            return batch
        arranged = batch.select_idxs(torch.tensor(self.order, dtype=torch.int64))
        if self.is_fill is None or not self.is_fill.any():
            return arranged
        if arranged.stored is not None:
            arranged.stored = arranged.stored.filled_up(self.is_fill)
        else:
            mask = arranged.tensors["response_mask"]
            arranged.tensors["response_mask"] = mask * torch.from_numpy(~self.is_fill).long()[:, None]
        return arranged


def arrange_for_workers(
    batch: DataProto, world_size: int, mini_batch_size: int, attention_length: float = 4096.0
) -> tuple[DataProto, list[int]]:
    """The rows in the order that `arrangement` finds, and per rank its number of tokens."""
    found = arrangement(batch, world_size, mini_batch_size, attention_length)
    return found.of(batch), found.tokens_per_rank


def arrangement(
    batch: DataProto, world_size: int, mini_batch_size: int, attention_length: float = 4096.0
) -> Arrangement:
    """An order of rows in which contiguous chunks, one a rank, are balanced and mini-batches stay the same
    sets.

    Mini-batch k of the whole world is the set of rows [k*m, (k+1)*m), whatever `world_size` is; of it, each
    rank gets the same number of rows and about the same cost (see `balancing`, also for `attention_length`).
    Rows that are needed to fill up are copies. Reads input_ids and attention_mask.
    """
    attention = batch.tensors["attention_mask"].bool()
    lengths = attention.sum(-1)
    if world_size == 1:
        return Arrangement(None, None, [int(lengths.sum())])
    sequences = [part.numpy() for part in batch.tensors["input_ids"][attention].split(lengths.tolist())]
    order: list[list[int]] = [[] for _ in range(world_size)]
    fill: list[list[bool]] = [[] for _ in range(world_size)]
    for start in range(0, len(batch), mini_batch_size):
        rows = list(range(start, min(start + mini_batch_size, len(batch))))
        share = -(-len(rows) // world_size)
        parts = balanced_parts(sequences[start : start + len(rows)], world_size, attention_length)
        for rank, part in enumerate([start + i for i in part] for part in parts):
            missing = share - len(part)
            order[rank] += part + [rows[0]] * missing
            fill[rank] += [False] * len(part) + [True] * missing
    return Arrangement(
        [i for part in order for i in part],
        np.array([flag for part in fill for flag in part]),
        [int(lengths[part].sum()) for part in order],
    )

"""How a worker's rows become micro-batches: limits from the configuration, the same number on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.packing import CPU_TOKENS_PER_PACK, PackedMicroBatch, pack_rows, plan_by_prefix, plan_padded
from verl.workers.engine.base import Engine

PACKING_KEYS = ("input_ids", "attention_mask", "position_ids", "response_mask")
EXTRA_LOSS_KEY = "extra_loss_mask"
LOSS_MASKS = ("response_mask", EXTRA_LOSS_KEY)


def tensors_of(data: DataProto, keys: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The batch's tensors that packing needs, those of `keys`, and those of `optional` that are there."""
    present: dict[str, Any] = dict(data.batch.items()) if data.batch is not None else {}
    wanted = (*PACKING_KEYS, *keys)
    missing = [key for key in wanted if key not in present]
    if missing:
        raise ValueError(
            f"the batch has no {', '.join(missing)}; it has {', '.join(sorted(present)) or 'nothing'}."
        )
    return {key: present[key] for key in (*wanted, *optional) if key in present}


@dataclass(frozen=True)
class MicroBatchLimits:
    """Most rows and most tokens of one forward pass on one rank (None: no limit), and whether it is
    padded.
    """

    max_rows: int | None
    max_tokens: int | None
    padded: bool

    @classmethod
    def from_config(
        cls,
        block: Mapping[str, Any],
        name: str,
        prefix: str,
        device: torch.device,
        packed: bool,
        num_sharing: int = 1,
    ) -> MicroBatchLimits:
        """Reads the keys of `block` (called `name` in error messages) that start with `prefix`.

        `<prefix>_micro_batch_size_per_gpu` rows or, with dynamic batch sizes,
        `<prefix>_max_token_len_per_gpu` tokens. On CPU a pass has at most CPU_TOKENS_PER_PACK tokens besides:
        smaller passes are faster there, and the loss is the same. num_sharing: processes that share a pass's
        tokens; numbers of tokens are for each of them.
        """
        dynamic = block["log_prob_use_dynamic_bsz" if prefix == "log_prob" else "use_dynamic_bsz"]
        pack_limit = CPU_TOKENS_PER_PACK * num_sharing if device.type == "cpu" else None
        if dynamic:
            budget = block[f"{prefix}_max_token_len_per_gpu"]
            if not budget or budget < 1:
                raise ValueError(
                    f"{name}.{prefix}_max_token_len_per_gpu: found {budget}, expected at least 1."
                )
            budget *= num_sharing
            return cls(None, min(budget, pack_limit) if pack_limit else budget, not packed)
        per_rank = block[f"{prefix}_micro_batch_size_per_gpu"]
        if per_rank is None or per_rank < 1:
            raise ValueError(
                f"{name}.{prefix}_micro_batch_size_per_gpu: found {per_rank}, expected at least 1."
            )
        return cls(per_rank, pack_limit, not packed)


def pack_micro_batches(
    batch: Mapping[str, Tensor], rows: Sequence[int], engine: Engine, limits: MicroBatchLimits
) -> tuple[int, Iterator[PackedMicroBatch]]:
    """Packs some rows of a batch, those with at least one loss token. Returns (count, micro-batches).

    Loss tokens are those of response_mask and, where the batch has one, of extra_loss_mask ([N, R] bool, see
    `pack_rows`). The count is the same on every rank, since each pass is a collective operation of all: a
    rank that has fewer gets micro-batches without loss tokens. They are built one at a time, as they are
    asked for.
    """
    tensors = {key: batch[key] for key in (*PACKING_KEYS, EXTRA_LOSS_KEY) if key in batch}
    masks = [tensors[key] for key in LOSS_MASKS if key in tensors]
    index = torch.as_tensor(rows, dtype=torch.int64)
    index = index[torch.stack([mask[index].any(dim=1) for mask in masks]).any(dim=0)]
    attention = tensors["attention_mask"][index].bool()
    lengths = attention.sum(dim=1).tolist()
    if limits.padded:
        plan = plan_padded(lengths, limits.max_rows, limits.max_tokens)
    else:
        sequences = [x.numpy() for x in tensors["input_ids"][index][attention].split(lengths)]
        plan = plan_by_prefix(sequences, limits.max_rows, limits.max_tokens)
    count = int(engine.reduce([len(plan)], "max")[0])

    def build() -> Iterator[PackedMicroBatch]:
        for micro_batch in plan:
            yield pack_rows(tensors, index[micro_batch].tolist(), engine.device, limits.padded)
        for _ in range(count - len(plan)):
            row = {key: value[:1] for key, value in tensors.items()}
            without_loss = {key: torch.zeros_like(row[key]) for key in LOSS_MASKS if key in row}
            yield pack_rows(row | without_loss, [0], engine.device)

    return count, build()

"""The distribution of a mini-batch's rows over processes: an equal number each, at about the same cost.

The cost of a sequence of length n is n + n^2 / a, where a (`attention_length`) is the length at which
attention costs as much as everything else in the model. Tokens that sequences of one process have in common
from their beginning on are computed once there (verl.packing.packs) and are counted once. So it can pay to
leave the trajectories of a prompt together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from verl.packing.packs import prefix_order
from verl.protocol import DataProto
from verl.workers.engine.flops import layer_weights
from verl.workers.engine.update_loop import mini_batches

# A row stays together with its neighbour if it shares at least one part in this many with it.
KEPT_TOGETHER = 4


def arrange_for_workers(
    batch: DataProto, world_size: int, num_mini_batches: int, attention_length: float = 4096.0
) -> tuple[DataProto, list[int]]:
    """Arrange the rows so that contiguous chunks, one for each rank, are balanced.

    Mini-batch k of the whole world is the k-th part of `mini_batches` (verl.workers.engine.update_loop),
    whatever `world_size` is. Each rank gets the same number of its rows, at about the same cost. Rows that
    are needed to fill up are copies with an empty response_mask. The function reads input_ids, attention_mask
    and response_mask.

    Returns:
        The rows in order, and the number of tokens of each rank.
    """
    attention = batch.tensors["attention_mask"].bool()
    lengths = attention.sum(-1)
    if world_size == 1:
        return batch, [int(lengths.sum())]
    sequences = [row.numpy() for row in batch.tensors["input_ids"][attention].split(lengths.tolist())]
    order: list[list[int]] = [[] for _ in range(world_size)]
    is_real: list[list[int]] = [[] for _ in range(world_size)]
    for mini_batch in mini_batches(len(batch), num_mini_batches):
        start = mini_batch.start
        share = -(-len(mini_batch) // world_size)
        of_mini_batch = sequences[start : mini_batch.stop]
        for rank, rows in enumerate(balanced_parts(of_mini_batch, world_size, attention_length)):
            missing = share - len(rows)
            order[rank] += [start + row for row in rows] + [start] * missing
            is_real[rank] += [1] * len(rows) + [0] * missing
    arranged = batch.select_idxs(torch.tensor([row for rows in order for row in rows]))
    real_rows = torch.tensor([flag for flags in is_real for flag in flags])
    if not real_rows.all():
        arranged.tensors["response_mask"] = arranged.tensors["response_mask"] * real_rows[:, None]
    return arranged, [int(lengths[rows].sum()) for rows in order]


def attention_length(config: PretrainedConfig) -> float:
    """Return the length of a sequence, in tokens, at which causal attention costs as much as the weights.

    Per token and layer the matrices of weights take 2 w operations (w: their elements), and causal attention
    over n tokens takes 2 n h d (h heads of width d; half of 4 n h d). So n = w / (h d). Embedding and head,
    which see every token and only loss tokens, do not count.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return sum(layer_weights(config)) / (heads * head_width)


def balanced_parts(
    sequences: Sequence[np.ndarray], num_parts: int, attention_length: float
) -> list[list[int]]:
    """Split rows into parts of equal number (rounded up) and about equal cost; return sorted indices.

    The function tries single rows, and runs of rows of which each shares much with the one before. It keeps
    the plan whose costliest part is cheaper. The same input always gives the same parts.
    """
    room = -(-len(sequences) // num_parts)
    alike: list[list[int]] = []
    for row, shared in prefix_order(sequences):
        if alike and len(alike[-1]) < room and shared * KEPT_TOGETHER >= len(sequences[row]):
            alike[-1].append(row)
        else:
            alike.append([row])

    def cost_of(rows: Sequence[int]) -> float:
        order = prefix_order([sequences[row] for row in rows])
        lengths = [(len(sequences[rows[position]]), shared) for position, shared in order]
        return sum(n - shared + (n**2 - shared**2) / attention_length for n, shared in lengths)

    def filled(units: Sequence[list[int]]) -> list[list[int]]:
        """Give the costliest unit to the cheapest part that has room for it, or else in pieces to several."""
        parts: list[list[int]] = [[] for _ in range(num_parts)]
        totals = [0.0] * num_parts
        costs = [cost_of(unit) for unit in units]
        for index in sorted(range(len(units)), key=lambda i: (-costs[i], units[i])):
            rows = units[index]
            while rows:
                free = [room - len(part) for part in parts]
                fits = [k for k in range(num_parts) if free[k] >= len(rows)]
                best = min(fits or [k for k in range(num_parts) if free[k]], key=lambda k: (totals[k], k))
                piece = rows[: free[best]]
                rows = rows[free[best] :]
                parts[best] += piece
                totals[best] += cost_of(piece)
        return parts

    plans = [filled([[row] for row in range(len(sequences))]), filled(alike)]
    plan = min(plans, key=lambda parts: max(map(cost_of, parts)))
    return [sorted(part) for part in plan]

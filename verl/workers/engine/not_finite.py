"""Why an update was not finite: the first trajectory and token whose numbers are infinite or NaN.

    micro-batches of one row --what the loss is made of--> first token      --else, backward--> first gradient

Looked into after the fact and seldom: it costs a forward pass of the mini-batch and, if everything that goes
into the loss is finite, a backward pass for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from verl.utils.packing import PackedMicroBatch
from verl.workers.engine.base import Engine

if TYPE_CHECKING:
    from verl.workers.engine.update_loop import Objective


def first_not_finite(
    engine: Engine,
    single_rows: Callable[[], Iterator[PackedMicroBatch]],
    objective: Objective,
    names: np.ndarray | None,
) -> str:
    """What is not finite, in words, the same on every rank; all ranks call it together.

    Args:
        single_rows: the mini-batch in micro-batches of one row each. names: uid of each row of this rank.
    """
    found = _over_ranks(engine, _first_token(engine, single_rows(), objective, names))
    found = found or _first_gradient(engine, single_rows(), objective, names)
    return found or "the loss or gradient is not finite, though that of each trajectory alone is"


def _row_name(row: int, names: np.ndarray | None) -> str:
    rank = f" of rank {dist.get_rank()}" if dist.is_initialized() and dist.get_world_size() > 1 else ""
    return f"row {row}{rank}" + ("" if names is None else f" ({names[row]})")


def _first_token(
    engine: Engine, parts: Iterator[PackedMicroBatch], objective: Objective, names: np.ndarray | None
) -> str:
    """The first token of this rank's rows with a number that is not finite; "" if there is none."""
    first: tuple[int, int, str, float] | None = None
    for part, outputs in engine.infer(parts, **objective.asked):
        for name, values in objective.token_values(part, outputs).items():
            places = (~values.isfinite())[0].nonzero().flatten().tolist()
            if not places:
                continue
            candidate = (int(part.rows[0]), places[0], name, float(values[0, places[0]]))
            if first is None or candidate[:2] < first[:2]:
                first = candidate
    if first is None:
        return ""
    row, place, name, value = first
    return f"{name} {value} at place {place} of the response of {_row_name(row, names)}"


def _first_gradient(
    engine: Engine,
    parts: Iterator[PackedMicroBatch],
    objective: Objective,
    names: np.ndarray | None,
) -> str:
    """The first row whose own gradient is not finite. With several ranks: the rows of that pass."""
    for part in parts:
        engine.forward_backward([part], 1, objective.share, **objective.asked)
        norm, _ = engine.step(discard=True)
        if not math.isfinite(norm):
            row = _row_name(int(part.rows[0]), names) if len(part.cells) else ""
            return f"only the gradient is not finite, that of {_over_ranks(engine, row, every=True)}"
    return ""


def _over_ranks(engine: Engine, text: str, every: bool = False) -> str:
    """The first rank's text that is not empty, or all of them."""
    if engine.world_size == 1:
        return text
    texts: list[str] = [""] * engine.world_size
    dist.all_gather_object(texts, text if engine.data.leads else "")
    present = [found for found in texts if found]
    return " or ".join(present if every else present[:1])

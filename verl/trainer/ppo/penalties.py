"""What a score loses: for searches, and for nearing a limit of length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto


def apply_search_cost(scores: Tensor, num_searches: Sequence[int], cost: float) -> Tensor:
    """A reward is worth less the more searches it took: score * max(0, 1 - cost * searches) if score > 0.

    A reward of 0 or less stays what it is, so that a wrong answer is never a reason to search less. Among
    right answers to one question the cost decides: GRPO then prefers the one with no search too many.

    Args:
        scores: [N, R] float32.
        num_searches: searches that were made, of each row.
        cost: share of the reward for each search; 0 changes nothing.
    """
    kept = (1.0 - cost * torch.tensor(num_searches, dtype=scores.dtype)).clamp(min=0.0).unsqueeze(1)
    return torch.where(scores > 0, scores * kept, scores)


def room_left(batch: DataProto, max_context: int, max_turn: int, max_turns: int) -> np.ndarray:
    """How many more tokens each policy could have written before a limit had cut it; [N] int64, at least 0.

    A trajectory is cut when its context (prompt, turns, observations) reaches `max_context` tokens, or when
    its last turn, the one after `max_turns` others, reaches `max_turn`. 0 for one that was cut, also where an
    observation that did not fit has cut it. Of other environments than searches any turn may be the last.
    """
    context = batch.tensors["attention_mask"].sum(-1).tolist()
    room = np.maximum(max_context - np.array(context, dtype=np.int64), 0)
    for row, record in enumerate(batch.non_tensor_batch["trajectory"]):
        turns = record["turns"]
        if record["finish_reason"] == "length":
            room[row] = 0
        elif len(turns) > max_turns or (turns and "env_class" in record):
            room[row] = min(room[row], max(max_turn - (turns[-1]["end"] - turns[-1]["start"]), 0))
    return room


def overlong_penalty(room: np.ndarray, buffer_length: int, factor: float) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13) times `factor`; [N] float64, from -factor
    to 0.

    0 while at least `buffer_length` tokens are left, then falling evenly to -1 where none is: with |y| the
    length, L_max where it is cut and L_cache the buffer, (L_max - L_cache - |y|) / L_cache. The paper's one
    limit is the response's; an agent's context holds retrieved text as well, so what counts is the room that
    is left, L_max - |y|, which is the same number however the observations are counted.
    """
    return factor * np.clip((room - buffer_length) / buffer_length, -1.0, 0.0)


def add_to_outcome(scores: Tensor, response_mask: Tensor, amounts: np.ndarray) -> Tensor:
    """[N, R]: `scores` with each row's amount [N] added on its last sampled token, if it has one."""
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    last = columns.masked_fill(~mask, -1).amax(dim=1, keepdim=True)
    amount = torch.from_numpy(amounts).to(scores.dtype).unsqueeze(1)
    return scores.scatter_add(1, last.clamp(min=0), torch.where(last >= 0, amount, 0.0))

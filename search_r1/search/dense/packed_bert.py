"""Run BERT and its relatives on a CPU without padding: all texts of a batch in one row of tokens.

    token ids of texts, ascending by length -> [1, T] ids and positions -> network -> pooled vectors [B, H]
                                                   |
                                    attention runs once for each group of texts of one length

All other layers work on single tokens, so they don't care which text a token belongs to. What a text gets
does not depend on the texts beside it, to the bit. Attention and pooling have the same shape per text, and a
product of MIN_TOKENS rows or more sums each row in the same order whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

PACKED_TYPES = {"bert": 0, "roberta": 2, "xlm-roberta": 2, "camembert": 2}
"""Maps a model type to its first position. RoBERTa's positions start after its padding index, which is 1."""

PACKED_ATTENTION = "packed_groups"  # for `attn_implementation`
MIN_TOKENS = 8  # torch multiplies 1 to 3 rows in another way, with other roundings


def first_position(model_type: str) -> int:
    """Return what the positions of a network's tokens start at.

    The network can read as many tokens fewer than it has positions.
    """
    return 2 if model_type == "mpnet" else PACKED_TYPES.get(model_type, 0)


Group = tuple[int, int, int]
"""Neighbouring texts of one length: (first token, end token, length of each text)."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    groups: list[Group],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each text: query, key, value [1, heads, T, head size] -> [1, T, heads, head size]."""
    heads = query.shape[1]
    size = query.shape[3]
    result = torch.empty(1, query.shape[2], heads, size, dtype=query.dtype)
    for start, stop, length in groups:
        qkv = (
            tensor[0, :, start:stop].unflatten(1, (-1, length)).transpose(0, 1)
            for tensor in (query, key, value)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(*qkv)  # [texts, heads, length, head size]
        result[0, start:stop].unflatten(0, (-1, length)).copy_(mixed.transpose(1, 2))
    return result, None


AttentionInterface.register(PACKED_ATTENTION, _attention)


def run_packed(
    network: PreTrainedModel,
    batch: list[list[int]],
    pool: Callable[[torch.Tensor, None], torch.Tensor],
) -> torch.Tensor:
    """Return pooled vectors [B, H] float32 of token ids that ascend in length.

    `pool` turns [n, length, H] into [n, H].
    """
    first = PACKED_TYPES[network.config.model_type]
    groups: list[Group] = []
    start = 0
    for length, texts in groupby(batch, key=len):
        stop = start + length * sum(1 for _ in texts)
        groups.append((start, stop, length))
        start = stop
    num_groups = len(groups)
    if start < MIN_TOKENS:  # add one more text, which nobody asked for
        batch = [*batch, batch[0][:1] * MIN_TOKENS]
        groups.append((start, start + MIN_TOKENS, MIN_TOKENS))
    ids = torch.tensor([[token for row in batch for token in row]])
    positions = torch.cat([torch.arange(first, first + len(row)) for row in batch])[None]
    hidden = network(
        input_ids=ids, position_ids=positions, token_type_ids=torch.zeros_like(ids), groups=groups
    ).last_hidden_state[0]
    return torch.cat(
        [pool(hidden[a:b].unflatten(0, (-1, length)), None) for a, b, length in groups[:num_groups]]
    )

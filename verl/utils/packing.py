"""From padded batches to packed micro-batches, and from results per loss token back to [N, R].

    DataProto rows --plan_micro_batches--> lists of rows --pack_rows--> PackedMicroBatch --model--> [L]
    [L] per loss token --unpack--> [B, R] matrix, 0 where the policy sampled nothing

Legend: N rows of the batch, B rows of a micro-batch, P prompt and R response width, T tokens of a pack, L
loss tokens (those that the policy sampled, and those that a loss asks for besides). Padding is known from
`attention_mask` alone, never from token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.utils.attention import Packing

CPU_TOKENS_PER_PACK = 2048  # on CPU larger packs only leave the caches; a GPU wants all it may have


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences end to end, without padding (or each padded on the right to the longest, if asked for).

    input_ids, position_ids [1, T] int64; packing: where the sequences lie. For the L loss tokens, in
    row-major order: predicted_from [L] index into T of the position whose hidden state predicts the token
    (the one before it), labels [L] the token itself, cells [L] where it stands in the flattened [B, R]
    response matrix, sampled [L] bool whether the policy sampled it (else it is a loss token because
    `extra_loss_mask` asked for it). rows [B]: which rows of the batch these are; shape: (B, R).

    Worked example, one row: prompt [0, 5, 6] (the 0 is padding), responses [7, 8, 9, 2, 0], response_mask
    [1, 1, 0, 1, 0]. Then input_ids [[5, 6, 7, 8, 9, 2]], position_ids [[0, 1, 2, 3, 4, 5]], seq_lens (6,),
    predicted_from [1, 2, 4], labels [7, 8, 2], cells [0, 1, 3], sampled [True, True, True], shape (1, 5).
    With an extra_loss_mask [0, 0, 1, 0, 0] predicted_from is [1, 2, 3, 4], sampled [True, True, False, True].
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: Packing
    predicted_from: Tensor
    labels: Tensor
    cells: Tensor
    sampled: Tensor
    rows: Tensor
    shape: tuple[int, int]

    @property
    def mask(self) -> Tensor:
        """[B, R] bool: where the tokens stand that the policy sampled."""
        return self._mask_of(self.sampled)

    @property
    def extra_mask(self) -> Tensor:
        """[B, R] bool: where the loss tokens stand that the policy did not sample."""
        return self._mask_of(~self.sampled)

    def _mask_of(self, chosen: Tensor) -> Tensor:
        flat = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=self.cells.device)
        flat[self.cells] = chosen
        return flat.view(self.shape)

    def unpack(self, per_token: Tensor) -> Tensor:
        """[L] floats -> [B, R], 0 where there is no loss token. Differentiable."""
        return (
            per_token.new_zeros(self.shape[0] * self.shape[1])
            .index_put((self.cells,), per_token)
            .view(self.shape)
        )


def pack_rows(
    batch: Mapping[str, Tensor], rows: Sequence[int], device: torch.device | str, pad_to_longest: bool = False
) -> PackedMicroBatch:
    """Packs some rows of a batch with input_ids, attention_mask, position_ids [N, P+R], response_mask [N, R]
    and, if there is one, extra_loss_mask [N, R]: tokens (observations) that become loss tokens as well.

    Padding for `pad_to_longest` repeats a sequence's last token on the right, where causal attention lets
    no real token see it. Raises ValueError if a loss token has no token before it.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    attention = batch["attention_mask"][index].bool()
    response_mask = batch["response_mask"][index].bool()
    extra = batch.get("extra_loss_mask")
    loss_mask = response_mask if extra is None else response_mask | extra[index].bool()
    num_rows, response_width = response_mask.shape
    in_loss = torch.zeros_like(attention)
    in_loss[:, -response_width:] = loss_mask
    lengths = attention.sum(dim=1)
    place = attention.cumsum(dim=1) - 1  # of each token in its own sequence
    if bool((in_loss & (~attention | (place == 0))).any()):
        raise ValueError(
            "response_mask or extra_loss_mask marks a token that attention_mask calls padding or that has no "
            "token before it; every trajectory needs a prompt of at least one token."
        )
    stride = lengths.new_full((num_rows,), int(lengths.max())) if pad_to_longest else lengths
    starts = stride.cumsum(0) - stride
    if pad_to_longest:
        columns = torch.arange(int(lengths.max())).clamp(max=(lengths - 1)[:, None])
        order = attention.long().argsort(dim=1, descending=True, stable=True).gather(1, columns)
        input_ids, position_ids = (
            batch[key][index].gather(1, order).view(-1) for key in ("input_ids", "position_ids")
        )
    else:
        input_ids, position_ids = (batch[key][index][attention] for key in ("input_ids", "position_ids"))
    at = (place + starts[:, None])[in_loss]
    cells = loss_mask.view(-1).nonzero().squeeze(1)
    return PackedMicroBatch(
        input_ids=input_ids.unsqueeze(0).to(device),
        position_ids=position_ids.unsqueeze(0).to(device),
        packing=Packing.of(stride.tolist(), device),
        predicted_from=(at - 1).to(device),
        labels=input_ids[at].to(device),
        cells=cells.to(device),
        sampled=response_mask.view(-1)[cells].to(device),
        rows=index,
        shape=(num_rows, response_width),
    )


def plan_micro_batches(
    lengths: Sequence[int],
    max_rows: int | None = None,
    max_tokens: int | None = None,
    padded: bool = False,
) -> list[list[int]]:
    """Splits rows into micro-batches of at most `max_rows` rows and `max_tokens` tokens; longest rows first.

    First-fit over the rows sorted by length: micro-batches without padding are full, padded ones hold rows of
    like length. With `padded`, the tokens of a micro-batch are rows times its longest. A row that is
    longer than max_tokens stands alone. Returns lists of indices into `lengths`; the same input always
    gives the same lists.
    """
    plan: list[list[int]] = []
    used: list[int] = []
    first_open = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for k in range(first_open, len(plan)):
            cost = lengths[plan[k][0]] if padded else lengths[row]
            room_in_rows = max_rows is None or len(plan[k]) < max_rows
            if room_in_rows and (max_tokens is None or used[k] + cost <= max_tokens):
                plan[k].append(row)
                used[k] += cost
                break
        else:
            plan.append([row])
            used.append(lengths[row])
        while first_open < len(plan) and max_rows is not None and len(plan[first_open]) >= max_rows:
            first_open += 1
    return plan

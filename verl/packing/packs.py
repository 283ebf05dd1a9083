"""Packing of padded batches into micro-batches, and unpacking of results per loss token to [N, R].

    DataProto rows --plan--> lists of rows --pack_rows--> PackedMicroBatch --model--> [U]
    [U] per distinct loss token --unpack--> [B, R] matrix, 0 where there is no loss token

Legend: N rows of the batch, B rows of a micro-batch, P prompt and R response width, T tokens of a pack, L
loss tokens (those that the policy sampled, and those that a loss asks for besides), U distinct ones among
them. Padding is recognised by `attention_mask` alone, never by token ids.

What rows have in common from their beginning on is in a pack once. Equal tokens after equal tokens have equal
hidden states, so nothing is computed twice, and the gradient is the same. Trajectories of one prompt begin
with the prompt. Those of a policy that has become sure go on alike for long: the same search, the same
documents. In lexicographic order, the longest prefix that a sequence shares with any sequence before it is
the one that it shares with its direct predecessor, so only neighbours must be compared:

    [5 6 7 8]  [5 6 7 9]  [5 6 7 9 2]   own tokens 4, 1, 1;  6 tokens to compute instead of 13
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.packing.attention import Packing
from verl.packing.ulysses import TokenShare, gather_rows
from verl.utils.device import to_device

# On CPU larger packs only overflow the caches, unless their rows share a long beginning (`tokens_allowed`). A
# GPU wants as many tokens as it may have.
CPU_TOKENS_PER_PACK = 2048
WORTH_SHARING = 16  # a beginning is shared if it is at least 1 / WORTH_SHARING of the sequence


@dataclass(frozen=True)
class PackedMicroBatch:
    """Sequences end to end, without padding (or each padded on the right to the longest, if asked for).

    Worked example, one row: prompt [0, 5, 6] (the 0 is padding), responses [7, 8, 9, 2, 0], response_mask [1,
    1, 0, 1, 0]. Then input_ids [[5, 6, 7, 8, 9, 2]], position_ids [[0, 1, 2, 3, 4, 5]], seq_lens (6,),
    predicted_from [1, 2, 4], labels [7, 8, 2], cells [0, 1, 3], sampled [True, True, True], shape (1, 5).
    With an extra_loss_mask [0, 0, 1, 0, 0] predicted_from is [1, 2, 3, 4], sampled [True, True, False, True].
    A second row that differs only in its last token, 3 instead of 2, adds [3] to input_ids and [5] to
    position_ids, and one distinct loss token: predicted_from 4, label 3.

    Attributes:
        input_ids: [1, T] int64.
        position_ids: [1, T] int64.
        packing: where the sequences are, and what each attends to.
        predicted_from: [U], ascending; for each distinct loss token, the index into T of the position whose
            hidden state predicts it (the position before it).
        predicting: the positions in `predicted_from`, once each, ascending. If there are no loss tokens, it
            holds one position without a meaning.
        labels: [U], the distinct loss tokens themselves.
        cells: [L], the index of each loss token in the flattened [B, R] response matrix, in row-major order.
        distinct: [L], which of the U distinct tokens each loss token is. None: L = U, each is its own.
        sampled: [L] bool, whether the policy sampled the token. If not, it is a loss token because
            `extra_loss_mask` asked for it.
        rows: [B], which rows of the batch these are.
        shape: (B, R).
    """

    input_ids: Tensor
    position_ids: Tensor
    packing: Packing
    predicted_from: Tensor
    predicting: Tensor
    labels: Tensor
    cells: Tensor
    distinct: Tensor | None
    sampled: Tensor
    rows: Tensor
    shape: tuple[int, int]

    @property
    def mask(self) -> Tensor:
        """Return the mask [B, R] bool of the tokens that the policy sampled."""
        return self._mask_of(self.sampled)

    @property
    def extra_mask(self) -> Tensor:
        """Return the mask [B, R] bool of the loss tokens that the policy did not sample."""
        return self._mask_of(~self.sampled)

    def _mask_of(self, chosen: Tensor) -> Tensor:
        flat = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool, device=self.cells.device)
        flat[self.cells] = chosen
        return flat.view(self.shape)

    def unpack(self, per_token: Tensor) -> Tensor:
        """Spread [U] floats to [B, R], 0 where there is no loss token; differentiable."""
        if self.distinct is not None:
            per_token = per_token.index_select(0, self.distinct)
        return (
            per_token.new_zeros(self.shape[0] * self.shape[1])
            .index_put((self.cells,), per_token)
            .view(self.shape)
        )


def pack_rows(
    batch: Mapping[str, Tensor], rows: Sequence[int], device: torch.device | str, pad_to_longest: bool = False
) -> PackedMicroBatch:
    """Pack some rows of a batch.

    The batch has input_ids, attention_mask, position_ids [N, P+R], response_mask [N, R] and optionally
    extra_loss_mask [N, R], which marks tokens (observations) that become loss tokens as well.

    A row may hold several contexts. A context begins where position_ids are 0, and attends to itself alone.
    Padding for `pad_to_longest` repeats a sequence's last token on the right, where causal attention lets no
    real token see it. Such a pack shares nothing.

    Raises ValueError if a loss token has no token before it.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    attention = batch["attention_mask"][index].bool()
    response_mask = batch["response_mask"][index].bool()
    extra = batch.get("extra_loss_mask")
    position = attention.cumsum(dim=1) - 1  # position of each token in its row
    begins = attention & ((batch["position_ids"][index] == 0) | (position == 0))
    loss_mask = response_mask
    if extra is not None:  # nothing predicts the first token of another context
        loss_mask = response_mask | (
            extra[index].bool() & ~(begins & (position > 0))[:, -response_mask.shape[1] :]
        )
    in_loss = torch.zeros_like(attention)
    in_loss[:, -response_mask.shape[1] :] = loss_mask
    if bool((in_loss & (~attention | begins)).any()):
        raise ValueError(
            "response_mask or extra_loss_mask marks a token that attention_mask calls padding or that has no "
            "token before it; every context needs a prompt of at least one token."
        )
    ids, positions = (batch[key][index][attention] for key in ("input_ids", "position_ids"))
    lengths = attention.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    bounds = begins[attention].nonzero().squeeze(1)
    contexts = torch.diff(bounds, append=torch.tensor([len(ids)]))
    if pad_to_longest:
        layout = _padded(contexts)
    else:
        layout = _shared(torch.stack([ids, positions], dim=1), contexts.tolist())
    # the index of each loss token among the rows' tokens, end to end
    loss_index = (position + starts[:, None])[in_loss]
    predicted_from = layout.where[loss_index - 1]
    labels = ids[loss_index]
    distinct = None
    if layout.key_index is not None:
        # The pairs are written as numbers, because `unique` of rows copies each row.
        base = int(labels.max()) + 1 if len(labels) else 1
        pairs, distinct = (predicted_from * base + labels).unique(return_inverse=True)
        predicted_from = pairs // base
        labels = pairs % base
        distinct = to_device(distinct, device)
    cells = loss_mask.view(-1).nonzero().squeeze(1)
    predicting = predicted_from.unique() if len(predicted_from) else torch.tensor([0])
    return PackedMicroBatch(
        input_ids=to_device(ids[layout.source].unsqueeze(0), device),
        position_ids=to_device(positions[layout.source].unsqueeze(0), device),
        packing=Packing.of(layout.seq_lens, device, layout.key_lens, layout.key_index),
        predicted_from=to_device(predicted_from, device),
        predicting=to_device(predicting, device),
        labels=to_device(labels, device),
        cells=to_device(cells, device),
        distinct=distinct,
        sampled=to_device(response_mask.view(-1)[cells], device),
        rows=index,
        shape=(response_mask.shape[0], response_mask.shape[1]),
    )


@dataclass(frozen=True)
class _Layout:
    """How S tokens of B rows, end to end, become T tokens of a pack.

    Attributes:
        source: [T], which of the S tokens each token of the pack is.
        where: [S], which of the T tokens stands for it.
        seq_lens: tokens of each sequence in the pack. A sequence is a row, or a row and those that continue
            it.
        key_lens: tokens that each sequence attends to.
        key_index: where these tokens are in the pack. None: each sequence attends to its own tokens.
    """

    source: Tensor
    where: Tensor
    seq_lens: Sequence[int]
    key_lens: Sequence[int] | None = None
    key_index: Tensor | None = None


def _padded(lengths: Tensor) -> _Layout:
    """Lay out each row padded on the right to the longest."""
    longest = int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(longest)
    source = (starts[:, None] + columns.clamp(max=(lengths - 1)[:, None])).view(-1)
    where = (columns + longest * torch.arange(len(lengths))[:, None])[columns < lengths[:, None]]
    return _Layout(source, where, [longest] * len(lengths))


def _shared(tokens: Tensor, lengths: Sequence[int]) -> _Layout:
    """Lay out rows end to end, with the beginnings that they share only once.

    A row's beginning is left out if the pack already has it and it is long enough. `tokens` [S, ...] is what
    is compared.
    """
    order = prefix_order([row.numpy() for row in tokens.split(list(lengths))])
    if not any(shared for _, shared in order):
        identity = torch.arange(len(tokens))
        return _Layout(identity, identity, lengths)
    starts = np.cumsum([0, *lengths])
    where = np.empty(len(tokens), dtype=np.int64)
    source: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    seq_lens: list[int] = []
    key_lens: list[int] = []
    previous = slice(0, 0)
    used = 0
    for row, shared in order:
        start = starts[row]
        num_own = lengths[row] - shared
        where[start : start + shared] = where[previous][:shared]
        where[start + shared : start + lengths[row]] = np.arange(used, used + num_own)
        goes_on = bool(keys) and shared == previous.stop - previous.start
        previous = slice(start, start + lengths[row])
        used = used + num_own
        if not num_own:
            continue
        source.append(np.arange(start + shared, start + lengths[row]))
        if goes_on:  # the previous row is its whole beginning, so the two are one sequence to attention
            keys[-1] = where[previous]
            seq_lens[-1] = seq_lens[-1] + num_own
            key_lens[-1] = lengths[row]
        else:
            keys.append(where[previous])
            seq_lens.append(num_own)
            key_lens.append(lengths[row])
    return _Layout(
        torch.from_numpy(np.concatenate(source)),
        torch.from_numpy(where),
        seq_lens,
        key_lens,
        torch.from_numpy(np.concatenate(keys)),
    )


def plan_padded(
    lengths: Sequence[int], max_rows: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Split rows into padded micro-batches of at most `max_rows` rows and `max_tokens` tokens.

    Padding counts as tokens. The longest rows come first, so that the rows of a micro-batch are of similar
    length. A row that is longer than max_tokens is alone in its micro-batch.

    Returns:
        Lists of indices into `lengths`. The same input always gives the same lists.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return _filled([(row, lengths[row], None) for row in order], max_rows, max_tokens)


def plan_by_prefix(
    sequences: Sequence[np.ndarray],
    max_rows: int | None = None,
    max_tokens: int | None = None,
    preferred_tokens: int | None = None,
) -> list[list[int]]:
    """Split rows as `plan_padded` does, without padding, and with tokens that sequences share counted once.

    Packs are filled in prefix order, so that sequences that share tokens are in the same pack. With
    `preferred_tokens` a pack ends there, unless its next row would have to compute much again in another
    pack: it has at most `tokens_allowed` tokens then, and never more than `max_tokens`.
    """
    order = prefix_order(sequences)
    tokens = [(row, len(sequences[row]), len(sequences[row]) - shared) for row, shared in order]
    return _filled(tokens, max_rows, max_tokens, preferred_tokens)


def tokens_allowed(preferred_tokens: int, shared: int) -> int:
    """Return how many tokens a pack may have whose next row shares `shared` tokens with the row before it.

    In another pack these tokens would be computed again. If they are at least a quarter of a pack, the pack
    may have twice as many tokens more. So less than half of a pack's tokens are computed again for the next
    one (a third, for a prompt of 2,048 tokens), and a pack's memory is bounded by the longest beginning.
    """
    if 4 * shared < preferred_tokens:
        return preferred_tokens
    return preferred_tokens + 2 * shared


def _filled(
    rows: Sequence[tuple[int, int, int | None]],
    max_rows: int | None,
    max_tokens: int | None,
    preferred_tokens: int | None = None,
) -> list[list[int]]:
    """Fill packs with rows in their order.

    A row is (row, tokens that it takes as a pack's first, tokens that it takes behind the row before it). If
    the last number is None, the row takes as many tokens as the pack's first row.
    """
    plan: list[list[int]] = []
    first = used = 0
    for row, alone, behind in rows:
        num_tokens = first if behind is None else behind
        limits = [] if max_tokens is None else [max_tokens]
        if preferred_tokens is not None:
            limits.append(tokens_allowed(preferred_tokens, alone - num_tokens))
        if (
            not plan
            or (max_rows is not None and len(plan[-1]) >= max_rows)
            or any(used + num_tokens > limit for limit in limits)
        ):
            plan.append([])
            first = num_tokens = alone
            used = 0
        plan[-1].append(row)
        used += num_tokens
    return plan


def prefix_order(sequences: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Sort sequences into the order in which neighbours share most.

    Each sequence is a contiguous array [length, ...] of equal dtype and width per token. The tokens' bytes
    are sorted: any order of tokens will do, as long as equal tokens are equal.

    Returns:
        For each sequence, in that order, its index and how many tokens it has in common with the one before
        it. The number is 0 for the first, and where it is so small that fetching the keys costs more than it
        saves.
    """
    keys = [sequence.tobytes() for sequence in sequences]
    pairs: list[tuple[int, int]] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        shared = 0
        sequence = sequences[index]
        if pairs:
            previous = sequences[pairs[-1][0]]
            length = min(len(previous), len(sequence))
            differs = previous[:length] != sequence[:length]
            differs = differs if differs.ndim == 1 else differs.any(axis=1)
            shared = int(differs.argmax()) if differs.any() else length
        pairs.append((index, shared if shared * WORTH_SHARING >= len(sequence) else 0))
    return pairs


@dataclass(frozen=True)
class ShardedMicroBatch:
    """A micro-batch that a group holds together, as one of its processes sees it.

    Attributes:
        local: the process's part, which the model gets here: its tokens (input_ids, position_ids [1, t]) and
            loss tokens (labels, and predicted_from, counted from the process's first token). Everything else
            is that of the whole pack: `packing`, with the share in it, `predicting`, and what unpacks
            results.
        share: which tokens each process has.
        loss_counts: [P], distinct loss tokens of each process.
    """

    local: PackedMicroBatch
    share: TokenShare
    loss_counts: tuple[int, ...]

    def gather(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather results for the process's own loss tokens, each [u], to results for all, each [U].

        The gathering is differentiable.
        """
        rows = torch.stack(list(outputs), dim=1)
        gathered = gather_rows(rows, self.loss_counts, self.share.group)
        return tuple(column.contiguous() for column in gathered.unbind(1))


def shard_micro_batch(micro_batch: PackedMicroBatch, group: dist.ProcessGroup) -> ShardedMicroBatch:
    """Return this process's share of a micro-batch, which must be the same on all processes of the group."""
    share = TokenShare.even(micro_batch.input_ids.shape[1], group)
    tokens = slice(share.start, share.stop)
    ends = torch.tensor(share.counts).cumsum(0).to(micro_batch.predicted_from)
    num_before = torch.searchsorted(micro_batch.predicted_from, ends).tolist()  # predicted_from is ascending
    loss_counts = tuple(end - start for start, end in zip([0, *num_before], num_before, strict=False))
    first = sum(loss_counts[: share.rank])
    loss = slice(first, first + loss_counts[share.rank])
    own_part = replace(
        micro_batch,
        input_ids=micro_batch.input_ids[:, tokens],
        position_ids=micro_batch.position_ids[:, tokens],
        packing=replace(micro_batch.packing, share=share),
        predicted_from=micro_batch.predicted_from[loss] - share.start,
        labels=micro_batch.labels[loss],
    )
    return ShardedMicroBatch(own_part, share, loss_counts)

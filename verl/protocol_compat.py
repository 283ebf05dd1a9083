"""What verl's users call on batches beside the core of `DataProto`; `verl.protocol` hands all of it on.

`DataProto` inherits `VerlBatchMethods`. The functions take and return whatever batch class they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.columns import BatchError, same


class DataProtoConfig:
    """verl's switch for padding in dispatch. Worker groups here always pad, so it changes nothing."""

    auto_padding: bool = False


class VerlBatchMethods:
    """Methods of verl's DataProto that a training step of this project does not need."""

    def is_padding_enabled(self) -> bool:
        """True: worker groups pad each batch to a multiple of their size and take the padding off again."""
        return True

    def padding(self: Any, padding_size: int, padding_candidate: str = "") -> None:
        """Appends `padding_size` copies of a row in place: of the first, or with "last" of the last one."""
        num_rows = len(self)
        source = num_rows - 1 if padding_candidate == "last" else 0
        padded = self[[*range(num_rows), *[source] * padding_size]]
        self.batch = padded.batch
        self.non_tensor_batch = padded.non_tensor_batch

    def make_iterator(
        self: Any, mini_batch_size: int, epochs: int, seed: int | None = None, shuffle: bool = False
    ) -> Iterator[Any]:
        """Mini-batches of exactly `mini_batch_size` rows, `epochs` times over all rows.

        With `shuffle` each epoch has its own order, drawn from `seed` alone.
        """
        num_rows = len(self)
        if mini_batch_size < 1 or num_rows % mini_batch_size:
            raise ValueError(f"{num_rows} rows cannot be cut into mini-batches of {mini_batch_size}")
        if shuffle and seed is None:
            raise ValueError("shuffle=True needs a seed: no order comes from global random state")
        generator = torch.Generator().manual_seed(seed or 0)
        for _ in range(epochs):
            order = torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)
            yield from (self[rows] for rows in order.split(mini_batch_size))

    def reorder(self: Any, indices: torch.Tensor) -> None:
        """Puts the rows in the order `indices` [N] int64, in place."""
        moved = self[indices]
        self.batch = moved.batch
        self.non_tensor_batch = moved.non_tensor_batch

    def rename(self: Any, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Any:
        """Renames tensors in place; returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old names {old} but {len(new)} new names {new}")
        self.select(old, [], [])  # ValueError for names that are not there
        names = dict(zip(old, new, strict=True))
        columns = {names.get(key, key): value for key, value in self._tensors().items()}
        if len(columns) < len(self._tensors()):
            raise ValueError(f"renaming {old} to {new} overwrites one of {list(self._tensors())}")
        if columns:
            self.batch = TensorDict(columns, batch_size=[len(self)])
        return self

    def sample_level_repeat(self: Any, repeat_times: Sequence[int] | torch.Tensor) -> Any:
        """Row i `repeat_times[i]` times, copies side by side; `repeat_times` has N entries of at least 0."""
        times = torch.as_tensor(repeat_times)
        if len(times) != len(self):
            raise BatchError(f"repeat_times has {len(times)} entries for {len(self)} rows")
        return self[torch.arange(len(times)).repeat_interleave(times)]


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the second's columns to the first, in place. BatchError if a common name holds other values."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            f"two TensorDicts with batch sizes {tuple(tensor_dict1.batch_size)} and "
            f"{tuple(tensor_dict2.batch_size)} cannot be joined; they must be the same"
        )
    for key, value in tensor_dict2.items():
        if key in tensor_dict1.keys():  # noqa: SIM118  a TensorDict refuses `in`
            _check_same(key, tensor_dict1[key], value)
        tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray], tensor_dict2: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """As `union_tensor_dict` for arrays; NaN equals NaN."""
    for key, value in tensor_dict2.items():
        if key in tensor_dict1:
            _check_same(key, tensor_dict1[key], value)
        tensor_dict1[key] = value
    return tensor_dict1


def _check_same(key: str, one: Any, other: Any) -> None:
    if not same(one, other):
        raise BatchError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object.")


def fold_batch_dim(data: Any, new_batch_size: int) -> Any:
    """[B, ...] -> [new_batch_size, B / new_batch_size, ...] in every column; B must be a multiple."""
    num_rows = len(data)
    if new_batch_size < 1 or num_rows % new_batch_size:
        raise BatchError(f"{num_rows} rows do not fold into {new_batch_size} of equal size")
    shape = (new_batch_size, num_rows // new_batch_size)
    return _reshaped(data, new_batch_size, lambda value: value.reshape(*shape, *value.shape[1:]))


def unfold_batch_dim(data: Any, batch_dims: int = 2) -> Any:
    """[A, B, ...] -> [A * B, ...] for the first `batch_dims` dimensions of every column: undoes folding."""
    sizes = {tuple(value.shape[:batch_dims]) for value in data.batch.values()}
    if len(sizes) != 1:
        raise BatchError(f"the first {batch_dims} dimensions of the columns differ: {sorted(sizes)}")
    return _reshaped(
        data, int(np.prod(sizes.pop())), lambda value: value.reshape(-1, *value.shape[batch_dims:])
    )


def _reshaped(data: Any, num_rows: int, reshape: Any) -> Any:
    tensors = {key: reshape(value) for key, value in data.batch.items()}
    objects = {key: reshape(value) for key, value in data.non_tensor_batch.items()}
    return type(data)(TensorDict(tensors, batch_size=[num_rows]), objects, dict(data.meta_info))


def pad_dataproto_to_divisor(data: Any, size_divisor: int) -> tuple[Any, int]:
    """Repeats rows from the start until the number of rows is a multiple of `size_divisor`.

    Returns (padded batch, number of rows added). In the added rows `response_mask`, if there is one, is 0,
    so that they weigh nothing in any loss. Without need for padding the batch itself comes back.
    """
    if size_divisor < 1:
        raise ValueError(f"size_divisor is {size_divisor}; it must be at least 1")
    num_padding = -len(data) % size_divisor
    if num_padding == 0:
        return data, 0
    padded = data.select_idxs(torch.arange(len(data) + num_padding) % len(data))
    if padded.batch is not None and "response_mask" in padded.batch:
        padded.batch["response_mask"][len(data) :] = 0
    return padded, num_padding


def unpad_dataproto(data: Any, pad_size: int) -> Any:
    """Takes off the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data

"""Methods and functions of verl's batches beside the core of `DataProto`; `verl.protocol` exports them all.

`DataProto` inherits `VerlBatchMethods`. The functions take and return any batch class that they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.columns import BatchError, deep_equal


class DataProtoConfig:
    """The switch of verl for padding in dispatch; worker groups here always pad, so it has no effect."""

    auto_padding: bool = False


class VerlBatchMethods:
    """The methods of verl's DataProto that a training step of this project does not need."""

    def is_padding_enabled(self) -> bool:
        """Return True.

        Worker groups pad each batch to a multiple of their size, and take the padding off again.
        """
        return True

    def padding(self: Any, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the first row in place, or with "last" of the last row."""
        num_rows = len(self)
        source = num_rows - 1 if padding_candidate == "last" else 0
        padded = self[[*range(num_rows), *[source] * padding_size]]
        self.batch = padded.batch
        self.non_tensor_batch = padded.non_tensor_batch

    def make_iterator(
        self: Any,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        shuffle: bool = False,
    ) -> Iterator[Any]:
        """Yield mini-batches of exactly `mini_batch_size` rows, `epochs` times over all rows.

        With `shuffle` each epoch has its own order, drawn from `seed` alone. verl writes it as
        dataloader_kwargs={"shuffle": True}; nothing else of a DataLoader is there.
        """
        settings = dict(dataloader_kwargs or {})
        shuffle = bool(settings.pop("shuffle", shuffle))
        if settings:
            raise ValueError(f"dataloader_kwargs: found {sorted(settings)}, expected shuffle or nothing.")
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
        """Put the rows in the order `indices` [N] int64, in place."""
        moved = self[indices]
        self.batch = moved.batch
        self.non_tensor_batch = moved.non_tensor_batch

    def rename(self: Any, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Any:
        """Rename tensors in place; return self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old names {old} but {len(new)} new names {new}")
        self.select(old, [], [])  # raises ValueError for names that are not there
        names = dict(zip(old, new, strict=True))
        columns = {names.get(key, key): value for key, value in self._tensors().items()}
        if len(columns) < len(self._tensors()):
            raise ValueError(f"renaming {old} to {new} overwrites one of {list(self._tensors())}")
        if columns:
            self.batch = TensorDict(columns, batch_size=[len(self)])
        return self

    def sample_level_repeat(self: Any, repeat_times: Sequence[int] | torch.Tensor) -> Any:
        """Return row i `repeat_times[i]` times, with its copies side by side.

        `repeat_times` has N entries of at least 0.
        """
        times = torch.as_tensor(repeat_times)
        if len(times) != len(self):
            raise BatchError(f"repeat_times has {len(times)} entries for {len(self)} rows")
        return self[torch.arange(len(times)).repeat_interleave(times)]


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the second's columns to the first, in place; return the first.

    Raises BatchError if a common name holds different values.
    """
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
    """Add the second's arrays to the first as `union_tensor_dict` adds tensors; NaN equals NaN."""
    for key, value in tensor_dict2.items():
        if key in tensor_dict1:
            _check_same(key, tensor_dict1[key], value)
        tensor_dict1[key] = value
    return tensor_dict1


def _check_same(key: str, one: Any, other: Any) -> None:
    if not deep_equal(one, other):
        raise BatchError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object.")


def fold_batch_dim(data: Any, new_batch_size: int) -> Any:
    """Fold [B, ...] into [new_batch_size, B / new_batch_size, ...] in every column.

    B must be a multiple of `new_batch_size`.
    """
    num_rows = len(data)
    if new_batch_size < 1 or num_rows % new_batch_size:
        raise BatchError(f"{num_rows} rows do not fold into {new_batch_size} of equal size")
    shape = (new_batch_size, num_rows // new_batch_size)
    return _reshaped(data, new_batch_size, lambda value: value.reshape(*shape, *value.shape[1:]))


def unfold_batch_dim(data: Any, batch_dims: int = 2) -> Any:
    """Undo folding: [A, B, ...] becomes [A * B, ...] in every column.

    The first `batch_dims` dimensions are joined.
    """
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
    """Repeat rows from the start until the number of rows is a multiple of `size_divisor`.

    In the added rows `response_mask`, if there is one, is 0, so that they weigh nothing in any loss. If no
    padding is needed, the batch itself comes back.

    Returns:
        The padded batch, and the number of rows that were added.
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
    """Return the batch without its last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data

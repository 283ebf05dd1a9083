"""DataProto, the batch that every part of a training step takes and returns.

A row is one trajectory. Tensors live in `batch`, any other value of a row in `non_tensor_batch` (one object
per row), and what belongs to the whole batch in `meta_info`. A step adds columns to the same rows: the agent
makes the first ones, the workers add log-probs and values, and the trainer adds rewards and advantages.

Table of batch keys (N rows, P prompt width, R response width)

    input of generation
      sampling_seeds      [N]      int64    seed of each row's random stream
    made by generation
      prompts             [N, P]   int64    left padded
      responses           [N, R]   int64    right padded; all that follows the prompt, observations too
      input_ids           [N, P+R] int64    prompts and responses side by side
      attention_mask      [N, P+R] int64    1 = real token; the only way padding is known
      position_ids        [N, P+R] int64    counts real tokens from 0, anew in each context; 0 on left padding
      response_mask       [N, R]   int64    1 = the policy sampled this token; 0 = observation or padding
      rollout_log_probs   [N, R]   float32  under the distribution sampled from; 0 where response_mask is 0
    made in training; entry t belongs to responses[:, t]
      old_log_probs       [N, R]   float32  (nats) the policy before this step's updates
      ref_log_prob        [N, R]   float32  (nats) the reference policy
      values              [N, R]   float32  value of the state before the token
      token_level_scores  [N, R]   float32  the reward, on the last sampled token
      token_level_rewards [N, R]   float32  scores less the KL penalty, if it is put into the reward
      advantages, returns [N, R]   float32
      teacher_log_prob    [N, R]   float32  (nats) the teacher (distillation)
      sum_pi_squared      [N, R]   float32  sum over the vocabulary of the squared probabilities (old policy)
      num_sampled         [N]      int64    tokens that the policy sampled
      prompt_length       [N]      int64    real tokens of the prompt
      response_length     [N]      int64    real tokens of the response, observations too
      outcome             [N]      float32  the row's score: token_level_scores summed
      reward_baselines    [N]      float32  score of the greedy trajectory of the row's prompt (remax)
      rollout_is_weights  [N, R]   float32  weights of the policy loss (rollout correction)
      rejected_mask       [N, R]   bool     tokens that leave response_mask after the advantages
      sampled_mask        [N, R]   int64    what response_mask was before that
      stale_mask          [N, R]   bool     older than max_staleness, not trained (too_old=mask)
      observation_mask    [N, R]   int64    1 = a token of the response that the policy read (echo)
      turn_ids            [N, R]   int64    the turn that sampled the token, else -1 (rollout.step_wise)
      prompt_tokens       [N]      int64    sampled tokens of the row's uid in its mini-batch (prompt-mean)
      prompt_rows         [N]      int64    rows of the uid with a sampled token there (prompt-mean)
    non_tensor_batch, one object per row
      raw_prompt_ids list[int] (input of generation) | uid str | data_source str | reward_model dict |
      extra_info dict | index int (row of the data set) | trajectory dict (turns, searches, how it ended) |
      em, f1 float (exact match, token F1) | reward_extra dict (all that the reward function returned) |
      continuation dict or None (input of generation: what a trajectory has that goes on from a checkpoint)
    meta_info
      solved_share float (with algorithm.thrift: of all rows that the step generated and that may search)

Worked example: the prompt is [5, 6], the policy writes [7, 8], the search engine's answer is [9], and the
policy ends with [2]. P = 3 and R = 5.

    prompts        [[0, 5, 6]]              responses      [[7, 8, 9, 2, 0]]
    attention_mask [[0, 1, 1, 1, 1, 1, 1, 0]]
    position_ids   [[0, 0, 1, 2, 3, 4, 5, 6]]   (whatever stands on padding is never read)
    response_mask  [[1, 1, 0, 1, 0]]        token_level_scores [[0, 0, 0, 1.0, 0]]
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.protocol_compat import (
    DataProtoConfig,
    VerlBatchMethods,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.utils.columns import (
    BatchError,
    deep_equal,
    from_array,
    list_of_dict_to_dict_of_list,
    merged_meta_info,
    object_array,
    to_array,
)

__all__ = [
    "BatchError",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "object_array",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

Index = slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def _choose(columns: dict[str, Any], keys: Sequence[str] | None, what: str) -> dict[str, Any]:
    if keys is None:
        return dict(columns)
    missing = [key for key in keys if key not in columns]
    if missing:
        raise ValueError(f"no {what} called {missing}; the batch has {sorted(columns)}")
    return {key: columns[key] for key in keys}


@dataclass
class DataProtoItem:
    """One row of a batch.

    `batch` is a TensorDict without a batch dimension, and `non_tensor_batch` maps names to values.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto(VerlBatchMethods):
    """Rows of tensors and objects plus `meta_info`; see the table of keys above.

    `batch` has one batch dimension, the rows. Every array in `non_tensor_batch` is a 1-D object array with as
    many entries; lists and other arrays are turned into one. Columns of different lengths raise ValueError.

    Operations return new containers over the same tensors where torch can do that: slices and selections of
    keys are views, while picking, repeating and joining rows copies. `union`, `rename`, `reorder`, `to` and
    `pop` change the object on which they are called, as in verl.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise ValueError(f"batch_size is {tuple(self.batch.batch_size)}; it must be (number of rows,)")
        columns = self.non_tensor_batch or {}
        self.non_tensor_batch = {key: object_array(value) for key, value in columns.items()}
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise ValueError if the columns differ in their number of rows."""
        lengths = {key: len(value) for key, value in self.non_tensor_batch.items()}
        if self.batch is not None:
            lengths["batch"] = self.batch.batch_size[0]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in their number of rows: {lengths}")

    @property
    def tensors(self) -> TensorDict:
        """Return `batch`, for code that cannot do without it.

        Raises ValueError if there is none.
        """
        if self.batch is None:
            raise ValueError(f"this batch has no tensors, only the columns {sorted(self.non_tensor_batch)}")
        return self.batch

    def _tensors(self) -> dict[str, torch.Tensor]:
        columns: dict[str, Any] = {} if self.batch is None else dict(self.batch.items())
        return columns

    # ---- making

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Make a batch from tensors of shape [N, ...] and sequences of N objects.

        Args:
            tensors: the columns of `batch`.
            non_tensors: the columns of `non_tensor_batch`.
            meta_info: what belongs to the whole batch.
            num_batch_dims: can only be 1.
            auto_padding: has no effect (`DataProtoConfig`).
        """
        if num_batch_dims != 1:
            raise BatchError(f"num_batch_dims is {num_batch_dims}; a batch has one dimension, its rows")
        batch = None
        if tensors:
            wrong = [key for key, value in tensors.items() if not isinstance(value, torch.Tensor)]
            if wrong:
                raise ValueError(f"{wrong} are no torch tensors; pass columns of other things as non_tensors")
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            if () in shapes.values() or len({shape[0] for shape in shapes.values()}) > 1:
                raise ValueError(f"tensors differ in their number of rows (first dimension): {shapes}")
            batch = TensorDict(dict(tensors), batch_size=[next(iter(shapes.values()))[0]])
        return cls(batch, dict(non_tensors or {}), dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Make a batch from one mapping: tensors go to `batch`, arrays and lists to `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, objects, meta_info)

    # ---- reading rows

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(value) for value in self.non_tensor_batch.values()), 0)

    def __getitem__(self, index: int | Index) -> Any:
        """Return a DataProtoItem for an int; a DataProto for a slice, a list of positions or a mask."""
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a batch with {len(self)} rows")
            row = None if self.batch is None else self.batch[int(index)]
            return DataProtoItem(row, {k: v[index] for k, v in self.non_tensor_batch.items()}, self.meta_info)
        if isinstance(index, slice):
            batch = None if self.batch is None else self.batch[index]
            objects = {key: value[index] for key, value in self.non_tensor_batch.items()}
            return DataProto(batch, objects, dict(self.meta_info))
        return self.select_idxs(index)

    def select_idxs(self, idxs: Index) -> DataProto:
        """Return copies of the rows at these positions, in the order given.

        A mask of N booleans picks the rows where it is true.
        """
        rows = torch.arange(len(self))
        index = idxs if isinstance(idxs, slice) else torch.as_tensor(idxs).cpu()
        positions = rows[index if isinstance(index, slice) or index.dtype == torch.bool else index.long()]
        batch = None
        if self.batch is not None:
            columns = {key: value[positions.to(value.device)] for key, value in self._tensors().items()}
            batch = TensorDict(columns, batch_size=[len(positions)])
        objects = {key: value[positions.numpy()] for key, value in self.non_tensor_batch.items()}
        return DataProto(batch, objects, dict(self.meta_info))

    # ---- choosing columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a new DataProto with the named columns, which it shares with this one unless `deepcopy`.

        None stands for all columns of a kind.
        """
        tensors = _choose(self._tensors(), batch_keys, "tensor")
        objects = _choose(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column")
        meta_info = _choose(self.meta_info, meta_info_keys, "meta_info entry")
        if deepcopy:
            tensors, objects, meta_info = copy.deepcopy((tensors, objects, meta_info))
        batch = None if self.batch is None else TensorDict(tensors, batch_size=[len(self)])
        return DataProto(batch, objects, meta_info)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Take the named columns out of this batch, and return them as a new one."""
        popped = self.select(list(batch_keys), list(non_tensor_batch_keys), list(meta_info_keys))
        if self.batch is not None:
            rest = {key: value for key, value in self._tensors().items() if key not in set(batch_keys)}
            self.batch = TensorDict(rest, batch_size=self.batch.batch_size)
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        for key in meta_info_keys:
            del self.meta_info[key]
        return popped

    def union(self, other: DataProto) -> DataProto:
        """Add the other's columns to this batch, in place; return self.

        Raises ValueError, and changes nothing, if a name that both have does not have the same content in
        both.
        """
        if len(self) and len(other) and len(self) != len(other):
            raise ValueError(f"cannot join the columns of {len(self)} rows and of {len(other)} rows")
        own_tensors = self._tensors()
        other_tensors = other._tensors()
        kinds = (
            (own_tensors, other_tensors),
            (self.non_tensor_batch, other.non_tensor_batch),
            (self.meta_info, other.meta_info),
        )
        for a, b in kinds:
            for key in a.keys() & b.keys():
                if not deep_equal(a[key], b[key]):
                    raise BatchError(f"{key!r} differs in the two batches; rename or pop one of them")
        if other_tensors:
            self.batch = TensorDict({**own_tensors, **other_tensors}, batch_size=[len(other)])
        self.non_tensor_batch = {**self.non_tensor_batch, **other.non_tensor_batch}
        self.meta_info = {**self.meta_info, **other.meta_info}
        self.check_consistency()
        return self

    # ---- changing rows

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return each row `repeat_times` times: a a b b with `interleave`, otherwise a b a b."""
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)]

    def split(self, split_size: int) -> list[DataProto]:
        """Return consecutive pieces of `split_size` rows (the last may be shorter), views of this batch."""
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; at least 1 row is needed")
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Return `chunks` consecutive pieces of equal size, views of this batch."""
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"{len(self)} rows do not make {chunks} equal chunks; use pad_dataproto_to_divisor"
            )
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Return the rows of all parts, in order; the parts must have the same columns and widths.

        In `meta_info["metrics"]` a number becomes the mean over the parts that have it, and lists are joined.
        Lists of dicts, as verl's workers return them, become one dict of lists. Every other meta_info entry
        must be the same in all parts that have it.
        """
        if not data:
            raise ValueError("cannot concat an empty list of batches")
        tensors = [part._tensors() for part in data]
        objects = [part.non_tensor_batch for part in data]
        for i, names in enumerate([*a, *b] for a, b in zip(tensors, objects, strict=True)):
            if set(names) != {*tensors[0], *objects[0]}:
                first = sorted([*tensors[0], *objects[0]])
                raise ValueError(f"part 0 has columns {first}, part {i} has {sorted(names)}")
        joined = {}
        for key in tensors[0]:
            columns = [part[key] for part in tensors]
            shapes = [tuple(column.shape) for column in columns]
            if len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"tensor {key!r} has shapes {shapes}; all but the first dimension must agree"
                )
            joined[key] = torch.cat(columns)
        batch = TensorDict(joined, batch_size=[sum(map(len, data))]) if data[0].batch is not None else None
        arrays = {key: np.concatenate([part[key] for part in objects]) for key in objects[0]}
        return DataProto(batch, arrays, merged_meta_info([part.meta_info for part in data]))

    def to(self, device: torch.device | str) -> DataProto:
        """Move the tensors to a device, in place; return self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- disk and wire

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write a pickle that `load_from_disk` reads."""
        with open(filepath, "wb") as file:
            pickle.dump(self, file, protocol=5)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read what `save_to_disk` wrote; tensors come to the CPU.

        The file is a pickle: load only files that you trust.
        """
        with open(filepath, "rb") as file:
            data = pickle.load(file)
        if not isinstance(data, DataProto):
            raise ValueError(f"{filepath} holds a {type(data).__name__}, not a DataProto")
        return data

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with tensors as numpy arrays.

        Pickle protocol 5 hands these to Ray's object store without copying.
        """
        tensors = None
        if self.batch is not None:
            tensors = {key: to_array(key, value) for key, value in self.batch.items()}
        columns = {"non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        return {"tensors": tensors, "num_rows": len(self), **columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None
        if state["tensors"] is not None:
            tensors = {key: from_array(*stored) for key, stored in state["tensors"].items()}
            self.batch = TensorDict(tensors, batch_size=[state["num_rows"]])
        self.non_tensor_batch = state["non_tensor_batch"]
        self.meta_info = state["meta_info"]


@dataclass
class DataProtoFuture:
    """The result of a call that may still run (`register(blocking=False)`); `get()` waits for it.

    A future that is passed to another group's method is resolved in the process that needs it, not on the
    driver.

    Attributes:
        futures: one handle per rank.
        resolve: turns the handles into their values; raises what the call raised.
        collect: joins the values of the ranks.
        part: (chunk, of how many) of the whole; None for the whole.
    """

    futures: list[Any]
    resolve: Callable[[list[Any]], list[Any]]
    collect: Callable[[list[Any]], Any]
    part: tuple[int, int] | None = None

    def get(self) -> Any:
        """Return the value that the call would have returned with `blocking=True`."""
        value = self.collect(self.resolve(self.futures))
        return value if self.part is None else value.chunk(self.part[1])[self.part[0]]

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return futures of equal chunks; the number of rows must be a multiple of `chunks`."""
        if self.part is not None:
            raise ValueError("this future is already a chunk of another one; chunk the result of get()")
        return [replace(self, part=(index, chunks)) for index in range(chunks)]

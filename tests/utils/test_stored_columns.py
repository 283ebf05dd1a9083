"""Columns that lie elsewhere: nothing is lost, and every operation does to them what it does to tensors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto, pad_dataproto_to_divisor
from verl.utils.stored_columns import PackedColumn, Rows, StoredColumns, pack

DTYPES = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16]


def stored_batch(batch: DataProto) -> DataProto:
    """The batch with its columns over tokens packed in a piece, as a worker's result comes to the driver."""
    columns = {name: batch.tensors[name] for name in batch.widths}
    rest = batch.select([name for name in batch.tensors.keys() if name not in columns])  # noqa: SIM118
    rest.stored = StoredColumns.of(pack(columns), batch.widths, len(batch))
    return rest


def here(batch: DataProto) -> dict[str, torch.Tensor]:
    """All tensors of a batch, fetched where they are stored."""
    stored = {} if batch.stored is None else batch.stored.needed().tensors()
    return dict(batch.tensors.items()) | stored


def assert_same(stored: DataProto, plain: DataProto) -> None:
    found, expected = here(stored), dict(plain.tensors.items())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert stored.non_tensor_batch["uid"].tolist() == plain.non_tensor_batch["uid"].tolist()


def make_batch(num_rows: int, seed: int = 0) -> DataProto:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (num_rows,), generator=draw)
    real = (torch.arange(8)[None] >= 1) & (torch.arange(8)[None] < 1 + lengths[:, None])
    ids = torch.randint(1, 70_000, (num_rows, 8), generator=draw) * real
    tensors = {
        "input_ids": ids,
        "responses": ids[:, 3:].contiguous(),
        "response_mask": real[:, 3:].long(),
        "log_probs": torch.randn(num_rows, 5, generator=draw) * real[:, 3:],
        "number": torch.arange(num_rows) + 100 * seed,
    }
    return DataProto.from_dict(tensors, {"uid": [f"{seed}-{i}" for i in range(num_rows)]})


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.lists(st.integers(-3, 300), min_size=5, max_size=5), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    left=st.integers(0, 3),
    right=st.integers(0, 3),
    fill=st.sampled_from([0, 1, -1, 151_643]),
)
def test_a_packed_tensor_comes_back_bit_for_bit_whatever_its_padding(rows, dtype, left, right, fill):
    tensor = torch.nn.functional.pad(torch.tensor(rows), (left, right), value=fill).to(dtype)
    packed = PackedColumn.of(tensor)
    out = np.zeros(tensor.shape, packed.wide)
    packed.write(out, slice(None), slice(None), 0)
    assert torch.equal(torch.from_numpy(out).view(dtype).view(torch.uint8), tensor.view(torch.uint8))


def test_padding_and_wide_integers_are_not_shipped():
    ids = torch.full((4, 1000), 151_643)
    ids[:, 300:310] = torch.arange(40).view(4, 10)
    assert PackedColumn.of(ids).array.nbytes == 40


@pytest.mark.parametrize("value", [float("nan"), -0.0, float("inf")])
def test_odd_numbers_in_the_padding_are_kept(value):
    tensor = torch.full((2, 3), value)
    packed = pickle.loads(pickle.dumps(PackedColumn.of(tensor)))
    out = np.zeros((2, 3), np.float32)
    packed.write(out, slice(None), np.array([1, 0]), 0)
    assert torch.from_numpy(out).view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


OPERATIONS = {
    "order": lambda batch, n: batch.select_idxs(np.random.default_rng(n).permutation(len(batch))),
    "some": lambda batch, n: batch.select_idxs(np.arange(len(batch)) % 3 != n % 3),
    "slice": lambda batch, n: batch[n % 3 :],
    "twice": lambda batch, n: batch.repeat(2),
    "joined": lambda batch, n: DataProto.concat([batch, batch[: n + 1]]),
    "chunk": lambda batch, n: pad_dataproto_to_divisor(batch, 2)[0].chunk(2)[n % 2],
    "cut": lambda batch, n: batch.narrowed({"input_ids": (1, batch.widths["input_ids"])}),
}


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 5)), max_size=5))
def test_every_operation_does_to_stored_columns_what_it_does_to_tensors(steps):
    parts = [make_batch(3), make_batch(4, seed=1)]
    plain, stored = DataProto.concat(parts), DataProto.concat([stored_batch(part) for part in parts])
    for name, number in steps:
        if len(plain) > 3 and not (name == "cut" and plain.widths["input_ids"] < 3):
            plain, stored = OPERATIONS[name](plain, number), OPERATIONS[name](stored, number)
    assert_same(stored, plain)


def test_columns_of_another_call_stand_beside_and_are_chosen_and_taken_out():
    plain = make_batch(5)
    stored = stored_batch(plain).select_idxs([4, 2, 0])
    plain = plain.select_idxs([4, 2, 0])
    values = DataProto.from_dict({"values": torch.rand(3, 5)}, {"uid": plain.non_tensor_batch["uid"]})
    stored.union(stored_batch(values))
    assert_same(stored, plain.select().union(values))
    assert_same(stored.select(["values", "number"]), plain.select(["number"]).union(values))
    stored.pop(["values"])
    assert_same(stored, plain)


def test_a_name_that_two_batches_have_must_mean_the_same_rows():
    batch = stored_batch(make_batch(4))
    batch.union(batch.select())
    with pytest.raises(ValueError, match="'input_ids' differs"):
        batch.union(stored_batch(make_batch(4)).select(["input_ids"]))
    with pytest.raises(ValueError, match="no tensor called"):
        batch.select(["nothing"])


def test_only_the_pieces_that_hold_a_row_are_asked_for():
    batch = DataProto.concat([stored_batch(make_batch(3, seed)) for seed in range(4)])
    pieces = batch.select_idxs([10, 4]).stored.needed().columns["input_ids"].rows.pieces  # type: ignore[union-attr]
    assert len(pieces) == 2
    assert torch.equal(
        here(batch.select_idxs([10, 4]))["input_ids"],
        torch.stack([make_batch(3, 3).tensors["input_ids"][1], make_batch(3, 1).tensors["input_ids"][1]]),
    )


def test_columns_of_the_same_rows_share_them_also_on_the_wire():
    batch = stored_batch(make_batch(4)).select_idxs([3, 1])
    assert batch.stored is not None
    sent = pickle.loads(pickle.dumps(batch.stored.with_contents(lambda content: 0)))
    rows: list[Rows] = [column.rows for column in sent.columns.values()]
    assert all(row is rows[0] for row in rows)

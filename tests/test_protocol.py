"""DataProto: what verl's users rely on, and clear errors for what cannot be."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import (
    DataProto,
    DataProtoFuture,
    object_array,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


def batch_of(num_rows: int) -> DataProto:
    tensors = {"x": torch.arange(num_rows), "wide": torch.arange(2.0 * num_rows).view(num_rows, 2)}
    return DataProto.from_dict(tensors, {"ids": [[i, i] for i in range(num_rows)]}, {"step": 3})


def rows_of(data: DataProto) -> list[int]:
    assert [ids[0] for ids in data.non_tensor_batch["ids"]] == data.batch["x"].tolist()
    assert data.batch["wide"][:, 0].tolist() == [2.0 * x for x in data.batch["x"].tolist()]
    return data.batch["x"].tolist()


# ---- columns of objects


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [{"a": 1}, {"a": 2}],
        ["one", "two"],
        [np.zeros(2), np.zeros(2)],
        [[[1], [2]], [[3], [4]]],
        [None, 5],
    ],
)
def test_each_row_of_an_object_column_stays_the_object_it_was(values):
    column = DataProto.from_dict(non_tensors={"c": values}).non_tensor_batch["c"]
    assert column.shape == (2,) and column.dtype == object
    assert all(got is given_value for got, given_value in zip(column, values, strict=True))


def test_numeric_arrays_become_columns_of_python_values():
    column = object_array(np.array([[1, 2], [3, 4]]))
    assert column.shape == (2,) and column.tolist() == [[1, 2], [3, 4]]
    assert type(object_array(np.array([1, 2]))[0]) is int


def test_lists_of_equal_length_do_not_collapse_when_rows_are_picked_joined_or_shipped():
    data = batch_of(4)
    for result in (
        data[[0, 1]],
        data.repeat(2),
        DataProto.concat([data, data]),
        pickle.loads(pickle.dumps(data)),
    ):
        column = result.non_tensor_batch["ids"]
        assert column.shape == (len(result),) and isinstance(column[0], list)


# ---- consistency


@pytest.mark.parametrize(
    ("tensors", "objects", "message"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, {}, r"'a': \(3,\), 'b': \(2,\)"),
        ({"a": torch.zeros(3)}, {"u": ["x"]}, "'u': 1, 'batch': 3"),
        ({"a": torch.tensor(1.0)}, {}, "first dimension"),
        ({"a": [1, 2]}, {}, "no torch tensors"),
        ({}, {"u": ["x"], "v": ["x", "y"]}, "'u': 1, 'v': 2"),
        ({"a": torch.zeros(3)}, {"u": "abc"}, "one value per row"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(tensors, objects, message):
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, objects)


def test_a_single_dict_is_sorted_into_tensors_and_objects():
    data = DataProto.from_single_dict(
        {"x": torch.zeros(2), "name": ["a", "b"], "n": np.array([1, 2])}, {"k": 0}
    )
    assert list(data.batch.keys()) == ["x"] and data.meta_info == {"k": 0}
    assert data.non_tensor_batch["n"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="one value per row"):
        DataProto.from_single_dict({"x": 3})


# ---- reading rows


def test_an_integer_gives_one_row_without_batch_dimension():
    row = batch_of(3)[-1]
    assert row.batch["wide"].tolist() == [4.0, 5.0]
    assert row.non_tensor_batch["ids"] == [2, 2] and row.meta_info == {"step": 3}
    with pytest.raises(IndexError, match="row 3 of a batch with 3 rows"):
        batch_of(3)[3]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0], [3, 0]),
        ([-1], [3]),
        ([], []),
        (np.array([1, 1]), [1, 1]),
        (torch.tensor([2]), [2]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, False, False]), [1]),
        (np.array([False] * 4), []),
    ],
)
def test_rows_are_picked_by_slice_positions_or_mask(index, expected):
    assert rows_of(batch_of(4)[index]) == expected
    assert rows_of(batch_of(4).select_idxs(index)) == expected


def test_slices_and_chunks_are_views_of_the_same_memory():
    data = batch_of(4)
    assert data[1:].batch["x"].data_ptr() == data.batch["x"][1:].data_ptr()
    assert data.chunk(2)[0].batch["x"].data_ptr() == data.batch["x"].data_ptr()


# ---- choosing columns


def test_select_shares_columns_and_deepcopy_does_not():
    data = batch_of(2)
    shared = data.select(["x"], [], [])
    assert list(shared.batch.keys()) == ["x"] and not shared.non_tensor_batch and not shared.meta_info
    shared.batch["x"][0] = 9
    copied = data.select(deepcopy=True)
    copied.batch["x"][1] = 9
    copied.non_tensor_batch["ids"][0].append(7)
    assert data.batch["x"].tolist() == [9, 1] and data.non_tensor_batch["ids"][0] == [0, 0]


def test_select_without_names_takes_everything_into_new_containers():
    data = batch_of(2)
    view = data.select()
    view.batch["new"] = torch.zeros(2)
    view.non_tensor_batch["new"] = object_array(["a", "b"])
    view.meta_info["new"] = 1
    assert "new" not in data.batch and "new" not in data.non_tensor_batch and "new" not in data.meta_info


@pytest.mark.parametrize("method", ["select", "pop"])
def test_unknown_columns_are_named(method):
    with pytest.raises(ValueError, match=r"no tensor called \['nope'\]; the batch has \['wide', 'x'\]"):
        getattr(batch_of(2), method)(batch_keys=["nope"])
    with pytest.raises(ValueError, match="no non-tensor column"):
        getattr(batch_of(2), method)(non_tensor_batch_keys=["nope"])
    with pytest.raises(ValueError, match="no meta_info entry"):
        getattr(batch_of(2), method)(meta_info_keys=["nope"])


def test_pop_moves_columns_to_a_new_batch():
    data = batch_of(2)
    taken = data.pop(["x"], ["ids"], ["step"])
    assert list(taken.batch.keys()) == ["x"] and taken.meta_info == {"step": 3} and len(taken) == 2
    assert list(data.batch.keys()) == ["wide"] and not data.non_tensor_batch and not data.meta_info
    data.pop(["wide"])
    assert len(data) == 2, "a batch without columns still knows its number of rows"


def test_rename_works_in_place_and_refuses_to_overwrite():
    data = batch_of(2)
    assert data.rename("x", "y") is data and set(data.batch.keys()) == {"y", "wide"}
    data.rename(["y", "wide"], ["wide", "y"])
    assert data.batch["wide"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="overwrites"):
        data.rename("y", "wide")
    with pytest.raises(ValueError, match="2 old names"):
        data.rename(["y", "wide"], "z")


# ---- union


def test_union_adds_columns_in_place():
    data = batch_of(2)
    other = DataProto.from_dict({"z": torch.ones(2), "x": torch.arange(2)}, {"u": ["a", "b"]}, {"more": 1})
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"x", "wide", "z"} and set(data.non_tensor_batch) == {"ids", "u"}
    assert data.meta_info == {"step": 3, "more": 1}


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"x": torch.tensor([0, 5])}),
        DataProto.from_dict({"x": torch.tensor([0.0, 1.0])}),
        DataProto.from_dict(non_tensors={"ids": [[0, 0], [1, 9]]}),
        DataProto.from_dict({"fresh": torch.zeros(2)}, meta_info={"step": 4}),
        DataProto.from_dict({"fresh": torch.zeros(3)}),
    ],
)
def test_union_refuses_columns_that_differ_and_then_changes_nothing(other):
    data = batch_of(2)
    with pytest.raises(ValueError, match="differs|cannot join"):
        data.union(other)
    assert rows_of(data) == [0, 1] and "fresh" not in data.batch and data.meta_info == {"step": 3}


def test_union_compares_by_content_and_takes_nan_for_nan():
    def made() -> DataProto:
        nested = [{"a": np.array([1, 2]), "b": [torch.ones(2), float("nan")]}]
        return DataProto.from_dict({"x": torch.tensor([[float("nan"), 1.0]])}, {"o": nested})

    assert len(made().union(made())) == 1


# ---- changing rows


def test_repeat_keeps_copies_together_or_apart():
    assert rows_of(batch_of(2).repeat(2, interleave=True)) == [0, 0, 1, 1]
    assert rows_of(batch_of(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


def test_chunk_wants_equal_pieces_and_split_takes_a_shorter_last_one():
    assert [rows_of(part) for part in batch_of(4).chunk(2)] == [[0, 1], [2, 3]]
    assert [rows_of(part) for part in batch_of(5).split(2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="5 rows do not make 2 equal chunks"):
        batch_of(5).chunk(2)
    with pytest.raises(ValueError, match="at least 1 row"):
        batch_of(5).split(0)


@given(num_rows=st.integers(1, 30), size=st.integers(1, 30))
def test_concat_undoes_split(num_rows, size):
    data = batch_of(num_rows)
    joined = DataProto.concat(data.split(size))
    assert rows_of(joined) == rows_of(data) and joined.meta_info == data.meta_info


def test_concat_names_the_column_that_does_not_fit():
    with pytest.raises(ValueError, match=r"'a' has shapes \[\(1, 2\), \(1, 3\)\]"):
        DataProto.concat([DataProto.from_dict({"a": torch.zeros(1, n)}) for n in (2, 3)])
    with pytest.raises(ValueError, match=r"part 0 has columns \['a'\], part 1 has \['b'\]"):
        DataProto.concat([DataProto.from_dict({key: torch.zeros(1)}) for key in "ab"])
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])


def test_concat_averages_figures_joins_lists_and_refuses_other_differences():
    parts = [DataProto(meta_info={"same": 1, "metrics": {"loss": n, "many": [n, n]}}) for n in (1.0, 2.0)]
    merged = DataProto.concat(parts).meta_info
    assert merged == {"same": 1, "metrics": {"loss": 1.5, "many": [1.0, 1.0, 2.0, 2.0]}}
    with pytest.raises(ValueError, match="meta_info key 'k': 0 and 1"):
        DataProto.concat([DataProto(meta_info={"k": n}) for n in (0, 1)])


def test_reorder_moves_all_columns():
    data = batch_of(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert rows_of(data) == [2, 0, 1]


def test_mini_batches_cover_every_row_once_an_epoch():
    parts = list(batch_of(6).make_iterator(2, epochs=2, seed=1, shuffle=True))
    epochs = [[x for part in parts[i : i + 3] for x in rows_of(part)] for i in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(6)) and epochs[0] != epochs[1]
    again = list(batch_of(6).make_iterator(2, epochs=2, seed=1, shuffle=True))
    assert [rows_of(part) for part in again] == [rows_of(part) for part in parts]
    assert [rows_of(part) for part in batch_of(4).make_iterator(2, epochs=1)] == [[0, 1], [2, 3]]


def test_mini_batches_that_do_not_divide_and_unseeded_orders_are_refused():
    with pytest.raises(ValueError, match="5 rows cannot be cut into mini-batches of 2"):
        next(batch_of(5).make_iterator(2, epochs=1))
    with pytest.raises(ValueError, match="needs a seed"):
        next(batch_of(4).make_iterator(2, epochs=1, shuffle=True))


# ---- padding


@given(num_rows=st.integers(1, 20), divisor=st.integers(1, 25))
def test_padding_reaches_the_divisor_with_rows_from_the_start_and_comes_off_again(num_rows, divisor):
    data = batch_of(num_rows)
    padded, num_padding = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and num_padding == len(padded) - num_rows < divisor
    assert rows_of(padded) == [i % num_rows for i in range(len(padded))]
    assert rows_of(unpad_dataproto(padded, num_padding)) == rows_of(data)


def test_padding_rows_are_masked_out_and_the_own_rows_are_not():
    mask = torch.ones(3, 2, dtype=torch.int64)
    data = DataProto.from_dict({"response_mask": mask})
    padded, _ = pad_dataproto_to_divisor(data, 5)
    assert padded.batch["response_mask"].sum(1).tolist() == [2, 2, 2, 0, 0]
    assert mask.sum() == 6


# ---- disk and wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_dtype_survive_pickling_and_stay_writable(dtype):
    data = DataProto.from_dict(
        {"x": torch.arange(6).view(2, 3).to(dtype)}, {"o": [{"a": [1]}, None]}, {"m": "k"}
    )
    back = pickle.loads(pickle.dumps(data, protocol=5))
    assert back.batch["x"].dtype == dtype and torch.equal(back.batch["x"], data.batch["x"])
    assert back.non_tensor_batch["o"].tolist() == [{"a": [1]}, None] and back.meta_info == {"m": "k"}
    back.batch["x"][0] = 0


def test_a_batch_without_rows_or_without_tensors_survives_pickling():
    for data in (
        DataProto(),
        DataProto.from_dict({"x": torch.zeros(0, 3)}),
        DataProto.from_dict({}, {"u": ["a"]}),
    ):
        back = pickle.loads(pickle.dumps(data))
        assert len(back) == len(data) and (back.batch is None) == (data.batch is None)


def test_a_saved_batch_loads_again(tmp_path):
    batch_of(3).save_to_disk(tmp_path / "batch.pkl")
    assert rows_of(DataProto.load_from_disk(tmp_path / "batch.pkl")) == [0, 1, 2]
    (tmp_path / "other.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="holds a list"):
        DataProto.load_from_disk(tmp_path / "other.pkl")


def test_to_moves_in_place_and_returns_the_batch():
    data = batch_of(2)
    assert data.to("meta") is data and data.batch["x"].device.type == "meta"
    assert DataProto().to("cpu").batch is None


# ---- futures


def test_a_future_resolves_collects_and_can_be_cut_into_chunks():
    halves = batch_of(4).chunk(2)
    future = DataProtoFuture([0, 1], lambda handles: [halves[h] for h in handles], DataProto.concat)
    assert rows_of(future.get()) == [0, 1, 2, 3]
    parts = future.chunk(4)
    assert [rows_of(part.get()) for part in parts] == [[0], [1], [2], [3]]
    with pytest.raises(ValueError, match="already a chunk"):
        parts[0].chunk(2)

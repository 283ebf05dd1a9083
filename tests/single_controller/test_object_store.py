"""What a call and a result leave in the object store, and how the rows come together again."""

from __future__ import annotations

import pytest
import torch

from verl.protocol import DataProto

store = pytest.importorskip("verl.single_controller.ray.object_store")


def result() -> DataProto:
    tensors = {"responses": torch.tensor([[5, 6], [7, 0]]), "num_sampled": torch.tensor([2, 1])}
    return DataProto.from_dict(tensors, {"uid": ["a", "b"]}, {"metrics": {"x": 1.0}})


def as_driver_has_it(reference: object) -> tuple[DataProto, dict]:
    small, columns = store.split(result())
    (batch,) = store.resolve_apart([(small, reference)], list)
    return batch, columns


def test_a_result_leaves_its_columns_over_tokens_behind():
    small, columns = store.split(result())
    assert list(columns) == ["responses"] and list(small.tensors.keys()) == ["num_sampled"]
    assert small.widths == {"responses": 2} and small.meta_info == {"metrics": {"x": 1.0}}


@pytest.mark.parametrize("value", ["text", DataProto(meta_info={"metrics": {}}), None])
def test_a_result_without_columns_over_tokens_is_what_it_was(value):
    assert store.split(value) == (value, None)


def test_a_call_takes_each_object_once_and_its_rows_are_tensors_in_the_process_that_runs_it():
    reference, other = object(), object()
    (first, columns), (second, more) = as_driver_has_it(reference), as_driver_has_it(other)
    both = DataProto.concat([first, second]).select_idxs([3, 0])
    call, references = store.detach(((both, "text", second), {"batch": first[1:]}))
    assert references == [reference, other]
    (rows, text, whole), named = store.attach(call, (columns, more))
    assert text == "text" and rows.stored is None and rows.non_tensor_batch["uid"].tolist() == ["b", "a"]
    assert rows.tensors["responses"].tolist() == [[7, 0], [5, 6]]
    assert rows.tensors["num_sampled"].tolist() == [1, 2]
    assert whole.tensors["responses"].tolist() == [[5, 6], [7, 0]]
    assert named["batch"].tensors["responses"].tolist() == [[7, 0]]


def test_an_object_without_a_row_in_the_call_is_not_asked_for():
    first, second = (as_driver_has_it(object())[0] for _ in range(2))
    _, references = store.detach(((DataProto.concat([first, second])[2:],), {}))
    assert len(references) == 1

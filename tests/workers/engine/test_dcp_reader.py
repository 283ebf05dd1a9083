"""Rule 15: reading a distributed checkpoint executes nothing, and reads no file outside of it."""

import os
import pickle
import pickletools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from verl.workers.engine.checkpoint import load_tensors, read_tensors, save_tensors, saved_tensors


@pytest.fixture
def folder(tmp_path):
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_tensors({"model": weights, "optimizer": {"step": torch.tensor(3.0)}}, tmp_path / "dcp")
    return tmp_path / "dcp"


def rewrite(folder, change):
    """Change the metadata as somebody does who can write into the folder."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_tensors_come_back(folder):
    assert {name: tuple(x.shape) for name, x in saved_tensors(folder).items()} == {
        "model.a": (2, 3),
        "model.b": (4,),
        "optimizer.step": (),
    }
    tensors = {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}}
    load_tensors(tensors, folder)
    assert torch.equal(tensors["model"]["a"], torch.arange(6.0).reshape(2, 3))
    loaded = dict(read_tensors(folder, saved_tensors(folder, "model."), "model."))
    assert torch.equal(loaded["b"], torch.ones(4, dtype=torch.bfloat16))


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("place", ["whole", "planner_data", "state_dict_metadata"])
def test_rule_15_a_metadata_that_calls_a_function_is_refused_and_calls_nothing(tmp_path, folder, place):
    attack = Attack(str(tmp_path / "executed"))
    if place == "whole":
        (folder / ".metadata").write_bytes(pickle.dumps(attack))
    else:
        rewrite(folder, lambda metadata: setattr(metadata, place, {"a": attack}))
    assert any(
        "mkdir" in str(argument) for _, argument, _ in pickletools.genops((folder / ".metadata").read_bytes())
    )
    for read in (saved_tensors, lambda path: load_tensors({"model": {"a": torch.zeros(2, 3)}}, path)):
        with pytest.raises((ValueError, dcp.api.CheckpointException), match=r"posix\.mkdir"):
            read(folder)
    assert not (tmp_path / "executed").exists()


def test_rule_15_an_entry_that_is_said_to_be_no_tensor_is_not_unpickled(tmp_path, folder):
    def change(metadata):
        metadata.state_dict_metadata["model.a"] = BytesStorageMetadata()
        index = next(index for index in metadata.storage_data if index.fqn == "model.a")
        info = metadata.storage_data[index]
        payload = pickle.dumps(Attack(str(tmp_path / "executed")))
        (folder / "attack").write_bytes(payload)
        info.relative_path = "attack"
        info.offset = 0
        info.length = len(payload)
        metadata.storage_data[type(index)("model.a")] = info

    rewrite(folder, change)
    with pytest.raises((ValueError, dcp.api.CheckpointException), match="is no tensor|only tensors"):
        load_tensors({"model": {"a": torch.zeros(2, 3)}}, folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd"])
def test_rule_15_a_file_outside_of_the_folder_is_not_read(folder, name):
    rewrite(
        folder, lambda metadata: [setattr(x, "relative_path", name) for x in metadata.storage_data.values()]
    )
    with pytest.raises(ValueError, match="outside of the folder"):
        saved_tensors(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps([1])])
def test_a_metadata_that_is_damaged_is_one_error_with_its_name(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata that can't be read"):
        saved_tensors(folder)

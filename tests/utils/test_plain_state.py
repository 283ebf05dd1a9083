"""Values in a file that is read without running anything come back as they were."""

import datetime
import decimal
import math
import os
import pickle

import numpy as np
import pytest
import torch

from verl.utils.plain_state import load_plain, save_plain


def test_values_come_back_with_their_types(tmp_path):
    objects = np.empty(2, dtype=object)
    objects[0] = ["a", ("b", None)]
    objects[1] = np.array([1.5, math.inf], np.float32)
    state = {
        "numbers": [1, 2**80, -0.0, 1e-320, True, None],
        "half an emoji": "\ud83d",
        "$": "a name that means something to the file",
        3: b"\x00\xff",
        ("a", 1): {1, 2},
        "times": [datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3), datetime.timedelta(1, 2)],
        "decimal": decimal.Decimal("1.10"),
        "scalars": [np.float64(0.1), np.int32(7), np.bool_(True), np.datetime64("2026-01-01")],
        "objects": objects,
    }
    save_plain(tmp_path / "state.npz", state)
    back = load_plain(tmp_path / "state.npz")
    for name in state.keys() - {"objects"}:
        assert back[name] == state[name] and type(back[name]) is type(state[name]), name
    assert [type(value) for value in back["scalars"]] == [type(value) for value in state["scalars"]]
    assert back["objects"].dtype == object and back["objects"][0] == ["a", ("b", None)]
    assert back["objects"][1].dtype == np.float32 and np.array_equal(back["objects"][1], objects[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_bit_by_bit(tmp_path, dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)[:, 1:]
    save_plain(tmp_path / "state.npz", [tensor, torch.empty(0, 2, dtype=dtype)])
    back, empty = load_plain(tmp_path / "state.npz")
    assert back.dtype == dtype and torch.equal(back, tensor) and empty.shape == (0, 2)


def test_what_is_not_plain_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"state\.a holds a pathlib\..*Path; expected plain data"):
        save_plain(tmp_path / "state.npz", {"a": tmp_path})


class Attack:
    def __reduce__(self):
        return os.mkdir, (self.target,)

    def __init__(self, target):
        self.target = target


def test_rule_15_loading_executes_nothing(tmp_path):
    attack = np.empty(1, dtype=object)
    attack[0] = Attack(str(tmp_path / "executed"))
    with (tmp_path / "state.npz").open("wb") as file:
        np.savez(file, json=attack, data=attack)
    for content in (None, pickle.dumps(attack[0]), b"", b"PK\x03\x04"):
        if content is not None:
            (tmp_path / "state.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"state\.npz can't be read"):
            load_plain(tmp_path / "state.npz")
    assert not (tmp_path / "executed").exists()

"""Weights in files: read bit for bit, whatever a reader has missed, and kept as long as they are needed."""

import contextlib
import json
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.weight_files import (
    MANIFEST,
    PAYLOAD,
    WeightReader,
    WeightsUnreadable,
    WeightWriter,
    bits_of,
    versions_in,
)


def model(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "a.weight": torch.randn(40, 33, generator=generator) * 0.02,
        "b": torch.randn(7, generator=generator),
        "c": torch.ones(()),
    }
    return {name: x.to(dtype) for name, x in weights.items()}


def updated(weights, share=0.05, seed=1):
    """Some elements changed a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(x.shape, generator=generator) < share, x * 1.01, x)
        for name, x in weights.items()
    }


def same(arrived, weights):
    arrived = dict(arrived)
    assert arrived.keys() == weights.keys()
    for name, x in weights.items():
        assert arrived[name].dtype == x.dtype and arrived[name].shape == x.shape
        assert (bits_of(arrived[name]) == bits_of(x)).all()
    return True


def damage(path, offset=-3):
    data = bytearray(path.read_bytes())
    data[offset] ^= 64
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_version_is_read_bit_for_bit_and_small_changes_are_small(tmp_path, dtype):
    writer = WeightWriter(tmp_path / "w", 50, ["r"])
    reader = WeightReader(tmp_path / "w", "r")
    weights = model(dtype=dtype)
    weights["b"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])
    sizes = []
    for version in (3, 4, 9):
        manifest = writer.write(weights.items(), version)
        assert same(reader.read(version), weights)
        sizes.append(manifest["files"][PAYLOAD])
        assert manifest == json.loads((tmp_path / "w" / str(version) / MANIFEST).read_text())
        assert (manifest["kind"], manifest["base_version"]) == {
            3: ("full", None),
            4: ("delta", 3),
            9: ("delta", 4),
        }[version]
        weights = updated(weights, seed=version)
    assert max(sizes[1:]) < 0.4 * sizes[0]
    names = {each["name"]: each for each in manifest["tensors"]}
    assert names["a.weight"].keys() == {"name", "shape", "dtype", "offset", "nbytes", "checksum"}


def test_tensors_that_were_read_do_not_change_when_the_next_version_is(tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["r"])
    reader = WeightReader(tmp_path / "w", "r")
    first = model()
    second = updated(model())
    writer.write(first.items(), 0)
    held = reader.read(0)
    writer.write(second.items(), 1)
    assert same(reader.read(1), second) and same(held, first)


def test_where_most_bytes_change_or_tensors_are_others_all_are_written(tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["r"])
    weights = model()
    kinds = [writer.write(weights.items(), 0)["kind"]]
    kinds.append(writer.write(updated(weights).items(), 1)["kind"])
    kinds.append(writer.write(model(seed=5).items(), 2)["kind"])
    kinds.append(writer.write(model(seed=5, dtype=torch.bfloat16).items(), 3)["kind"])
    assert kinds == ["full", "delta", "full", "full"]
    assert same(WeightReader(tmp_path / "w", "r").read(3), model(seed=5, dtype=torch.bfloat16))


def test_anchors_come_every_so_often_and_sooner_when_deltas_outweigh_them(tmp_path):
    def kinds(anchor_every, share):
        writer = WeightWriter(tmp_path / "w", anchor_every, [])
        weights = model()
        found = ""
        for version in range(7):
            found += writer.write(weights.items(), version)["kind"][0]
            weights = updated(weights, share, version)
        return found

    assert kinds(3, 0.01) == "fddfddf" and kinds(1, 0.01) == "fffffff"
    assert kinds(50, 0.01) == "fdddddd"
    assert kinds(50, 0.6).count("f") > 1


def test_a_new_reader_and_one_that_missed_versions_arrive_at_the_same(tmp_path):
    writer = WeightWriter(tmp_path / "w", 4, ["late", "new"])
    late = WeightReader(tmp_path / "w", "late")
    history = [model()]
    for version in range(10):
        writer.write(history[-1].items(), version)
        if version in (1, 9):
            assert same(late.read(version), history[-1])
        history.append(updated(history[-1], seed=version))
    assert same(WeightReader(tmp_path / "w", "new").read(9), history[9])
    assert same(WeightReader(tmp_path / "w", "new").read(6), history[6])


def test_a_wrong_checksum_is_noticed_and_the_anchor_helps_where_it_can(tmp_path, caplog):
    writer = WeightWriter(tmp_path / "w", 50, ["r"])
    reader = WeightReader(tmp_path / "w", "r")
    first = model()
    second = updated(model())
    writer.write(first.items(), 0)
    writer.write(second.items(), 1)
    reader.read(0)
    dict(reader.read(0))["a.weight"][0, 0] += 1.0  # what it holds is another base than the writer's
    assert same(reader.read(1), second)
    assert "going on from the newest anchor" in caplog.text and "checksum" in caplog.text
    damage(tmp_path / "w" / "1" / PAYLOAD)
    with pytest.raises(WeightsUnreadable, match=r"of weights 1 \(delta\) in .* is not what was written"):
        reader.read(1)
    damage(tmp_path / "w" / "0" / PAYLOAD, 20)
    with pytest.raises(WeightsUnreadable, match=r"of weights 0 \(full\)"):
        WeightReader(tmp_path / "w", "r").read(0)


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 0.999), cut=st.booleans())
def test_no_damage_of_a_payload_passes(tmp_path_factory, place, cut):
    folder = tmp_path_factory.mktemp("damaged") / "w"
    WeightWriter(folder, 50, ["r"]).write(model().items(), 0)
    path = folder / "0" / PAYLOAD
    offset = int(place * path.stat().st_size)
    if cut:
        path.write_bytes(path.read_bytes()[:offset])
    else:
        damage(path, offset)
    with contextlib.suppress(WeightsUnreadable):
        assert same(WeightReader(folder, "r").read(0), model())  # there are bits that zstd does not use


def test_what_is_missing_is_named(tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, [])
    weights = model()
    for version in range(3):
        writer.write(weights.items(), version)
        weights = updated(weights, seed=version)
    (tmp_path / "w" / "1" / MANIFEST).unlink()
    reader = WeightReader(tmp_path / "w", "r")
    with pytest.raises(
        WeightsUnreadable, match=r"weights 2 .* need version 1, which is not there .*\[0, 2\]"
    ):
        reader.read(2)
    with pytest.raises(WeightsUnreadable, match=r"weights 7 did not come .*weight_dir"):
        reader.read(7)
    (tmp_path / "w" / "0" / PAYLOAD).unlink()
    with pytest.raises(WeightsUnreadable, match="No such file"):
        reader.read(0)


def test_a_version_goes_when_all_have_read_and_nobody_can_need_it(tmp_path):
    writer = WeightWriter(tmp_path / "w", 3, ["quick", "slow"])
    quick, slow = (WeightReader(tmp_path / "w", name) for name in ("quick", "slow"))
    history = [model()]
    there = []
    for version in range(9):
        writer.write(history[-1].items(), version)
        quick.read(version)
        there.append(versions_in(tmp_path / "w"))
        if version in (4, 7):
            assert same(slow.read(version), history[version])
        history.append(updated(history[-1], seed=version))
    assert there[4] == [0, 1, 2, 3, 4]  # the slow one has read none
    assert there[5] == there[7][:3] == [3, 4, 5]  # from the anchor of what it has read
    assert there[8] == [6, 7, 8]
    assert same(WeightReader(tmp_path / "w", "slow").read(8), history[8])


def test_a_writer_begins_with_an_empty_folder_and_leaves_none(tmp_path):
    first = WeightWriter(tmp_path / "w", 50, ["r"])
    first.write(model().items(), 5)
    second = WeightWriter(tmp_path / "w", 50, ["r"])
    assert versions_in(tmp_path / "w") == []
    second.write_in_background(list(model(seed=2).items()), 5)
    assert same(WeightReader(tmp_path / "w", "r").read(5, seconds=20), model(seed=2))
    second.close()
    assert not (tmp_path / "w").exists()


def test_what_could_not_be_written_is_said_to_readers_and_to_the_writer(tmp_path):
    writer = WeightWriter(tmp_path / "w", 50, ["r"])
    reader = WeightReader(tmp_path / "w", "r")
    (tmp_path / "w" / "1").write_text("in the way")
    writer.write_in_background(list(model().items()), 1)
    with pytest.raises(WeightsUnreadable, match="weights 1 were not written: FileExistsError"):
        reader.read(1, seconds=20)
    with pytest.raises(FileExistsError):
        writer.write_in_background(list(model().items()), 2)


def test_a_reader_that_is_closed_waits_no_longer(tmp_path):
    reader = WeightReader(tmp_path, "r")
    threading.Timer(0.1, reader.close).start()
    started = time.monotonic()
    with pytest.raises(WeightsUnreadable):
        reader.read(0, seconds=60)
    assert time.monotonic() - started < 30

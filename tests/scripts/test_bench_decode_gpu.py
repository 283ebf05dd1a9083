"""The script for GPUs, tried out on a CPU: every engine, every figure, and what sleep gives back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import bench_decode_gpu  # noqa: E402


def test_a_tiny_run_prints_and_writes_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    result = bench_decode_gpu.main(["--device", "cpu", "--tiny", "--sequences", "2", "--json", str(file)])
    assert json.loads(file.read_text()) == result
    assert [row["engine"] for row in result["rows"]] == ["native", "native eager", "generate"]
    for row in result["rows"]:
        assert row["share"] > 0 and row["share"] == row["tokens_per_second"] / row["bound_tokens_per_second"]
    level_1, level_2 = result["sleep"]
    assert 0 < level_1["said_bytes"] < level_2["said_bytes"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


def test_a_step_reads_every_weight_once_and_the_keys_and_values_of_every_position() -> None:
    model = bench_decode_gpu.make_model(bench_decode_gpu.TINY["tiny"], torch.device("cpu"), torch.float32)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    position = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes
    assert bench_decode_gpu.bytes_per_step(model, 3, 10.0) == weights + 3 * 10 * position


@pytest.mark.parametrize(("shape", "billions"), [("0.5B", 0.494), ("1.5B", 1.54), ("3B", 3.09)])
def test_the_shapes_have_the_parameters_of_their_models(shape: str, billions: float) -> None:
    model = bench_decode_gpu.make_model(bench_decode_gpu.SHAPES[shape], torch.device("meta"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)

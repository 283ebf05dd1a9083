"""The update benchmarks on tiny models: equal trajectories, equal losses and gradients, every figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import bench_update, bench_update_gpu  # noqa: E402
from scripts.bench.update_task import Measured, UpdateTask, draw_trajectories, micro_batch_rows  # noqa: E402


def test_trajectories_have_the_lengths_and_the_share_of_retrieved_text_that_were_asked_for() -> None:
    batch = draw_trajectories(8, 8, 50, 1500, 0.6, 1000, seed=0)
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() >= 50 and lengths.max() <= 1500 and lengths.float().std() > 300
    tokens, sampled, prompts = lengths.sum(), batch["response_mask"].sum(), batch["prompt_lengths"].sum()
    assert abs(float((tokens - sampled - prompts) / tokens) - 0.6) < 0.01
    assert not (batch["response_mask"] * (1 - batch["attention_mask"])).any()
    for group in batch["input_ids"].split(8):
        assert (group[:, :4] == group[0, :4]).all()


def test_groups_can_begin_alike() -> None:
    batch = draw_trajectories(2, 4, 40, 40, 0.5, 1000, seed=0, alike=0.75)
    for group in batch["input_ids"].split(4):
        assert (group[:, :30] == group[0, :30]).all() and (group[1:, 30:] != group[0, 30:]).any()


def test_sorted_micro_batches_hold_rows_of_like_length() -> None:
    batch = {"attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])}
    task = UpdateTask("", micro_batch=2, sorts_by_length=True, num_steps=1)
    assert micro_batch_rows(task, batch) == [[1, 2], [0]]
    assert micro_batch_rows(UpdateTask("", 2, False, 1), batch) == [[0, 1], [2]]


def test_a_small_step_has_the_lengths_of_a_large_one() -> None:
    lengths = draw_trajectories(1, 8, 50, 1500, 0.6, 1000, seed=3)["attention_mask"].sum(1).sort().values
    parts = 50 + 1450 / 8 * torch.arange(9)
    assert ((lengths >= parts[:-1] - 1) & (lengths <= parts[1:] + 1)).all()


def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_once(contender: str, *_: object) -> Measured:
        if contender == "padded":
            raise KeyboardInterrupt
        return Measured([2.0], [2.0], 100.0, 150.0, 0.1, 1000)

    monkeypatch.setattr(bench_update, "run_once", run_once)
    monkeypatch.setattr(bench_update, "difference", lambda *_: 0.0)
    monkeypatch.setattr(torch, "load", lambda *_, **__: {"a": torch.zeros(1)})
    assert bench_update.main(["--sizes", "test", "--lengths", "20", "60"]) == 130
    out = capsys.readouterr().out
    assert "| test | ours |" in out and "padded" not in out


@pytest.mark.slow
def test_a_tiny_run_compares_gradients_and_prints_every_contender(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    arguments = ["--sizes", "test", "--rounds", "1", "--steps", "1", "--lengths", "20", "60", "--sorted"]
    assert bench_update.main([*arguments, "--json", str(file)]) == 0
    runs = json.loads(file.read_text())
    assert [run["contender"] for run in runs] == ["ours", "padded", "padded, sorted"]
    losses = [run["measured"]["loss"] for run in runs]
    assert max(losses) - min(losses) < 1e-5 and losses[0] != 0
    out = capsys.readouterr()
    assert out.err.count("gradient differs by") == 3 and "| test | padded, sorted |" in out.out


def test_another_gradient_is_noticed(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1.0, 2.0])}, tmp_path / "gradient.pt")
    assert bench_update.difference(tmp_path, {"a": torch.tensor([1.0, 2.0])}) == 0
    assert bench_update.difference(tmp_path, {"a": torch.tensor([1.0, 1.0])}) > 0.5
    with pytest.raises(ValueError, match="other parameters"):
        bench_update.difference(tmp_path, {"b": torch.tensor([1.0])})


@pytest.mark.parametrize("more", [[], ["--checkpointing"]])
def test_the_gpu_script_gives_both_steps_the_same_loss(tmp_path: Path, more: list[str]) -> None:
    file = tmp_path / "figures.json"
    result = bench_update_gpu.main(["--device", "cpu", "--tiny", "--json", str(file), *more])
    assert json.loads(file.read_text()) == result
    packed, padded = result["rows"]
    assert (packed["step"], padded["step"]) == ("packed", "padded")
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-2) and packed["loss"] != 0
    assert packed["mfu"] > 0 and result["matmul_tflops"] > 0


def test_a_micro_batch_that_does_not_fit_is_halved() -> None:
    tried = []

    def step(max_tokens: int) -> float:
        tried.append(max_tokens)
        if max_tokens > 4096:
            raise torch.cuda.OutOfMemoryError("too large")
        return 0.5

    assert bench_update_gpu.run_that_fits(step, 16384) == (4096, 0.5)
    assert tried == [16384, 8192, 4096]


@pytest.mark.slow
def test_the_gpu_script_needs_no_ray() -> None:
    code = "import sys; sys.modules['ray'] = None; from scripts import bench_update_gpu"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

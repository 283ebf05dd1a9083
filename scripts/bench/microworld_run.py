"""GRPO of the shipped tiny model on the microworld of seed 0, in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep.microworld import write_world
from scripts.bench.servers import ROOT, bm25_server, running
from verl.utils.json_files import read_lines


def train_microworld(
    work: Path, name: str, device: str, settings: Sequence[str]
) -> tuple[float, list[float], float]:
    """Train with the shipped settings and with `settings`; on CPU two steps with 8 test questions.

    Args:
        work: folder for the world, the run and its logs.
        name: name of the run.
        device: cuda or cpu.
        settings: more settings of the run.

    Returns:
        (sampled EM at the end, seconds of each step, seconds of the whole run).

    Raises:
        RuntimeError: the run failed.
    """
    world = work / "microworld"
    run = work / f"run-{name}"
    log = work / f"{name}.log"
    shutil.rmtree(run, ignore_errors=True)  # an earlier measurement may have left it
    if not (world / "corpus.jsonl").exists():
        write_world(0, world, num_train=4096, num_test=400, num_3hop=200)
    with running(bm25_server(world / "corpus.jsonl"), work / "search.log") as (port, _):
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "@configs/microworld_grpo.yaml"]
        command += ["actor_rollout_ref.model.path=data_prep/base_model", f"trainer.default_local_dir={run}"]
        command += [f"data.train_files={world}/train.parquet", f"data.val_files={world}/test.parquet"]
        command += [f"retriever.url=http://127.0.0.1:{port}/retrieve", f"trainer.device={device}"]
        if device == "cpu":
            command += ["trainer.total_training_steps=2", "data.val_data_num=8"]
        start = time.perf_counter()
        with log.open("wb") as out:
            status = subprocess.run([*command, *settings], cwd=ROOT, stdout=out, stderr=out).returncode
        seconds = time.perf_counter() - start
    if status:
        end = log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the run ended with {status}:\n{end}")
    steps = [row["timing_s/step"] for row in read_lines(run / "metrics.jsonl") if "timing_s/step" in row]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary["em_after"], steps, seconds

"""Rollouts ahead of training beside the synchronous run, on the same cores: trained tokens per second.

    python scripts/bench_async.py [--ahead 1,2] [--seeds 0] [--steps 12] [--transfer ray]   Markdown

Each run is GRPO on the microworld, whose searches each take a lognormal time (mean 0.5 s, sigma 1).
Synchronous: two processes sample, then train. Ahead by k: one process samples while another trains. Runs
alternate, and the first two steps of each are left out.

"Idle" is the share of the time of the other steps in which the trainer waited for groups, or the rollout
process had nothing to do. "sync" is the time that a step stood still for the weights to go out, in seconds
and as its share. Exact match is that of the test after as many steps.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import httpx  # noqa: E402
import uvicorn  # noqa: E402
from fastapi import FastAPI, Request  # noqa: E402

from data_prep.microworld import write_world  # noqa: E402
from scripts.bench.servers import ENVIRONMENT, bm25_server, running  # noqa: E402
from verl.utils.json_files import read_lines  # noqa: E402

MEAN = 0.5
SIGMA = 1.0
LEFT_OUT = 2
SETTINGS = """@configs/microworld_grpo.yaml actor_rollout_ref.model.path=data_prep/base_model
    actor_rollout_ref.rollout.search_delay_steps=null actor_rollout_ref.rollout.name=native
    algorithm.rollout_correction.bypass_mode=true trainer.val_before_train=false trainer.test_freq=-1
    trainer.evals=null trainer.save_freq=-1 trainer.backend=ray trainer.device=cpu trainer.progress=plain"""
AHEAD = """trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.placement=apart
    trainer.async_training.max_staleness={} actor_rollout_ref.rollout.weight_transfer={}"""


def slow_server(url: str) -> str:
    """Start a server in a thread that passes searches on to `url`, and return its address.

    Each search takes a random time.
    """
    rng = random.Random(0)
    app = FastAPI()
    client = httpx.AsyncClient(trust_env=False, timeout=60)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        body = await request.json()
        seconds = [rng.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA) for _ in body["queries"]]
        await asyncio.sleep(max(seconds))
        reply: dict[str, Any] = (await client.post(url, json=body)).raise_for_status().json()
        return reply

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"


def train(settings: list[str], steps: int, folder: Path) -> dict[str, float]:
    """Run a training and return its figures."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *SETTINGS.split(), *settings]
    command += [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, stdout=sys.stderr)
    rows = read_lines(folder / "metrics.jsonl")
    figures = {"em": rows[-1]["val/sampled/em"]}
    rows = [row for row in rows if "actor/pg_loss" in row][LEFT_OUT:]
    seconds = sum(row["timing_s/step"] - row.get("timing_s/testing", 0.0) for row in rows)
    figures["tokens"] = sum(row["perf/trained_tokens"] for row in rows) / seconds
    for name in ("trainer", "rollout"):
        idle = sum(row.get(f"async/{name}_idle_seconds", math.nan) for row in rows)
        figures[f"{name} idle"] = idle / seconds
    figures["staleness"] = mean(row["rollout/staleness/mean"] for row in rows)
    figures["sync, s"] = mean(row["timing_s/sync_weights"] for row in rows)
    figures["sync share"] = sum(row["timing_s/sync_weights"] for row in rows) / seconds
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ahead", default="1,2", help="values of trainer.async_training.max_staleness (1,2)")
    parser.add_argument("--seeds", default="0", help="of the runs (0)")
    parser.add_argument("--steps", type=int, default=12, help="of each run (12)")
    parser.add_argument("--transfer", default="ray", help="values of rollout.weight_transfer (ray)")
    options = parser.parse_args()
    if options.steps <= LEFT_OUT:
        parser.error(f"--steps: found {options.steps}, expected more than the {LEFT_OUT} that are left out")
    kinds = {"synchronous": "trainer.n_gpus_per_node=2"}
    for k in options.ahead.split(","):
        for transfer in options.transfer.split(","):
            kinds[f"ahead by {k} over {transfer}"] = AHEAD.format(k, transfer)
    figures_of_runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_world(0, folder, num_train=4096, num_test=400, num_3hop=2)
        data = [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet"]
        with running(bm25_server(folder / "corpus.jsonl"), folder / "server.log") as (port, _):
            data.append(f"retriever.url={slow_server(f'http://127.0.0.1:{port}/retrieve')}")
            for seed in options.seeds.split(","):
                for name, settings in kinds.items():
                    run = [*settings.split(), *data, f"trainer.seed={seed}"]
                    out = folder / f"{name}-{seed}".replace(" ", "-")
                    figures_of_runs[name].append(train(run, options.steps, out))
    names = ("em", "trainer idle", "rollout idle", "staleness", "sync, s", "sync share")
    print("| run | trained tokens per s | times | exact match", *names[1:], sep=" | ", end=" |\n")
    print("|---" * 9 + "|")
    base = median(figures["tokens"] for figures in figures_of_runs["synchronous"])
    for name, runs in figures_of_runs.items():
        tokens = median(figures["tokens"] for figures in runs)
        cells = " | ".join(f"{mean(figures[key] for figures in runs):.3f}" for key in names)
        print(f"| {name} | {tokens:.0f} | {tokens / base:.2f} | {cells} |")


if __name__ == "__main__":
    main()

"""Shows that a run that is killed and started again ends as an undisturbed one.

    python scripts/check_resume.py [--seed N] [--steps N] [--backend local|ray] [--processes N]

One run goes through undisturbed. A second one, with the same settings and a folder of its own, is killed with
SIGKILL three times and started again each time: once at a random moment, once at another one (with
`--backend ray` one of its workers is killed instead), once in the middle of writing a checkpoint. Then every
line of the two `metrics.jsonl` is compared, number by number and bit by bit, times and speeds left out. Exit
status 0 means that all were equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import psutil  # noqa: E402

from scripts.bench import servers  # noqa: E402

ADAPTIVE_KL = {  # a run that goes on must know where its weight stood
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.target_kl": 0.001,
    "algorithm.kl_ctrl.horizon": 100,
}
MIN_STEPS = 8  # a checkpoint every second step, and three kills, each after another checkpoint
TIMES = ("timing_", "perf/", "rollout/seconds", "rollout/tokens_per_second")
TIMES += ("retrieval/",)  # a new client has no answers in memory yet
TIMES += ("trainer/num_restarts",)


def command_line(run_dir: Path, world: Path, url: str, options: argparse.Namespace) -> list[str]:
    settings = {
        "data.train_files": world / "train.parquet",
        "data.val_files": world / "test.parquet",
        "data.val_data_num": 16,
        "data.train_batch_size": 4,
        "data.max_start_length": 64,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 32,
        "data.max_obs_length": 250,
        "actor_rollout_ref.model.path": options.model,
        "critic.model.path": options.model,
        "actor_rollout_ref.rollout.n_agent": 4,
        "actor_rollout_ref.rollout.search_delay_steps": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "critic.ppo_micro_batch_size": 8,
        "algorithm.adv_estimator": options.algorithm,
        "algorithm.kl_ctrl.kl_coef": 0.001,
        **(ADAPTIVE_KL if options.algorithm == "gae" else {}),
        "retriever.url": url,
        "retriever.topk": 2,
        "max_turns": 3,
        "trainer.total_training_steps": options.steps,
        "trainer.save_freq": 2,
        "trainer.test_freq": 3,
        "trainer.seed": options.seed,
        "trainer.backend": options.backend,
        "trainer.n_gpus_per_node": options.processes,
        "trainer.device": "cpu",
        "trainer.default_local_dir": run_dir,
        "trainer.progress": "plain",
    }
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *(f"{key}={value}" for key, value in settings.items()),
    ]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run in a session of its own; killed with all it started if the block is left before its end."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_group(process)


def finish(command: list[str], log: Path) -> None:
    with running(command, log) as process:
        if process.wait() != 0:
            sys.exit(f"the run ended with status {process.returncode}; the end of its log:\n{end_of(log)}")


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `condition` holds; it is an error when the run ends before that."""
    while not condition():
        if process.poll() is not None:
            status = process.returncode
            sys.exit(
                f"the run ended (status {status}) before it could be killed; its log ends:\n{end_of(log)}"
            )
        time.sleep(0.002)


def whole_checkpoints(run_dir: Path) -> list[str]:
    return [path.name for path in run_dir.glob("global_step_*") if path.suffix != ".incomplete"]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the driver and to what it had started (Ray's own processes): nothing stays behind."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in descendants:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(descendants, timeout=30)


def kill_worker(process: subprocess.Popen[bytes]) -> str:
    """SIGKILL to one training process of a Ray run; the driver must end by itself with an error."""
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if any(part.startswith("ray::RankProcess") for part in child.cmdline())
    ]
    if not workers:
        sys.exit("found no training process below the driver")
    os.kill(workers[0].pid, signal.SIGKILL)
    descendants = psutil.Process(process.pid).children(recursive=True)
    status = process.wait(timeout=120)
    psutil.wait_procs(descendants, timeout=60)
    left = [child.pid for child in descendants if child.is_running()]
    if status == 0 or left:
        sys.exit(
            f"after its worker was killed the driver ended with status {status} and left processes {left}"
        )
    return f"driver ended with status {status}"


def writing_anew(run_dir: Path) -> Callable[[], bool]:
    """Tells, when called, whether a checkpoint is being written; what an earlier kill left does not count."""

    def half_written() -> set[Path]:
        return {path.parent for path in run_dir.glob("*.incomplete/actor")}

    left = half_written()

    def check() -> bool:
        now = half_written()
        left.intersection_update(now)  # what has gone once and comes back is written anew
        return bool(now - left)

    return check


def disturb(command: list[str], run_dir: Path, log: Path, options: argparse.Namespace) -> None:
    """Three runs of the same command that are each killed."""
    moments = random.Random(options.kill_seed)

    with running(command, log) as process:
        wait_for(lambda: len(whole_checkpoints(run_dir)) >= 1, process, log)
        delay = moments.uniform(0.0, 3.0)
        time.sleep(delay)
        kept = sorted(whole_checkpoints(run_dir))
        print(f"kill 1: {delay:.2f} s after the first checkpoint; checkpoints: {kept}", flush=True)
        kill_group(process)

    before = set(whole_checkpoints(run_dir))
    with running(command, log) as process:
        wait_for(lambda: set(whole_checkpoints(run_dir)) - before, process, log)
        time.sleep(moments.uniform(0.0, 1.0))
        kept = sorted(whole_checkpoints(run_dir))
        if options.backend == "ray":
            print(f"kill 2: a worker; checkpoints: {kept}; {kill_worker(process)}", flush=True)
        else:
            print(f"kill 2: at a random moment; checkpoints: {kept}", flush=True)
            kill_group(process)

    for _ in range(3):  # the kill can come too late: the checkpoint is then whole
        is_writing = writing_anew(run_dir)
        with running(command, log) as process:
            wait_for(is_writing, process, log)
            kill_group(process)
        if left := sorted(path.name for path in run_dir.glob("*.incomplete")):
            print(
                f"kill 3: while a checkpoint was being written; half-written folders left: {left}", flush=True
            )
            return
    sys.exit("no kill hit a checkpoint while it was being written; try again")


def compare(undisturbed: Path, killed: Path, left_out: tuple[str, ...] = TIMES) -> int:
    """Number of differing values in the two `metrics.jsonl`, which are printed.

    `left_out`: what the names of figures begin with that are not compared.
    """
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (undisturbed, killed)
    ]
    if [line["step"] for line in lines[0]] != [line["step"] for line in lines[1]]:
        print(
            f"steps differ: {[line['step'] for line in lines[0]]} and {[line['step'] for line in lines[1]]}"
        )
        return 1
    differing = compared = 0
    for left, right in zip(*lines, strict=True):
        for key in sorted(left.keys() | right.keys()):
            if key.startswith(left_out):
                continue
            compared += 1
            if left.get(key) != right.get(key):
                differing += 1
                print(f"step {left['step']}: {key}: {left.get(key)!r} and {right.get(key)!r}")
    print(f"{len(lines[0])} lines, {compared} values compared, {differing} differ")
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of world and run")
    parser.add_argument(
        "--kill-seed", type=int, default=None, help="seed of the moments of the kills; default: random"
    )
    parser.add_argument("--steps", type=int, default=14, help="training steps of each run")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument(
        "--processes", type=int, default=1, help="training processes (more than one needs ray)"
    )
    parser.add_argument("--algorithm", choices=["grpo", "gae", "rae"], default="gae")
    parser.add_argument("--model", default="data_prep/base_model", help="Hugging Face folder")
    options = parser.parse_args()
    if options.steps < MIN_STEPS:
        parser.error(
            f"--steps: found {options.steps}, expected {MIN_STEPS} or more: the run is killed three times, "
            "each time after another checkpoint, and there is one every second step"
        )
    if options.kill_seed is None:
        options.kill_seed = random.SystemRandom().randrange(10**6)
    print(f"kill seed {options.kill_seed}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        world = folder / "world"
        subprocess.run(
            [sys.executable, "-m", "data_prep.microworld", "--seed", str(options.seed), "--out", str(world)],
            cwd=ROOT,
            check=True,
        )
        server = [
            sys.executable,
            "-m",
            "search_r1.search.server",
            "--host",
            "127.0.0.1",
            "--port",
            servers.PORT,
        ]
        server += ["--retriever_name", "bm25", "--corpus_path", str(world / "corpus.jsonl")]
        with servers.running("retrieval server", server, folder / "server.log", {}) as address:
            url = f"http://127.0.0.1:{address.port}/retrieve"
            undisturbed, killed = folder / "undisturbed", folder / "killed"
            finish(command_line(undisturbed, world, url, options), folder / "undisturbed.log")
            print("undisturbed run: done", flush=True)
            command = command_line(killed, world, url, options)
            disturb(command, killed, folder / "killed.log", options)
            finish(command, folder / "killed.log")
        differing = compare(undisturbed, killed)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()

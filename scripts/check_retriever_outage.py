"""Shows what a training run does when its retrieval server goes away: comes back in time, or does not.

    python scripts/check_retriever_outage.py [--seconds 20] [--steps N] [key=value ...]

Three runs of `train_grpo.sh` on the microworld, each with a folder of its own and a server that this script
starts: one undisturbed; one whose server is killed (SIGKILL) in the middle of a step and comes back after
`--seconds`; one whose server stays away, with a deadline of `--deadline` seconds for a search, until the run
has stopped, and is there again when the same command is run a second time. Checked are: how the runs end and
what they say; that every observation in a trajectory that was trained on is what the server finds for its
query; and, where no trajectory had to be left out, that the numbers in `metrics.jsonl` are those of the
undisturbed run, bit by bit. Exit status 0 means that all of it holds. `key=value` are overrides of the
configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.check_resume import (  # noqa: E402
    ROOT,
    compare,
    end_of,
    finish,
    running,
    wait_for,
    whole_checkpoints,
)
from search_r1.llm_agent.actions import INFORMATION_END, format_observation  # noqa: E402
from search_r1.search.client import SearchClient, SearchError  # noqa: E402

EXPERIMENT = "retriever-outage"
SECONDS_TO_STOP = 45.0  # after the deadline: the rest of the generation, and the end of the processes
SECONDS_TO_START = 60.0


class Server:
    """A retrieval server that is killed and started again on the same port."""

    def __init__(self, corpus: Path, log: Path) -> None:
        self.corpus, self.log = corpus, log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--retriever_name", "bm25", "--corpus_path", str(self.corpus)]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            with SearchClient(self.url, timeout=SECONDS_TO_START) as client:
                client.batch_search(["is anybody there?"])
        except SearchError as error:
            sys.exit(f"the retrieval server did not start: {error}\n{end_of(self.log)}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Run:
    """One training run: its command, its folder, its log."""

    def __init__(self, folder: Path, name: str, url: str, world: Path, overrides: list[str]) -> None:
        self.folder, self.log, self.name = folder / name, folder / f"{name}.log", name
        os.environ |= {"RETRIEVER_URL": url, "DATA_DIR": str(world), "EXPERIMENT_NAME": EXPERIMENT}
        self.command = ["bash", "train_grpo.sh", f"trainer.default_local_dir={self.folder}", *overrides]

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def has_done(self, step: int) -> bool:
        return any(line["step"] >= step for line in self.metrics())


def check(holds: bool, what: str, log: Path | None = None) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}" + (f"; its log ends:\n{end_of(log)}" if log else ""))
    print(f"ok: {what}", flush=True)


def kill_in_a_step(run: Run, server: Server, process: subprocess.Popen[bytes], step: int) -> None:
    """SIGKILL at a random moment of the step after `step`."""
    wait_for(lambda: run.has_done(step), process, run.log)
    delay = random.uniform(0.0, run.metrics()[-1]["timing_s/step"])
    time.sleep(delay)
    server.kill()
    print(f"{run.name}: server killed {delay:.2f} s after the end of step {step}", flush=True)


def check_trajectories(run: Run, server: Server, topk: int = 2, max_obs_length: int = 250) -> int:
    """Every observation that was trained on is what the server finds. Returns how many were left out."""
    num_trajectories = num_observations = 0
    with SearchClient(server.url, topk=topk) as client:
        for path in sorted((run.folder / "trajectories").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                if record["split"] != "train":
                    continue
                num_trajectories += 1
                where = f"{path.name}: {record['uid']}"
                if record["trajectory"]["finish_reason"] == "search_failed":
                    sys.exit(f"FAILED: {where}: trained on although a search failed")
                for turn in record["trajectory"]["turns"]:
                    if turn["action"] != "search" or turn["obs_start"] is None:
                        continue
                    num_observations += 1
                    is_cut = turn["obs_end"] - turn["obs_start"] == max_obs_length
                    told = "".join(record["tokens"][turn["obs_start"] : turn["obs_end"]])
                    whole = format_observation(client.batch_search([turn["query"]])[0])
                    if told != whole and not (
                        is_cut and whole.startswith(told.removesuffix(INFORMATION_END))
                    ):
                        sys.exit(
                            f"FAILED: {where}: for {turn['query']!r} it was told {told!r}, not {whole!r}"
                        )
    left_out = sum(int(line.get("env/search_failed", 0)) for line in run.metrics())
    check(
        num_observations > 0,
        f"{run.name}: {num_observations} observations in {num_trajectories} trained trajectories are the "
        f"server's; left out for a failed search: {left_out}",
    )
    return left_out


def check_short_outage(run: Run, server: Server, options: argparse.Namespace) -> None:
    with running(run.command, run.log) as process:
        kill_in_a_step(run, server, process, options.kill_step)
        killed_at = time.monotonic()
        time.sleep(options.seconds)
        check(process.poll() is None, f"{run.name}: the run waits for {options.seconds:g} s")
        server.start()
        print(f"  the server was away for {time.monotonic() - killed_at:.1f} s", flush=True)
        status = process.wait()
    check(status == 0, f"{run.name}: status {status}", run.log)
    longest = max(run.metrics(), key=lambda line: line.get("retrieval/wait_seconds/max", 0.0))
    step, seconds, waited, failed = (
        longest[name]
        for name in ("step", "timing_s/step", "retrieval/wait_seconds/max", "retrieval/failed_requests")
    )
    print(
        f"  step {step} took {seconds:.1f} s, its slowest search {waited:.1f} s; {failed:g} requests failed"
    )
    check(failed > 0, f"{run.name}: the outage was felt")


def check_long_outage(run: Run, server: Server, options: argparse.Namespace) -> None:
    with running(run.command, run.log) as process:
        kill_in_a_step(run, server, process, options.kill_step)
        killed_at = time.monotonic()
        status = process.wait()
    seconds = time.monotonic() - killed_at
    most = options.deadline + SECONDS_TO_STOP
    check(status == 3, f"{run.name}: status {status} (3: the run can't go on)", run.log)
    check(seconds < most, f"{run.name}: it stopped {seconds:.1f} s after the kill (at most {most:g})")
    log = run.log.read_text(errors="replace")
    said = [line for line in log.splitlines() if line.startswith("error: ")]
    check(len(said) == 1 and "Traceback" not in log, f"{run.name}: one line, no traceback")
    print(f"  {said[0]}")
    parts = (server.url, "refused the connection", "run the same command again")
    check(all(part in said[0] for part in parts), f"{run.name}: the line says {', '.join(parts)}")
    kept = sorted(whole_checkpoints(run.folder))
    check(bool(kept) and not list(run.folder.glob("*.incomplete")), f"{run.name}: whole checkpoints {kept}")
    server.start()
    finish(run.command, run.log)
    check(
        "resumed from" in run.log.read_text(errors="replace"),
        f"{run.name}: with the server back the same command goes on to the end",
    )
    steps = [line["step"] for line in run.metrics() if line["step"]]
    check(steps == list(range(1, options.steps + 1)), f"{run.name}: {len(steps)} steps, each once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the server is away at first")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="retriever.timeout of the third run, seconds"
    )
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--kill-step", type=int, default=5, help="the server is killed after this step")
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    options, overrides = parser.parse_known_args()
    if unknown := [text for text in overrides if "=" not in text]:
        parser.error(f"expected key=value, found {' '.join(unknown)}")
    os.environ |= {
        "VIRTUAL_ENV": sys.prefix,  # this Python as it is: nothing is installed
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        world = folder / "world"
        make_world = [sys.executable, "-m", "data_prep.microworld", "--out", str(world)]
        subprocess.run(make_world, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        server = Server(world / "corpus.jsonl", folder / "server.log")
        settings = [
            f"trainer.total_training_steps={options.steps}",
            f"trainer.backend={options.backend}",
            "trainer.save_freq=2",
            "trainer.num_trajectories_logged=100000",
            "trainer.device=cpu",
            *overrides,
        ]
        undisturbed, short, long = (
            Run(folder, name, server.url, world, settings) for name in ("undisturbed", "short", "long")
        )
        long.command.append(f"retriever.timeout={options.deadline}")
        try:
            server.start()
            finish(undisturbed.command, undisturbed.log)
            print("undisturbed: done", flush=True)
            check_short_outage(short, server, options)
            check_long_outage(long, server, options)
            for run in (short, long):
                if check_trajectories(run, server) == 0:
                    num_differing = compare(undisturbed.folder, run.folder)
                    check(num_differing == 0, f"{run.name}: its numbers are those of the undisturbed run")
        finally:
            server.kill()
            with suppress(OSError):  # the script's own choice of a folder, which the runs did not take
                (ROOT / "verl_checkpoints" / EXPERIMENT).rmdir()


if __name__ == "__main__":
    main()

"""The golden run: this checkout trains exactly as a reference commit does.

    python scripts/check_golden.py                            all scenarios, against the default reference
    python scripts/check_golden.py --reference COMMIT_OR_FOLDER --scenarios grpo,ppo

Each scenario is a documented command line on CPU, with the shipped tiny model in the microworld. It runs here
and in the reference, and every number of the two metrics.jsonl is compared. If a run is repeatable (native
engine, one process), the comparison is bit by bit and includes the last weights, otherwise it is within a
tolerance. Rounding depends on the CPU, therefore both sides run on this machine. Runs that are killed and
resumed are compared with an undisturbed reference. Only code is compared: both sides run with the reference's
settings.

Exit status 0: equal; 1: something differs or a run failed; 2: a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_NAME = f"golden-{os.getpid()}"
# Metrics that begin with one of these depend on the clock, on what a new process lacks in memory, or on
# kills.
NOT_REPEATABLE = ("timing_", "perf/", "rollout/seconds", "rollout/tokens_per_second", "retrieval/")
NOT_REPEATABLE += ("trainer/num_restarts", "train/f1", "val/greedy/f1", "val/sampled/f1")  # F1 is new
# Environment variables of the user that these runs must not see begin with one of these.
HIDDEN_PREFIXES = ("VERL__", "BASE_MODEL", "RETRIEVER_URL", "RAY_ADDRESS", "CONDA_PREFIX")


@dataclass(frozen=True)
class Scenario:
    """A command line (`script`, then `settings`), and how its metrics must agree (tolerances 0: bit by bit).

    If `killed` is set, this checkout's run gets SIGKILL as soon as that step's checkpoint exists, and starts
    again.
    """

    script: str
    settings: str
    rtol: float = 0.0
    atol: float = 0.0
    killed: int | None = None
    skip: tuple[str, ...] = ()  # further metrics that depend on the clock begin with one of these

    def agree(self, expected: object, found: object) -> bool:
        if isinstance(expected, float | int) and isinstance(found, float | int):
            both_nan = math.isnan(expected) and math.isnan(found)
            return both_nan or math.isclose(found, expected, rel_tol=self.rtol, abs_tol=self.atol)
        return expected == found


SMALL = """
    data.train_batch_size=4 data.val_data_num=16 data.extra_val_files=null trainer.val_modes=[greedy]
    actor_rollout_ref.rollout.n_agent=4 actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size=8 trainer.total_training_steps=2 trainer.device=cpu"""
PPO = f"""{SMALL}
    critic.ppo_mini_batch_size=4 critic.ppo_micro_batch_size=4 trainer.critic_warmup=0
    actor_rollout_ref.actor.shuffle=true actor_rollout_ref.actor.use_kl_loss=true"""
TWO_EPOCHS = """
    actor_rollout_ref.actor.ppo_epochs=2 trainer.critic_warmup=1 trainer.total_training_steps=3"""
FIVE_STEPS = "trainer.total_training_steps=5 trainer.save_freq=1"
RAE = "algorithm.adv_estimator=rae"
ADAPTIVE_KL = """
    actor_rollout_ref.actor.use_kl_loss=false algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.05
    algorithm.kl_ctrl.target_kl=0.01 algorithm.kl_ctrl.horizon=50"""
ON_RAY = "trainer.backend=ray trainer.n_gpus_per_node=2"
MEGATRON = """
    --config-name ppo_megatron_trainer actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"""
SCENARIOS = {
    "grpo": Scenario("train_grpo.sh", SMALL),
    "ppo": Scenario("train_ppo.sh", f"{PPO} {TWO_EPOCHS}"),
    "sft": Scenario("train_sft.sh", "trainer.total_training_steps=6 trainer.device=cpu"),
    "resume-kl": Scenario("train_ppo.sh", f"{PPO} {FIVE_STEPS} {ADAPTIVE_KL}", killed=2),
    "resume-rae": Scenario("train_grpo.sh", f"{SMALL} {FIVE_STEPS} {RAE}", killed=2),
    "ray": Scenario("train_ppo.sh", f"{PPO} {ON_RAY}", 1e-5, 1e-7),
    "megatron": Scenario("train_ppo.sh", f"{PPO} {ON_RAY} {MEGATRON}", 1e-3, 1e-6),
}


class Checkout:
    """A folder with the project, which runs scenarios in worlds that its own code makes."""

    def __init__(self, root: Path, work: Path, configs: Path | None = None) -> None:
        """Make the working folder.

        `configs` is the folder with the settings of the runs. None stands for the checkout's own.
        """
        self.root = root
        self.work = work
        self.configs = configs
        self.work.mkdir()

    def result(self, name: str, kills: Sequence[tuple[str, float]] = (), tries: int = 1) -> dict:
        """Run a scenario and return the rows of metrics.jsonl and a digest of each file of the last weights.

        Args:
            name: the scenario.
            kills: for each (name, seconds), SIGKILL comes so many seconds after something new of that name (a
                glob pattern) is in the run's folder. `half_written` of the result says which incomplete
                checkpoints the kills left.
            tries: a run that ends before its time (status 3) is started so often.
        """
        if not (world := self._world(name)).exists():
            self._run(["python", "-m", f"data_prep.{world.name}", "--seed", "7", "--out", str(world)], name)
        run_dir = self.root / "verl_checkpoints" / RUN_NAME
        script = SCENARIOS[name].script
        command = ["bash", script, *SCENARIOS[name].settings.split()]
        if self.configs is not None:
            kind = script.removeprefix("train_").removesuffix(".sh")
            command += ["--config", str(self.configs / f"microworld_{kind}.yaml")]
        # A kernel that was just compiled rounds differently from one of numba's cache.
        for _ in range(2):
            kernels = self._kernels()
            try:
                half_written = []
                for pattern, seconds in kills:
                    self._run(command, name, (run_dir, pattern, seconds))
                    half_written += sorted(path.name for path in run_dir.glob("*.incomplete"))
                self._run(command, name, tries=tries)
                rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
                weights = {
                    str(file.relative_to(run_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
                    for file in run_dir.glob(f"global_step_{rows[-1]['step']}/**/model.safetensors")
                }
            finally:
                shutil.rmtree(run_dir, ignore_errors=True)
            if self._kernels() == kernels:
                break
        return {"rows": rows, "weights": weights, "half_written": half_written}

    def _world(self, name: str) -> Path:
        return self.work / ("sft_rows" if name == "sft" else "microworld")

    def _kernels(self) -> set[tuple[Path, int]]:
        return {(file, file.stat().st_mtime_ns) for file in (self.root / "verl").rglob("*.nbc")}

    def _run(
        self, command: list[str], name: str, kill: tuple[Path, str, float] | None = None, tries: int = 1
    ) -> None:
        """Run the command to its end, or with `kill` until SIGKILL: folder, pattern, and seconds after it."""
        python = Path(sys.executable).absolute()
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_PREFIXES)
        } | {
            "VIRTUAL_ENV": str(python.parent.parent),
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DATA_DIR": str(self._world(name)),
            "SEED": "7",
            "EXPERIMENT_NAME": RUN_NAME,
        }
        log = self.work / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        try:
            old = set(kill[0].glob(kill[1])) if kill else set()
            while process.poll() is None:
                now = set(kill[0].glob(kill[1])) if kill else set()
                if kill and now - old:
                    time.sleep(kill[2])
                    break
                old &= now  # a file that disappears and comes back is new
                time.sleep(0.002)
        finally:
            status = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status == 3 and tries > 1:
            return self._run(command, name, kill, tries - 1)
        if status != (None if kill else 0):
            end = log.read_text(errors="replace")[-3000:]
            raise ChildProcessError(f"{' '.join(command)}\nended too early, with status {status}:\n{end}")


def compare(scenario: Scenario, expected: dict, found: dict) -> tuple[int, list[str]]:
    """Return how many values were compared, and a line for each that differs."""
    expected_rows, found_rows = ({row["step"]: row for row in result["rows"]} for result in (expected, found))
    steps = sorted(expected_rows.keys() | found_rows.keys())
    pairs = [(f"step {step}: ", expected_rows.get(step, {}), found_rows.get(step, {})) for step in steps]
    if not scenario.rtol:
        pairs.append(("sha256 of ", expected["weights"], found["weights"]))
    num_compared = 0
    lines = []
    for label, expected_values, found_values in pairs:
        for name in sorted(expected_values.keys() | found_values.keys()):
            if name.startswith(NOT_REPEATABLE + scenario.skip):
                continue
            num_compared += 1
            if (
                name not in expected_values
                or name not in found_values
                or not scenario.agree(expected_values[name], found_values[name])
            ):
                lines.append(
                    f"{label}{name}: {expected_values.get(name)} there, {found_values.get(name)} here"
                )
    return num_compared, lines


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reference", default="448ebf0", help="commit or folder (default %(default)s)")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="default: %(default)s")
    options = parser.parse_args()
    names = options.scenarios.split(",")
    if unknown := set(names) - SCENARIOS.keys():
        parser.error(f"there is no scenario {min(unknown)!r}, but {', '.join(SCENARIOS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        work = Path(temporary)
        folder = Path(options.reference).resolve()
        if is_commit := not folder.is_dir():
            folder = work / "reference"
            git("worktree", "add", "--detach", str(folder), options.reference)
        try:
            reference = Checkout(folder, work / "there")
            checkout = Checkout(ROOT, work / "here", folder / "configs")
            for name in names:
                scenario = SCENARIOS[name]
                started = time.monotonic()
                try:
                    expected = reference.result(name)
                    kills = [(f"global_step_{scenario.killed}", 0.0)] if scenario.killed else []
                    num_compared, lines = compare(scenario, expected, checkout.result(name, kills))
                except ChildProcessError as error:
                    num_compared = 0
                    lines = [str(error)]
                failed = failed or bool(lines)
                precision = f"to {scenario.rtol:g} or {scenario.atol:g}" if scenario.rtol else "bit by bit"
                print(f"{name:11} {'DIFFERS' if lines else 'equal':8} {num_compared:5} values", end=" ")
                resumed = "  killed and resumed" if scenario.killed else ""
                print(f"{precision:17} {time.monotonic() - started:4.0f} s{resumed}", flush=True)
                print(*(f"    {line}\n" for line in lines[:40]), sep="", end="", flush=True)
        finally:
            if is_commit:
                git("worktree", "remove", "--force", str(folder))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

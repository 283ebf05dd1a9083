"""scripts/slurm on namespaces as nodes, with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespace_nodes import REPOSITORY, changed_environment, missing

from data_prep.microworld import write_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
STAND_INS = Path(__file__).parent / "slurm_standins"
FROM_OUTSIDE = ("BASE_MODEL", "SEED", "RETRIEVER_URL", "RAY_ADDRESS", "LOG_DIR", "CONDA_PREFIX")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder that all nodes see, with a small world in it."""
    folder = tmp_path_factory.mktemp("shared")
    write_world(7, folder / "world", num_train=64, num_test=20, num_3hop=4)
    return folder


class Submitted:
    """A job: `finish()` gives its status and what it wrote."""

    def __init__(
        self, shared: Path, name: str, script: str, *arguments: str, flags=(), **variables: str
    ) -> None:
        self.folder = shared / name
        self.folder.mkdir()
        self.logs = self.folder / "logs"
        changes: dict[str, str | None] = dict.fromkeys(FROM_OUTSIDE)
        changes |= {
            "PATH": os.pathsep.join([str(STAND_INS), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "VIRTUAL_ENV": sys.prefix,
            "SLURM_STANDIN_SHARED": str(shared),
            "DATA_DIR": str(shared / "world"),
            "LOG_DIR": str(self.logs),
            "EXPERIMENT_NAME": f"test-slurm-{name}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        self._output = self.folder / "job.log"
        command = [
            "sbatch",
            "--wait",
            f"--output={self._output}",
            *flags,
            f"scripts/slurm/{script}",
            *arguments,
        ]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=changed_environment(changes), text=True)

    def finish(self) -> tuple[int, str]:
        status = self._process.wait(timeout=480)
        return status, self._output.read_text()

    def stop(self) -> None:
        self._process.kill()  # its nodes end with it
        self._process.wait()


@pytest.fixture(scope="module")
def submit(shared) -> Iterator:
    jobs: list[Submitted] = []

    def start(name: str, script: str, *arguments: str, flags=(), **variables: str) -> Submitted:
        jobs.append(Submitted(shared, name, script, *arguments, flags=flags, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()
        shutil.rmtree(REPOSITORY / "verl_checkpoints" / f"test-slurm-{job.folder.name}", ignore_errors=True)


def test_the_smoke_job_trains_on_two_nodes_and_searches_on_a_third(submit, shared):
    run_dir = shared / "smoke-run"
    status, output = submit(
        "smoke",
        "smoke.sbatch",
        f"trainer.default_local_dir={run_dir}",
        http_proxy="http://10.77.0.99:3128",  # nobody is there: what goes by it is lost
        NO_PROXY="elsewhere",
    ).finish()
    assert status == 0, output
    for line in (
        "job 1: training on: node1 node2; retrieval on: node3",
        "retrieval server ready: http://node3:8000/retrieve",
        "Ray cluster ready: 2 nodes at 10.77.0.1:6379",
        "training has ended well",
    ):
        assert line in output
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "env/number_of_valid_search" in step] == [1, 2]
    assert sum(step.get("env/number_of_valid_search", 0) for step in steps) > 0
    assert (run_dir / "global_step_2").is_dir()
    expected = {"doctor.log", "training.log", "ray-node1.log", "ray-node2.log", "retrieval-node3.log"}
    assert {path.name for path in (shared / "smoke" / "logs").glob("*.log")} == expected | {"ray-waiting.log"}


TRAINING = """
echo "proxies: $NO_PROXY $no_proxy"
if [ "$SLURM_RESTART_COUNT" = 1 ]; then
    echo "resumed from $(cat "$STATE"): nothing to learn here"
    exit 7
fi
trap 'echo checkpoint >"$STATE"; exit 3' USR1
scancel --batch --signal=USR1 "$SLURM_JOB_ID"
while :; do sleep 0.1; done
"""


def test_a_run_that_is_asked_to_stop_goes_back_into_the_queue_and_the_job_has_the_status_of_training(
    submit, shared
):
    (shared / "training.sh").write_text(TRAINING)
    job = submit(
        "requeue",
        "train.sbatch",
        flags=["--nodes=1", "--gpus-per-node=0"],
        TRAIN_COMMAND=f"bash {shared}/training.sh",
        RETRIEVAL_NODES="0",
        RETRIEVER_URL="http://elsewhere:8000/retrieve",
        STATE=str(shared / "state"),
        REQUEUE="1",
        DOCTOR="0",
    )
    status, output = job.finish()
    assert status == 7, output
    told, requeued, ended = (
        output.index(line)
        for line in (
            "the run is asked to write a checkpoint and stop",
            "the job goes back into the queue",
            "error: training ended with status 7",
        )
    )
    assert told < requeued < ended
    assert "resumed from checkpoint: nothing to learn here" in output[ended:]
    assert (
        "proxies: node1,localhost,127.0.0.1 node1,localhost,127.0.0.1"
        in (job.logs / "training.log").read_text()
    )


SERVER_THAT_CAN_BE_ENDED = """#!/bin/sh
if [ "$2" != search_r1.search.server ] || [ -e {ended} ]; then exec {python} "$@"; fi
{python} "$@" &
until [ -e {ended} ]; do sleep 0.1; done
kill $!
"""
ENDS_THE_SERVER_AND_WAITS = """
echo "the key is $A_KEY"
touch {ended}
until grep -q "has ended; it is started again" {output}; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def jobs(submit, shared) -> dict[str, Submitted]:
    """Several at once: each waits most of its time."""
    files = {"ended": shared / "ended", "output": shared / "again" / "job.log"}
    python = shared / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SERVER_THAT_CAN_BE_ENDED.format(python=sys.executable, **files))
    python.chmod(0o755)
    (shared / "ends.sh").write_text(ENDS_THE_SERVER_AND_WAITS.format(**files))
    ends = {"RETRIEVAL_ENV": f"{shared}/env", "TRAIN_COMMAND": f"bash {shared}/ends.sh", "DOCTOR": "0"}
    (shared / "setup.sh").write_text(f"A_KEY=kept; hostname >>{shared}/set-up")
    ends["JOB_SETUP"] = f"{shared}/setup.sh"
    flags = ["--gpus-per-node=0"]
    cut_off = {"SLURM_STANDIN_CUT_OFF": "node3", "RETRIEVAL_TIMEOUT": "4"}
    return {
        "again": submit("again", "train.sbatch", flags=[*flags, "--nodes=2"], **ends),
        "broken": submit("broken", "train.sbatch", flags=flags, SLURM_STANDIN_BROKEN="node2"),
        "far": submit("far", "train.sbatch", flags=flags, **cut_off),
        "corpus": submit("corpus", "train.sbatch", flags=flags, RETRIEVAL_ARGS="--corpus_path /no/c.jsonl"),
    }


def test_a_server_that_ends_during_training_is_started_again_on_nodes_that_were_set_up(jobs, shared):
    status, output = jobs["again"].finish()
    assert status == 0, output
    assert "the retrieval server on node2 has ended; it is started again" in output
    assert "the key is kept" in (jobs["again"].logs / "training.log").read_text()
    assert {"node1", "node2"} <= set((shared / "set-up").read_text().split())


def test_a_smoke_job_on_gpus_has_what_the_real_job_has_but_for_its_size(submit, shared):
    """Its training is a program that notes what it is given."""
    (shared / "notes.sh").write_text(f'printf "%s\\n" "$@" >{shared}/noted')
    flags = ["--nodes=1"]
    model = "actor_rollout_ref.model.path=/models/7b"
    variables = {"TRAIN_COMMAND": f"bash {shared}/notes.sh", "DOCTOR": "0", "RETRIEVAL_NODES": "0"}
    variables |= {"SMOKE": "gpu", "RETRIEVER_URL": "http://elsewhere:8000/retrieve"}
    status, output = submit("smoke-gpu", "smoke.sbatch", model, flags=flags, **variables).finish()
    assert status == 0, output
    noted = (shared / "noted").read_text().split()
    assert model in noted and "trainer.total_training_steps=2" in noted
    assert not any(word.startswith(("trainer.device", "trainer.backend")) for word in noted)


@pytest.mark.parametrize(
    ("name", "said", "in_log"),
    [
        ("broken", "Ray did not start on node2", "Task launch for StepId=1.0 failed on node node2"),
        ("far", "the retrieval server on node3 is not healthy after 4 s: no answer", ""),
        ("corpus", "the retrieval server on node3 has ended", "there is no file /no/c.jsonl"),
    ],
)
def test_a_part_that_does_not_start_ends_the_job_with_its_log(jobs, name, said, in_log):
    status, output = jobs[name].finish()
    assert status == 1, output
    message, end_of_log = output.split(said)
    assert message.endswith("error: ") and in_log in end_of_log
    assert "training:" not in output


def test_a_sites_own_gpus_time_and_partition_come_from_variables(submit, shared):
    """The file asks for eight GPUs a node: here there are none."""
    variables = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_TIMELIMIT": "1:00:00", "SBATCH_PARTITION": "small"}
    variables |= {"RETRIEVAL_NODES": "0", "RETRIEVER_URL": "http://elsewhere:8000/retrieve", "DOCTOR": "0"}
    job = submit("site", "train.sbatch", flags=["--nodes=1"], TRAIN_COMMAND="echo trained", **variables)
    status, output = job.finish()
    assert status == 0 and "training has ended well" in output, output


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("4", "RETRIEVAL_NODES=4, but the job has 3 nodes"),
        ("0", "RETRIEVAL_NODES=0 needs RETRIEVER_URL="),
    ],
)
def test_a_job_that_can_not_work_is_refused_at_once(submit, number, said):
    flags = ["--gpus-per-node=0"]
    status, output = submit(f"refused-{number}", "train.sbatch", flags=flags, RETRIEVAL_NODES=number).finish()
    assert status == 2 and said in output, output

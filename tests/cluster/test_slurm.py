"""scripts/slurm on a real SLURM of three nodes, which are namespaces of this machine.

Jobs are submitted at a login node. Those that do not train have a small program in the place of the trainer,
and SLURM runs them side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from namespace_nodes import REPOSITORY
from slurm_cluster import COMPUTE_NODES, CPUS_PER_NODE, GPUS_PER_NODE, SlurmCluster, SlurmJob, wait_until

from data_prep.microworld import write_world

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]
ELSEWHERE = {"RETRIEVAL_NODES": "0", "RETRIEVER_URL": "http://elsewhere:8000/retrieve"}
SHARED = "--oversubscribe"  # takes back the --exclusive of train.sbatch


@pytest.fixture(scope="module")
def world(slurm: SlurmCluster) -> Path:
    """A small world in a folder that all nodes see."""
    folder = slurm.folder / "world"
    write_world(7, folder, num_train=64, num_test=20, num_3hop=4)
    return folder


@pytest.fixture(scope="module")
def submit(slurm: SlurmCluster, world: Path) -> Iterator[Callable[..., SlurmJob]]:
    """Submit a script with the small world as its data; the job's folder of runs is removed in the end."""

    def start(name: str, *arguments: str, **variables: str | None) -> SlurmJob:
        return slurm.submit(name, *arguments, **{"DATA_DIR": str(world), **variables})

    yield start
    for job in slurm.jobs:
        shutil.rmtree(REPOSITORY / "verl_checkpoints" / f"test-slurm-{job.folder.name}", ignore_errors=True)


@pytest.fixture(scope="module")
def jobs(submit: Callable[..., SlurmJob], slurm: SlurmCluster) -> dict[str, SlurmJob]:
    """Submit all jobs that do not train."""
    folder = slurm.folder
    notes = {}
    for name in ("site", "smoke-gpu"):
        (folder / f"{name}.sh").write_text(f'printf "%s\\n" "$@" "key=$A_KEY" >{folder}/{name}.noted')
        notes[name] = {"TRAIN_COMMAND": f"bash {folder}/{name}.sh", "DOCTOR": "0", **ELSEWHERE}
    (folder / "key.sh").write_text("A_KEY=kept")
    site = {
        "JOB_SETUP": f"{folder}/key.sh",
        "SBATCH_GPUS_PER_NODE": "1",
        "SBATCH_TIMELIMIT": "1:00:00",
        "SBATCH_PARTITION": "all",
    }
    model = "actor_rollout_ref.model.path=/models/7b"
    no_gpus = ["--gpus-per-node=0", SHARED]
    one_node = [*no_gpus, "--nodes=1"]
    serves = {"RETRIEVAL_NODES": "1"}
    no_corpus = {"RETRIEVAL_ARGS": "--corpus_path /no/c.jsonl"}
    return {
        "too few": submit("too-few", "train.sbatch", flags=no_gpus, RETRIEVAL_NODES="4"),
        "no server": submit("no-server", "train.sbatch", flags=no_gpus, RETRIEVAL_NODES="0"),
        "site": submit("site", "train.sbatch", flags=["--nodes=1", SHARED], **site, **notes["site"]),
        "smoke-gpu": submit(
            "smoke-gpu",
            "smoke.sbatch",
            model,
            flags=["--nodes=1", f"--gpus-per-node={GPUS_PER_NODE}"],
            SMOKE="gpu",
            **notes["smoke-gpu"],
        ),
        "corpus": submit("corpus", "train.sbatch", flags=one_node, **serves, **no_corpus),
        "slow": submit("slow", "train.sbatch", flags=one_node, **serves, RETRIEVAL_TIMEOUT="1"),
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too few", "RETRIEVAL_NODES=4, but the job has 3 nodes"),
        ("no server", "RETRIEVAL_NODES=0 needs RETRIEVER_URL="),
    ],
)
def test_a_job_that_can_not_work_is_refused_at_once(jobs, name, message):
    job = jobs[name]
    assert job.wait_for_end(60) == "FAILED" and job.exit_status() == 2
    assert message in job.output()


def test_a_sites_own_gpus_time_and_partition_come_from_variables(jobs, slurm):
    """The file asks for eight GPUs a node and 24 hours."""
    job = jobs["site"]
    assert job.wait_for_end(60) == "COMPLETED", job.describe()
    assert "training has ended well" in job.output()
    assert job.properties()["TimeLimit"] == "01:00:00"
    noted = (slurm.folder / "site.noted").read_text().split()
    assert "trainer.n_gpus_per_node=1" in noted and "key=kept" in noted


def test_a_smoke_job_on_gpus_has_what_the_real_job_has_but_for_its_size(jobs, slurm):
    job = jobs["smoke-gpu"]
    assert job.wait_for_end(60) == "COMPLETED", job.describe()
    noted = (slurm.folder / "smoke-gpu.noted").read_text().split()
    assert "actor_rollout_ref.model.path=/models/7b" in noted and "trainer.total_training_steps=2" in noted
    assert f"trainer.n_gpus_per_node={GPUS_PER_NODE}" in noted
    assert not any(word.startswith(("trainer.device", "trainer.backend")) for word in noted)


@pytest.mark.parametrize(
    ("name", "message", "in_log"),
    [
        ("slow", "is not healthy after 1 s", ""),
        ("corpus", "has ended.", "there is no file /no/c.jsonl"),
    ],
)
def test_a_part_that_does_not_start_ends_the_job_with_its_log(jobs, name, message, in_log):
    job = jobs[name]
    assert job.wait_for_end(120) == "FAILED" and job.exit_status() == 1, job.describe()
    _, error, end_of_log = job.output().partition("error: ")
    assert error and message in end_of_log and in_log in end_of_log
    assert "training:" not in job.output()


def test_waiting_jobs_are_told_why_and_what_to_do(slurm: SlurmCluster):
    def waits(*flags: str) -> str:
        return slurm.command(
            ["sbatch", "--parsable", "--output=/dev/null", *flags, "--wrap=sleep 600"]
        ).strip()

    # Jobs without GPUs are not in their way, nor they in that of others.
    running = waits("--nodes=3", f"--gpus-per-node={GPUS_PER_NODE}", "--ntasks-per-node=1")
    jobs = {
        "Resources": (waits("--gpus-per-node=1"), "nodes are busy: ask for fewer"),
        "Priority": (waits("--gpus-per-node=1"), "others are before it"),
        "JobHeldUser": (waits("--hold"), "it is held: scontrol release"),
        "BeginTime": (waits("--begin=now+1hour"), "it was put off"),
        "Dependency": (waits(f"--dependency=afterok:{running}"), "it waits for another job"),
        "PartitionTimeLimit": (waits("--time=2-00:00:00"), "compare --nodes and --time with sinfo"),
    }
    told: dict[str, str] = {}

    def has_reasons() -> bool:
        lines = slurm.command(
            ["bash", "scripts/slurm/pending.sh", running, *(job_id for job_id, _ in jobs.values())]
        )
        told.update((line.split()[1].rstrip(":"), line) for line in lines.splitlines())
        return all(f"waits: {reason};" in told.get(job_id, "") for reason, (job_id, _) in jobs.items())

    try:
        wait_until(has_reasons, 60, lambda: str(told))
    finally:
        slurm.command(["scancel", running, *(job_id for job_id, _ in jobs.values())])
    assert f"job {running}: RUNNING on all, it does not wait" in told.values()
    for job_id, advice in jobs.values():
        assert advice in told[job_id]


SMALL = """
    trainer.device=cpu data.train_batch_size=4 data.val_data_num=4 data.extra_val_files=null
    actor_rollout_ref.actor.ppo_mini_batch_size={rows} critic.ppo_mini_batch_size={rows}
    actor_rollout_ref.rollout.n_agent={answers} trainer.val_before_train=false trainer.val_modes=[greedy]
    trainer.test_freq=-1 trainer.save_freq=1
"""
PPO = [*SMALL.format(rows=4, answers=1).split(), "trainer.total_training_steps=4", "trainer.critic_warmup=0"]
GRPO = [
    *SMALL.format(rows=8, answers=2).split(),
    "trainer.total_training_steps=10000",
    "trainer.max_restarts=3",
]


@pytest.fixture(scope="module")
def programs(submit: Callable[..., SlurmJob], slurm: SlurmCluster) -> dict[str, SlurmJob]:
    """Submit jobs of one node that ask other servers than a run which searches, or none."""
    tests = {"verifiers": [{"name": "code", "label": json.dumps(["assert f() == 7"])}]}
    code_row = {"prompt": "f", "env_class": "single_turn", "reward_model": {"ground_truth": tests}}
    sum_row = {"prompt": "1+1=", "env_class": "gsm8k", "reward_model": {"ground_truth": "2"}}
    rows = {
        "code": {"train": code_row, "validation": code_row},
        "sums": {"train": sum_row, "test": sum_row},
        "sft": {
            "sft_train": {"segments": [{"text": "Who?", "trained": False}, {"text": "I", "trained": True}]}
        },
    }
    for name, files in rows.items():
        (slurm.folder / f"{name}-rows").mkdir()
        for stem, row in files.items():
            line = json.dumps({"data_source": name, **row}) + "\n"
            (slurm.folder / f"{name}-rows" / f"{stem}.jsonl").write_text(line * 16)
    small = [*SMALL.format(rows=8, answers=2).split(), "trainer.total_training_steps=1"]
    evaluate = f"-m verl.evaluation --benchmarks {slurm.folder}/world/test.parquet -n 2"

    def submit_one(name: str, *arguments: str, **variables: str | None) -> SlurmJob:
        flags = ["--nodes=1", "--gpus-per-node=0", SHARED]
        return submit(name, "train.sbatch", *arguments, flags=flags, DOCTOR="0", **variables)

    return {
        "sft": submit_one(
            "sft",
            "trainer.device=cpu",
            "trainer.total_training_steps=1",
            "data.train_batch_size=8",
            f"trainer.default_local_dir={slurm.folder}/sft/run",
            TRAIN_COMMAND="bash train_sft.sh",
            DATA_DIR=f"{slurm.folder}/sft-rows",
        ),
        "code": submit_one(
            "code",
            *small,
            f"trainer.default_local_dir={slurm.folder}/code/run",
            DATA_DIR=f"{slurm.folder}/code-rows",
        ),
        "sums": submit_one(
            "sums",
            *small,
            f"trainer.default_local_dir={slurm.folder}/sums/run",
            DATA_DIR=f"{slurm.folder}/sums-rows",
        ),
        "evaluation": submit_one(
            "evaluation",
            f"--out={slurm.folder}/evaluation/results",
            "max_turns=2",
            TRAIN_COMMAND=f"python {evaluate} --model data_prep/base_model",
            DATA_DIR=None,
        ),
    }


@pytest.mark.parametrize(
    ("name", "servers"),
    [("sft", set()), ("code", {"code"}), ("sums", set()), ("evaluation", {"retrieval"})],
)
def test_a_job_has_the_servers_that_its_rows_and_program_ask_and_no_others(programs, name, servers):
    job = programs[name]
    assert job.wait_for_end(400) == "COMPLETED", job.describe()
    assert "training has ended well" in job.output()
    started = {path.name.partition("-node")[0] for path in job.logs.glob("*-node?.log")}
    assert started == servers
    for server in servers:
        assert f"{server} server ready: http://node" in job.output()


@pytest.fixture(scope="module")
def smoke(submit: Callable[..., SlurmJob], slurm: SlurmCluster) -> SlurmJob:
    """Submit the smoke job where nothing but SLURM is known: a file says where the environment is."""
    setup = f"""
        VIRTUAL_ENV={sys.prefix} PATH={Path(sys.executable).parent}:$PATH
        hostname >>{slurm.folder}/set-up
        http_proxy=http://10.77.0.99:3128    # nobody is there: what goes by it is lost
    """
    (slurm.folder / "setup.sh").write_text(setup)
    variables = {"JOB_SETUP": f"{slurm.folder}/setup.sh", "VIRTUAL_ENV": None, "PATH": "/usr/bin:/bin"}
    run_dir = slurm.folder / "smoke" / "run"
    override = f"trainer.default_local_dir={run_dir}"
    return submit("smoke", "smoke.sbatch", override, DATA_DIR=None, NO_PROXY="elsewhere", **variables)


@pytest.fixture(scope="module")
def stopped(submit: Callable[..., SlurmJob], smoke: SlurmJob, slurm: SlurmCluster) -> SlurmJob:
    """Submit a job of PPO on a training node and a server's, on nodes that the smoke job has."""
    return submit(
        "stopped",
        "train.sbatch",
        *PPO,
        f"trainer.default_local_dir={slurm.folder}/stopped/run",
        flags=["--nodes=2", "--gpus-per-node=0", "--time=20", "--signal=B:USR1@120", SHARED],
        TRAIN_COMMAND="bash train_ppo.sh",
        REQUEUE="1",
        DOCTOR="0",
    )


@pytest.fixture(scope="module")
def serving(submit: Callable[..., SlurmJob]) -> SlurmJob:
    """Submit a job that only serves."""
    flags = ["--nodes=1", "--gpus-per-node=0", SHARED]
    return submit("serving", "train.sbatch", flags=flags, RETRIEVAL_NODES="1")


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_job_goes_back_into_the_queue_before_its_time_limit_and_ends_as_one_that_was_never_stopped(
    submit, serving, stopped, slurm
):
    stopped.wait_for(lambda: (stopped.folder / "run" / "global_step_1").is_dir(), 600)
    (trainer,) = stopped.processes("verl.trainer.main_ppo")
    trainer.send_signal(signal.SIGSTOP)  # so that it has not ended when SLURM comes to look, twice a minute
    limit = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 150))
    slurm.command(["scontrol", "update", f"JobId={stopped.id}", f"EndTime={limit}"])
    _, url = serving.wait_for_line("serving: RETRIEVER_URL=(.+)", 120)
    never_stopped = submit(
        "never-stopped",
        "train.sbatch",
        *PPO,
        f"trainer.default_local_dir={slurm.folder}/never-stopped/run",
        flags=["--nodes=1", "--gpus-per-node=0", SHARED],
        TRAIN_COMMAND="bash train_ppo.sh",
        RETRIEVAL_NODES="0",
        RETRIEVER_URL=url,
        DOCTOR="0",
    )
    stopped.wait_for_line("SIGUSR1, as before the time limit", 90)
    trainer.send_signal(signal.SIGCONT)
    stopped.wait_for_line("the job goes back into the queue", 90)
    assert stopped.wait_for_end(600) == "COMPLETED", stopped.describe()
    assert stopped.properties()["Restarts"] == "1"
    assert never_stopped.wait_for_end(600) == "COMPLETED", never_stopped.describe()
    rows, expected = (rows_of(job.folder / "run") for job in (stopped, never_stopped))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, expected_row in zip(rows, expected, strict=True):
        names = [name for name in expected_row if name.startswith(("actor/", "critic/", "response_length/"))]
        assert names or not row["step"]
        assert {name: row[name] for name in names} == {name: expected_row[name] for name in names}
    (server,) = serving.processes("search_r1.search.server")
    server.kill()
    serving.wait_for_line("has ended; it is started again", 30)
    serving.cancel()
    assert serving.wait_for_end(30) == "CANCELLED"


def test_the_smoke_job_trains_on_two_nodes_and_searches_on_a_third(smoke, stopped, slurm):
    assert smoke.wait_for_end(600) == "COMPLETED", smoke.describe()
    port = 20000 + smoke.id
    for line in (
        f"job {smoke.id}: training on: node1 node2; retrieval on: node3",
        f"retrieval server ready: http://node3:{port}/retrieve",
        f"Ray cluster ready: 2 nodes at 10.77.0.1:{25000 + smoke.id}",
        "training has ended well",
    ):
        assert line in smoke.output()
    rows = rows_of(smoke.folder / "run")
    assert [row["step"] for row in rows if "env/number_of_valid_search" in row] == [1, 2]
    assert sum(row.get("env/number_of_valid_search", 0) for row in rows) > 0
    assert (smoke.folder / "run" / "global_step_2").is_dir()
    parts = {"doctor.log", "training.log", "ray-node1.log", "ray-node2.log", "retrieval-node3.log"}
    assert {path.name for path in smoke.logs.glob("*.log")} == parts | {"ray-waiting.log", "servers.log"}
    assert set((slurm.folder / "set-up").read_text().split()) == set(COMPUTE_NODES)
    assert "training on: node1; retrieval on: node2" in stopped.output(), "two jobs share nodes"


def test_a_lost_node_and_a_dead_server_are_mended_and_a_job_that_is_cancelled_leaves_nothing(submit, slurm):
    run_dir = slurm.folder / "lost" / "run"
    impatient = {"RAY_health_check_failure_threshold": "3", "RAY_health_check_timeout_ms": "2000"}
    job = submit(
        "lost",
        "train.sbatch",
        *GRPO,
        f"trainer.default_local_dir={run_dir}",
        flags=["--gpus-per-node=0", SHARED],
        DOCTOR="0",
        **impatient,
    )
    try:
        job.wait_for(lambda: (run_dir / "global_step_1").is_dir(), 600)
        (server,) = job.processes("search_r1.search.server")
        server.kill()
        job.wait_for_line("the retrieval server on node3 has ended; it is started again", 60)
        slurm.nodes["node2"].cut_off()
        job.wait_for_line(r"trainer-\d on node node2 .*its node is lost", 60, log="training.log")
        slurm.nodes["node2"].reconnect()
        job.wait_for_line("restart 1 of 3", 300, log="training.log")
        (record,) = map(json.loads, (run_dir / "restarts.jsonl").read_text().splitlines())
        following = run_dir / f"global_step_{record['from_step'] + 1}"
        job.wait_for(following.is_dir, 600)
    finally:
        job.cancel()
    begun = time.monotonic()
    assert job.wait_for_end(60) == "CANCELLED"
    wait_until(lambda: not slurm.processes_of_jobs(), 60, lambda: str(slurm.processes_of_jobs()))
    assert time.monotonic() - begun < 25
    output = job.output()
    assert "SIGTERM: everything is ended" in output and "is killed" not in output
    assert output.splitlines()[-1].endswith(f"logs: {job.logs}")
    newest = int((run_dir / "latest_checkpointed_iteration.txt").read_text())
    assert newest > record["from_step"] and (run_dir / f"global_step_{newest}").is_dir()
    rows = rows_of(run_dir)
    steps = [row["step"] for row in rows if row["step"]]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] >= newest
    assert rows[-1]["trainer/num_restarts"] == 1


def test_a_job_that_slurm_takes_a_node_from_goes_back_into_the_queue(submit, slurm):
    (slurm.folder / "waits.sh").write_text("exec sleep 600")
    variables = {"TRAIN_COMMAND": f"bash {slurm.folder}/waits.sh", "REQUEUE": "1", "DOCTOR": "0"}
    flags = ["--nodelist=node1,node2", "--nodes=2", "--gpus-per-node=0", SHARED]
    job = submit("given-up", "train.sbatch", flags=flags, **variables)
    job.wait_for_line("training: bash", 240)
    slurm.command(["scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test"])
    try:
        job.wait_for_line("SLURM has taken node2 out of the job: all is ended", 60)
        job.wait_for_line("the job goes back into the queue", 60)
        job.wait_for(lambda: job.state() == "PENDING", 60)
        assert job.properties()["Restarts"] == "1"
    finally:
        job.cancel()
        slurm.wait_until_idle()  # the node comes back by itself, as its daemon answers


def test_a_node_without_its_daemon_ends_the_job_with_its_name(submit, slurm):
    """Ray has all cores of the other node, which the job has for itself."""
    slurm.stop_slurmd("node2")
    flags = ["--nodelist=node1,node2", "--nodes=2", f"--gpus-per-node={GPUS_PER_NODE}"]
    try:
        job = submit("broken", "train.sbatch", flags=flags, **ELSEWHERE)
        job.wait_for(lambda: job.processes("verl.single_controller.ray.agent_ports"), 60)
        (ray,) = job.processes("verl.single_controller.ray.agent_ports")
        num_cores = min(CPUS_PER_NODE, len(os.sched_getaffinity(0)))
        assert f"--num-cpus={num_cores}" in ray.cmdline()
        job.wait_for_line("srun: Job step aborted", 120)
    finally:
        slurm.start_slurmd("node2")
    assert job.wait_for_end(60) == "FAILED" and job.exit_status() == 1, job.describe()
    assert "error: Ray did not start on node2. The end of" in job.output()
    assert "failed on node node2" in job.output()

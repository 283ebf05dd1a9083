"""scripts/slurm/pending.sh, with a stand-in for squeue: SLURM has limits of a QOS only with accounting.

tests/cluster/test_slurm.py has the reasons that a SLURM without it gives."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = """7|PENDING|5|gpu|2026-12-01T04:00:00|Resources
8|PENDING|64|gpu|N/A|PartitionNodeLimit
9|PENDING|2|gpu|N/A|QOSMaxGRESPerUser
10|RUNNING|2|gpu|2026-11-30T04:00:00|None
"""


def pending(tmp_path: Path, jobs: str, *arguments: str) -> tuple[str, str]:
    """(what it says, what squeue was asked)"""
    (tmp_path / "jobs").write_text(jobs)
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/jobs\n')
    squeue.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "USER": "ada"}
    command = ["bash", "scripts/slurm/pending.sh", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, (tmp_path / "asked").read_text()


def test_each_job_that_waits_has_its_reason_its_expected_start_and_what_to_do(tmp_path):
    said, asked = pending(tmp_path, JOBS)
    busy, limit, quota, running = said.splitlines()
    assert "--user ada --states=PENDING" in asked and "%r" in asked
    assert busy.startswith("job 7 (5 nodes of gpu) waits: Resources; expected to start: 2026-12-01T04:00")
    assert "ask for fewer --nodes" in busy
    assert "expected to start: not known yet" in limit and "compare --nodes and --time with sinfo" in limit
    assert "a limit of your account or QOS is reached" in quota and "user=ada" in quota
    assert running == "job 10: RUNNING on gpu, it does not wait"


def test_jobs_by_number_and_none_at_all(tmp_path):
    said, asked = pending(tmp_path, "", "7", "8")
    assert "--jobs 7,8" in asked and said == "no job of that kind is in the queue\n"

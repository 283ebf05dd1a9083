"""scripts/gpu_acceptance.py on CPU: checks run, are written down, and are not run twice.

Those that train are command lines (`_train`), which other tests run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ["step", "greedy", "dense"]


def accept(out: Path, *arguments: str) -> str:
    command = [sys.executable, "scripts/gpu_acceptance.py", "--quick", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_checks_run_on_cpu_and_are_not_run_again(tmp_path):
    said = accept(tmp_path, "--only", *CHECKS)
    results = json.loads((tmp_path / "gpu_acceptance.json").read_text())["checks"]
    assert list(results) == CHECKS and all(results.values())
    assert not [line for lines in results.values() for line in lines if line["verdict"] == "fail"]
    passed = {line["name"] for lines in results.values() for line in lines if line["verdict"] == "pass"}
    assert {"log-probs apart, mean", "greedy tokens equal"} <= passed
    page = (tmp_path / "gpu_acceptance.md").read_text()
    assert page.count("\n| ") - 1 == sum(map(len, results.values()))
    assert accept(tmp_path, "--only", "greedy", "dense").splitlines()[:-1] == [
        line for line in said.splitlines() if line[10:].startswith(("greedy", "dense"))
    ]

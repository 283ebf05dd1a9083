"""docs/tutorial.md: its files and commands, in their order, in a folder that has what a clone has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_command_of_the_tutorial_works_and_the_model_learns_the_task(tmp_path):
    for name in ("verl", "search_r1", "data_prep", "configs", "examples", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(
        r"^```(\S+)( [^\n]*)?\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = {}
    for kind, about, text in blocks:
        if kind == "py":
            (tmp_path / about.strip()).parent.mkdir(exist_ok=True)
            (tmp_path / about.strip()).write_text(text)
        elif about.strip() != "no-test":
            command = ["bash", "-euc", text]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            said[text.split()[2]] = done.stdout
    assert list(said) == ["first.last_name", "verl.trainer.main_ppo", "verl.monitor"]
    summary = json.loads((tmp_path / "runs/first/summary.json").read_text())
    (evaluated,) = tmp_path.glob("evals/*/global_step_50/test/summary.json")
    assert json.loads(evaluated.read_text())["avg@4"][0] > 0.8, summary
    assert (tmp_path / "runs/first/trajectories.html").exists()

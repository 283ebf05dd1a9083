"""The files and commands of docs/your_own_questions.md work in order, with a random model as Gemma."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from random_gemma import write_random_gemma

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "your_own_questions.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_works_and_its_row_is_the_first_one(tmp_path):
    folders = ("verl", "search_r1", "data_prep", "configs", "scripts")
    for name in (*folders, "train_sft.sh", "train_grpo.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_random_gemma(tmp_path / "data" / "gemma-3-270m")  # `search-r1 gemma` leaves it as it is
    programs = tmp_path / "programs"
    programs.mkdir()
    command = programs / "search-r1"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m search_r1.command "$@"\n')
    command.chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RETRIEVER_URL", "SEED", "DATA_DIR")
    }
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"PATH": path, "PYTHONPATH": str(tmp_path), "VIRTUAL_ENV": sys.prefix}
    said = []
    for kind, about, text in re.findall(r"^```(\S+)( [^\n]*)?\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        if kind == "json" and about != " row":
            (tmp_path / about.strip()).write_text(text)
        elif kind == "json":
            assert json.loads(text) == json.loads((tmp_path / "data/mine/train.jsonl").open().readline())
        elif about != " no-test":
            short = text.replace("total_training_steps=40", "total_training_steps=2")
            line = ["bash", "-euc", short]
            done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            said.append(done.stdout + done.stderr)
    rows, _, supervised, trained = said
    assert "data/mine/train.jsonl: 4 rows" in rows
    assert "note: data.train_batch_size is 4, not 16: there are 4 training rows" in trained
    assert re.search(r"note: data.train_batch_size is \d+, not 16", supervised)
    assert json.loads((tmp_path / "verl_checkpoints/mine-grpo/summary.json").read_text())
    assert (tmp_path / "verl_checkpoints/mine-grpo/trajectories.html").exists()

"""Commands of README and docs under a Python without any package: one line says which Python to use."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"python ((?:-m (?:verl|search_r1|data_prep)[\w.]*)|(?:scripts/)?\w+(?:/\w+)*\.py)")
COMMANDS = sorted(
    {command for page in PAGES for command in COMMAND.findall(page.read_text(encoding="utf-8"))}
)


@pytest.mark.parametrize(
    "command", ["infer.py", "scripts/convert_checkpoint.py", "-m verl.trainer.main_ppo", *COMMANDS]
)
def test_a_python_without_packages_is_told_which_one_to_use(command):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))
    }
    arguments = [sys.executable, "-S", *command.split(), "--help"]  # -S: no site-packages
    ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    if ended.returncode == 0 and "usage:" in ended.stdout:  # its packages are asked for later
        return
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert re.match(r"error: \S+ has no \w+\. (Use|Run) .* or install the project: ", ended.stderr)


def test_a_ctrl_c_while_a_program_is_imported_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        verl._end_program(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")

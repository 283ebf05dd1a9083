"""The search-r1 command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from search_r1 import command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "search_r1.command", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_and_needs_nothing_else():
    result = run("--help")
    assert result.returncode == 0
    for name in command.COMMANDS:
        assert f"  {name} " in result.stdout


def test_an_unknown_command_names_the_nearest_one():
    result = run("trian")
    assert result.returncode == 2 and "did you mean train?" in result.stderr


@pytest.mark.parametrize("role", ["trainer", "orchestrator", "inference"])
def test_the_roles_of_prime_rl_are_one_command(role, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search-r1", role, "@", "run.toml"])
    with pytest.raises(SystemExit):
        command.main()
    assert "search-r1 rl @ run.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["serve", "index", "microworld", "qa", "wiki18", "gemma", "trim", "infer", "convert"]
)
def test_each_python_command_shows_its_own_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search-r1", name, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert not end.value.code and capsys.readouterr().out.startswith("usage:")


def run_installed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, as it was installed from this checkout."""
    code = (
        f"import sys; sys.path.insert(0, {str(command.ROOT)!r}); from search_r1.command import main; main()"
    )
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_command_acts_on_the_checkout_in_which_it_is_typed(tmp_path):
    clone = tmp_path / "clone"
    (clone / "search_r1").mkdir(parents=True)
    (clone / "search_r1" / "__init__.py").touch()
    shutil.copy(command.ROOT / "search_r1" / "command.py", clone / "search_r1")
    (clone / "train_grpo.sh").write_text('echo "in $(cd "$(dirname "$0")" && pwd) with $*"\n')
    (clone / "docs").mkdir()
    for folder in (clone, clone / "docs"):
        done = run_installed(folder, "train", "trainer.seed=1")
        assert (done.returncode, done.stdout) == (0, f"in {clone} with trainer.seed=1\n")
        assert done.stderr == (
            f"search-r1: acts on the checkout {clone}, not on {command.ROOT}, where it was installed\n"
        )
    outside = run_installed(tmp_path, "rows", "--help")
    assert outside.returncode == 0 and outside.stderr == f"search-r1: acts on the checkout {command.ROOT}\n"
    assert run_installed(command.ROOT / "docs", "rows", "--help").stderr == ""


def test_an_installation_has_the_command(tmp_path):
    """setup.py declares it, and what it names can be called."""
    line = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(line, cwd=command.ROOT, check=True, capture_output=True, timeout=60)
    (metadata,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (script,) = metadata.entry_points.select(group="console_scripts")
    assert script.name == "search-r1" and script.load() is command.main


def test_what_each_command_runs_is_there():
    for target, _ in command.COMMANDS.values():
        path = command.ROOT / target.split()[0]
        assert path.is_file() or importlib.util.find_spec(target) is not None

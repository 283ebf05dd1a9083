"""The search-r1 command."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

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

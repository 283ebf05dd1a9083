"""Plugins: packages beside verl that give its programs what they ask for."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from verl import plugins
from verl.plugins import HOOKS, hook, load_plugins, provide


@pytest.fixture
def registered(monkeypatch) -> dict[str, str]:
    """The hooks that are provided; what a test adds goes away."""
    load_plugins()
    monkeypatch.setattr(plugins, "_provided", dict(plugins._provided))
    return plugins._provided


def test_every_hook_is_provided_and_its_object_is_there(registered):
    assert load_plugins() == ("data_prep", "search_r1")
    assert registered.keys() == HOOKS.keys()
    for entry_point in registered.values():
        module, _, name = entry_point.partition(":")
        spec = importlib.util.find_spec(module)
        defined = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        assert name in {getattr(node, "name", None) for node in defined}, entry_point


def test_a_hook_is_imported_when_it_is_asked_for():
    assert hook("fetch_model").__module__ == "data_prep.hub"


def test_a_package_beside_verl_is_found_by_its_module(tmp_path, monkeypatch, registered):
    registered.clear()
    for name in ("maze", "no_plugin"):
        (tmp_path / name).mkdir()
    (tmp_path / "maze" / "verl_plugin.py").write_text(
        "from verl.plugins import provide\nprovide('fetch_model', 'maze.verl_plugin:fetch')\n"
        "def fetch(name):\n    return name * 2\n"
    )
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "verl" / "plugins.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "load_plugins", load_plugins.__wrapped__)
    assert hook("fetch_model")("ab") == "abab"
    with pytest.raises(ValueError, match=r"no object for the hook 'check_search' in the plugins \(maze\)"):
        hook("check_search")


def test_wrong_names_and_two_objects_for_one_hook_are_refused(registered):
    with pytest.raises(ValueError, match="Found hook 'fetch_modell'; expected one of agent_factory"):
        provide("fetch_modell", "maze:fetch")
    with pytest.raises(ValueError, match="Found two objects for the hook 'fetch_model'"):
        provide("fetch_model", "maze:fetch")


def test_the_search_environment_is_found_without_an_import_of_its_package():
    code = "from verl.environments.registry import load_class; print(load_class('search')[0].__module__)"
    root = Path(__file__).parents[1]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "search_r1.llm_agent.generation"

"""A missing package is named with the extra of setup.py that holds it, before anything is loaded."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from verl.config import load_config
from verl.data.row_check import check_small_files
from verl.data.row_environments import check_environments
from verl.utils import extras
from verl.utils.extras import OPTIONAL_PACKAGES, MissingPackage, check_packages, install_command

ROOT = Path(__file__).parents[2]
ROW = '{"prompt": "Write.", "data_source": "x", "reward_model": {"verifier": "%s", "ground_truth": %s}}\n'


def packages_of_extras() -> dict[str, set[str]]:
    """Return the packages of each extra in setup.py."""
    import setuptools

    given: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return {
        extra: {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
        for extra, requirements in given["extras_require"].items()
    }


def test_each_package_is_in_the_extra_that_messages_name():
    known = packages_of_extras()
    wrong = {package: extra for package, extra in OPTIONAL_PACKAGES.values() if package not in known[extra]}
    assert wrong == {}


@pytest.mark.parametrize("file", ["README.md", "setup.py"])
def test_the_list_of_extras_is_that_of_setup_py(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == "README.md":
        listed = re.search(r"^\*\*Extras\.\*\* (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
        names = re.findall(r"`([\w-]+)`", listed[1])
    else:
        names = re.findall(r"`([\w-]+)`", text.partition('"""\n')[0])
    assert set(packages_of_extras()) <= set(names), "each extra stands there"
    if file == "README.md":
        assert sorted(names) == sorted(packages_of_extras())


@pytest.fixture
def missing(monkeypatch):
    """Return a function that makes a module look as if it were not installed."""
    gone = set()
    installed = extras.is_installed
    monkeypatch.setattr(extras, "is_installed", lambda name: name not in gone and installed(name))

    def hide(name: str) -> None:
        gone.add(name)
        monkeypatch.setitem(sys.modules, name, None)

    return hide


def config_of(tmp_path, line: str, *settings: str):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(line * 3)
    files = [f"data.train_files={rows}", f"data.val_files={rows}"]
    return load_config([*files, "data.train_batch_size=2", *settings])


@pytest.mark.parametrize(
    ("verifier", "label", "module", "extra"),
    [
        ("ifeval", '"[]"', "if_verifiable", "environments"),
        ("math", '"1"', "math_verify", "train"),
        ("reasoning_gym", '"{}"', "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_verifier_s_package_is_named_once_for_all_rows(
    tmp_path, missing, monkeypatch, verifier, label, module, extra
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no check is remembered
    missing(module)
    config = config_of(tmp_path, ROW % (verifier, label))
    with pytest.raises(MissingPackage) as error:
        check_small_files(config)
    assert f"verifier {verifier!r} needs the package" in str(error.value)
    assert install_command(extra) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("env_class", "module", "extra"),
    [
        ("gymnasium", "gymnasium", "environments"),
        ("verifiers", "verifiers", "verifiers"),
        ("text2sql", "sqlglot", "train"),
    ],
)
def test_an_environment_s_package_is_named(tmp_path, missing, env_class, module, extra):
    missing(module)
    config = config_of(tmp_path, '{"prompt": "Play."}\n', f"environment.env_class={env_class}")
    with pytest.raises(MissingPackage, match=f"environment '{env_class}' needs the package") as error:
        check_environments(config)
    assert install_command(extra) in str(error.value)


def test_an_agent_s_package_is_named(tmp_path, missing, monkeypatch):
    """The function is imported at the start, and not in each episode."""
    missing("agents")
    monkeypatch.delitem(sys.modules, "examples.search_agent", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    config = config_of(tmp_path, '{"prompt": "Play."}\n', "@configs/agent.yaml")
    with pytest.raises(
        ValueError, match=r"function='examples.search_agent:run'.*import of agents halted"
    ) as error:
        check_environments(config)
    assert install_command("agents") in str(error.value)


def test_wrong_settings_of_an_agent_are_said_at_the_start(tmp_path):
    rows = '{"prompt": "Play."}\n'
    for settings, said in (("{}", "function=None"), ("{function: 'a:b', tool_format: x}", "tool_format='x'")):
        given = ["environment.env_class=agent", f"environment.env_config.agent={settings}"]
        with pytest.raises(ValueError, match=said):
            check_environments(config_of(tmp_path, rows, *given))


def test_what_is_installed_passes():
    check_packages("this test", "pyarrow", "peft")

"""The log of a program: its level, and a file of its own."""

from __future__ import annotations

import logging
import sys

import pytest

from verl.utils.logs import level_or, start_logging


@pytest.fixture(autouse=True)
def log(monkeypatch):
    """The streams and the log of this process are as before in the end."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "argv", ["prog", "a b", "--api_key", "k", "--serp_api_key=k"])
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    root.handlers = []
    yield monkeypatch
    root.level, root.handlers = before


def test_all_that_a_program_prints_and_logs_is_in_a_file_of_its_own_too(log, tmp_path, capsys):
    log.setenv("VERL_LOG_DIR", str(tmp_path / "new" / "logs"))
    log.setenv("VERL_LOGGING_LEVEL", "INFO")
    start_logging("some_program")
    print("printed")
    logging.getLogger("verl.some").info("informed")
    logging.getLogger("verl.some").debug("not asked for")
    [file] = (tmp_path / "new" / "logs").glob("some_program-*.log")
    header, printed, informed = file.read_text().splitlines()
    assert header.endswith("prog 'a b' --api_key ... --serp_api_key=...") and printed == "printed"
    assert informed.endswith("INFO verl.some: informed")
    shown = capsys.readouterr()
    assert shown.out == "printed\n" and shown.err.endswith("informed\n")
    assert level_or("error") == "info"


def test_without_the_variables_nothing_changes(log):
    for name in ("VERL_LOG_DIR", "VERL_LOGGING_LEVEL"):
        log.delenv(name, raising=False)
    stream = sys.stdout
    handlers = logging.getLogger().handlers[:]
    start_logging("some_program")
    assert sys.stdout is stream and logging.getLogger().handlers == handlers
    assert level_or("error") == "error"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VERL_LOGGING_LEVEL", "loud", "expected one of debug, info, warning, error"),
        ("VERL_LOG_DIR", "/dev/null/logs", "can't be written (Not a directory)"),
    ],
)
def test_mistakes_end_the_program_with_one_line(log, capsys, name, value, said):
    log.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        start_logging("some_program")
    assert ended.value.code == 2 and said in capsys.readouterr().err

"""Long work says what it is, that it goes on, and how long it took."""

import re
import time

import pytest

from verl.utils import announcing


def test_long_work_is_said_and_short_work_is_not(capsys, monkeypatch):
    monkeypatch.setattr(announcing, "FIRST_AFTER", 0.05)
    monkeypatch.setattr(announcing, "EVERY", 0.05)
    with announcing.announce("loading"):
        time.sleep(0.4)
    with pytest.raises(KeyError), announcing.announce("short"):
        raise KeyError
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loading ..." and lines[-1] == "loading: done after 0 s" and len(lines) >= 3
    assert all(re.fullmatch(r"loading: \d+ s so far", line) for line in lines[1:-1])

"""scripts/check_resume.py: a run with too few steps is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import check_resume  # noqa: E402


def test_a_run_too_short_to_be_killed_three_times_is_refused_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_resume.py", "--steps", "3"])
    with pytest.raises(SystemExit) as ended:
        check_resume.main()
    assert ended.value.code == 2
    assert "--steps: found 3, expected 4 or more" in capsys.readouterr().err

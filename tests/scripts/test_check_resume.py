"""scripts/check_resume.py: a run with too few steps is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts import check_resume  # noqa: E402


def metrics(folder: Path, *lines: dict) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_too_short_to_be_killed_three_times_is_refused_with_the_reason(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check_resume.py", "--steps", "4"])
    with pytest.raises(SystemExit) as ended:
        check_resume.main()
    assert ended.value.code == 2
    assert "--steps: found 4, expected 8 or more" in capsys.readouterr().err

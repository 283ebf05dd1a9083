"""The pages of docs/ as a site: it builds without a warning, and has all of them in its menu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def pages(menu) -> list[str]:
    """The files that a menu names."""
    if isinstance(menu, str):
        return [menu]
    parts = menu.values() if isinstance(menu, dict) else menu
    return [page for part in parts for page in pages(part)]


def test_the_site_builds_and_its_menu_has_every_page(tmp_path):
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(menu)) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "which stands last?" in (tmp_path / "site" / "tutorial" / "index.html").read_text()

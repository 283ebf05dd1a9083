"""README and docs name only what there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("verl", "search_r1", "data_prep", "scripts", "tests", "examples", "configs", "docs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_modules_that_a_page_names_are_there(page):
    text = re.sub(r"^\| verl .*", "", page.read_text(), flags=re.MULTILINE)  # rows about verl's own files
    files = re.findall(
        rf"(?<![\w/.~-])((?:{'|'.join(OURS)})/[\w/.-]*\.(?:py|sh|yaml|json|md|sbatch|png))", text
    )
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not link.startswith("http")]
    modules = re.findall(r"python -m ((?:verl|search_r1|data_prep)[\w.]*)", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_messages_that_the_troubleshooting_page_quotes_are_said():
    source = " ".join(path.read_text() for folder in OURS[:2] for path in (ROOT / folder).rglob("*.py"))
    quotes = re.findall(r'^\| "([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert quotes and [quote for quote in quotes if quote not in source] == []


def test_every_message_that_names_pip_names_the_file_with_the_versions():
    lines = [line for folder in OURS[:3] for path in (ROOT / folder).rglob("*.py") for line in path.open()]
    calls = [line.strip() for line in lines if "pip install" in line]
    assert len(calls) > 5 and [line for line in calls if "pip install -c" not in line] == []

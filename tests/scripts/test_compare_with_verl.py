"""docs/verl_names.md lists all that differs between the names of verl 0.9.1 and ours."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import compare_with_verl as compare  # noqa: E402

SOURCE = os.environ.get("VERL_SOURCE")  # a wheel, an sdist or a folder of verl 0.9.1


@pytest.mark.ray  # the script imports the modules of worker groups, too
def test_the_page_is_what_the_script_makes_of_the_code():
    names = json.loads(compare.NAMES.read_text())
    reasons = yaml.safe_load(compare.REASONS.read_text())
    assert compare.table(names, reasons) == compare.PAGE.read_text(), (
        "run python scripts/compare_with_verl.py --write"
    )


@pytest.mark.skipif(SOURCE is None, reason="VERL_SOURCE names no source of verl 0.9.1")
def test_the_names_are_those_of_verls_source():
    assert compare.read_names(Path(SOURCE)) == json.loads(compare.NAMES.read_text())


def test_public_names_parameters_and_defaults_are_read_from_source(tmp_path):
    package = tmp_path / "verl"
    (package / "trainer").mkdir(parents=True)
    (package / "trainer" / "__init__.py").write_text("")
    (package / "no_such_room.py").write_text("x = 1")
    (package / "__init__.py").write_text(
        "from .protocol import DataProto\n"
        "__all__ = ['DataProto']\n"
        "LIMIT: int = 3\n"
        "try:\n    from other import thing\nexcept ImportError:\n    pass\n"
        "def mean(x, mask=None, *, axis: int = 1, scale=some.thing, **more): ...\n"
        "def _private(): ...\n"
        "class Group:\n"
        "    size = 2\n"
        "    def __init__(self, rows=[1]): ...\n"
        "    @property\n    def rank(self): ...\n"
        "    @staticmethod\n    def make(count=True): ...\n"
    )
    names = compare.read_names(tmp_path)
    assert names["absent"] == ["verl.no_such_room"]
    assert names["modules"]["verl"] == {
        "DataProto": None,
        "Group": {
            "__init__": [["rows", "position", "not a plain value"]],
            "make": [["count", "position", "True"]],
            "rank": None,
            "size": None,
        },
        "LIMIT": None,
        "mean": [
            ["x", "position", "required"],
            ["mask", "position", "None"],
            ["axis", "keyword", "1.0"],
            ["scale", "keyword", "not a plain value"],
        ],
    }
    with pytest.raises(ValueError, match="Found no verl/__init__.py"):
        compare.read_names(package)


def found(theirs, ours):
    return [(d.kind, d.detail) for d in compare.of_function("m", "f", theirs, ours)]


def test_what_a_function_lacks_moves_or_means_otherwise_is_found():
    theirs = [["a", "position", "required"], ["b", "position", "1.0"], ["c", "keyword", "None"]]
    assert found(theirs, lambda a, b=1, *, c=None, d=2: None) == []
    assert found(theirs, lambda a, b=1, **others: None) == [("keyword", "c")]
    assert found(theirs, lambda b, a, c=None: None) == [
        ("order", "a, b"),
        ("default", "b=required (verl: 1.0)"),
    ]
    assert found(theirs, lambda a, b=2.0, c=None: None) == [("default", "b=2.0 (verl: 1.0)")]


def test_a_difference_needs_a_reason_and_a_reason_a_difference():
    names = {"modules": {}, "absent": ["verl.no_such_room.a", "verl.no_such_room.b"]}
    page = compare.table(names, {"verl.no_such_room.*": "nothing"})
    assert "| `verl.no_such_room`: `.a`, `.b` | nothing |" in page
    with pytest.raises(ValueError, match=r"no reason for: verl.no_such_room.b \(absent \)"):
        compare.table(names, {"verl.no_such_room.a": "nothing"})
    with pytest.raises(ValueError, match="no difference any more for the reason: verl.x"):
        compare.table(names, {"verl.no_such_room.*": "nothing", "verl.x": "gone"})
    with pytest.raises(ValueError, match="verl.protocol in verl_names.json as absent, but it exists here"):
        compare.differences({"modules": {}, "absent": ["verl.protocol"]})

"""Texts of others: nothing in them is a command to a terminal, and UTF-8 encodes them."""

import json

import pytest

from verl.utils.json_files import MetricsFile, read_lines, to_json, write_lines
from verl.utils.text import encodable, encodable_json, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nand \u00e9\u4e2d\U0001f600", "plain\ttext\nand \u00e9\u4e2d\U0001f600"),
        ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),
        ("over\rwritten\x08\x7f", r"over\rwritten\x08\x7f"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202etxt.exe", r"\u202etxt.exe"),
        ("half \ud83d", r"half \ud83d"),
        (ValueError("\x1b[2J"), r"\x1b[2J"),
    ],
)
def test_commands_to_a_terminal_become_escapes(text, shown):
    assert printable(text) == shown
    printable(text).encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("caf\u00e9", "caf\u00e9"),
        ("\ud83d", "\ufffd"),
        ("a\ude00b\ud83d", "a\ufffdb\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_what_utf_8_can_not_encode_is_replaced(text, expected):
    assert encodable(text) == expected
    nested = {text: [text, {"x": (text, 5, None)}]}
    assert encodable_json(nested) == {expected: [expected, {"x": [expected, 5, None]}]}
    assert json.loads(to_json({"text": text})) == {"text": expected}


def test_files_of_a_run_take_any_text(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"answer": "\ud83d"}])
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"note": "\ude00"})
    assert read_lines(tmp_path / "rows.jsonl") == [{"answer": "\ufffd"}]
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "note": "\ufffd"}]

"""Calls of tools in a turn's text, however models write them."""

import json

import pytest

from verl.environments.messages import calls_of, with_tool_calls


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ({"name": "f", "arguments": {"x": 1}}, "f", {"x": 1}),
        ({"name": "f", "parameters": {"x": 1}}, "f", {"x": 1}),
        ({"type": "function", "name": "f", "parameters": {"x": 1}}, "f", {"x": 1}),
        ({"name": "f", "arguments": {"x": 1}, "parameters": {"y": 2}}, "f", {"x": 1}),
        ({"name": "f"}, "f", {}),
        ({"name": "f", "arguments": None}, "f", {}),
        ({"name": "f", "parameters": {}}, "f", {}),
        ({"name": "f", "args": {"x": 1}}, "invalid", None),
        ({"name": "f", "input": {"x": 1}}, "invalid", None),
        ({"name": {"x": 1}, "arguments": {}}, "invalid", None),
        ({"function": "f", "arguments": {"x": 1}}, "invalid", None),
        ([], "invalid", None),
    ],
)
def test_a_call_is_read_or_named_invalid_and_never_loses_its_arguments(call, name, arguments):
    text = json.dumps(call)
    (read,) = with_tool_calls(f"hm <tool_call>{text}</tool_call>")["tool_calls"]
    assert read["function"]["name"] == name
    if name == "invalid":
        assert read["function"]["arguments"] == text
    else:
        assert json.loads(read["function"]["arguments"]) == arguments


def test_half_an_emoji_in_a_call_is_replaced():
    text = '<tool_call>{"name": "f", "arguments": {"q": "\\ud83d"}}</tool_call>'
    (read,) = with_tool_calls(text)["tool_calls"]
    assert json.loads(read["function"]["arguments"]) == {"q": "\ufffd"}
    function = {"name": "f", "arguments": '{"q\\ude00": "\\ud83d"}'}
    assert calls_of({"tool_calls": [{"function": function}]}) == [["f", {"q\ufffd": "\ufffd"}]]

"""Messages with tools as plain text, for templates and models that know no tools of their own.

A format says how a model writes calls in its turn's text, and reads what tools give. `hermes` has
<tool_call>{"name": .., "arguments": {..}}</tool_call> and <tool_response>; `search_r1` has Search-R1's tags,
for one tool `search` with one argument `query`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.environments.base import Message

_HOW_TO_CALL = 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
CALL_BEGINS = "<tool_call>"


class ToolFormat(NamedTuple):
    """call: matches one. read: its text -> (name, arguments; a text that is none as it is). write: the other
    way round. result: what stands around what a tool gave. is_told: the system message says which tools there
    are, and how they are called. stop: ends a turn.
    """

    call: re.Pattern[str]
    read: Callable[[str], tuple[str, Any]]
    write: Callable[[str, str], str]
    result: str
    is_told: bool
    stop: tuple[str, ...] = ()


def _read_json(text: str) -> tuple[str, Any]:
    call = loaded(text)
    if isinstance(call, dict) and "name" in call:
        return str(call["name"]), call.get("arguments") or {}
    return "invalid", text  # whoever runs the tools says what is wrong with it


FORMATS = {
    "hermes": ToolFormat(
        re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL),
        _read_json,
        lambda name, given: f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {given}}}</tool_call>',
        "<tool_response>\n{}\n</tool_response>",
        True,
    ),
    "search_r1": ToolFormat(
        re.compile(r"<search>(.*?)</search>", re.DOTALL),
        lambda text: ("search", {"query": text.strip()}),
        lambda name, given: f"<{name}> {_query(given)} </{name}>",
        "\n\n<information>{}</information>\n\n",
        False,
        ("</search>", "</answer>"),
    ),
}
HERMES = FORMATS["hermes"]


def _query(given: str) -> str:
    arguments = loaded(given)
    return str(arguments["query"]) if isinstance(arguments, dict) and "query" in arguments else given


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message as OpenAI writes it: parts are joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def loaded(arguments: Any) -> Any:
    """The arguments of a call; a text that is no JSON as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return arguments


def calls_of(message: Mapping[str, Any]) -> list[list[Any]]:
    """[name, arguments] of each call of a message, however a client has spelled the arguments."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [[function["name"], loaded(function["arguments"])] for function in functions]


def plain(message: Mapping[str, Any], form: ToolFormat = HERMES) -> str:
    """A message's text with its calls, or what a tool gave, in the tags that models know."""
    if message["role"] == "tool":
        return form.result.format(text_of(message))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return text_of(message) + "".join(form.write(call["name"], call["arguments"]) for call in calls)


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, form: ToolFormat = HERMES
) -> list[Message]:
    """Roles and plain texts; the system message ends in the tools (OpenAI's descriptions), if there are any
    and the format tells them.
    """
    roles = {"tool": "user", "developer": "system"}
    shown = [{"role": roles.get(m["role"], m["role"]), "content": plain(m, form)} for m in messages]
    if tools and form.is_told:
        lines = "\n".join(map(json.dumps, tools))
        text = f"These tools can be called:\n<tools>\n{lines}\n</tools>\n{_HOW_TO_CALL}\n\n"
        if shown and shown[0]["role"] == "system":
            text = f"{shown.pop(0)['content']}\n\n{text}"
        shown.insert(0, {"role": "system", "content": text})
    return shown


def with_tool_calls(text: str, id_prefix: str = "call_", form: ToolFormat = HERMES) -> dict[str, Any]:
    """A turn's text as OpenAI writes it: `content` without the calls, and `tool_calls`; {} without calls."""
    calls: list[dict[str, Any]] = []
    for found in form.call.findall(text):
        name, given = form.read(found)
        function = {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}
        calls.append({"id": f"{id_prefix}{len(calls)}", "type": "function", "function": function})
    return {"content": form.call.sub("", text), "tool_calls": calls} if calls else {}

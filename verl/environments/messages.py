"""Messages with tools as plain text, for templates and models that have no tools of their own.

A format says how a model writes calls in the text of its turn, and how it reads the results of tools. The
format `hermes` has <tool_call>{"name": .., "arguments": {..}}</tool_call> and <tool_response>. The format
`search_r1` has Search-R1's tags, for one tool `search` with one argument `query`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.environments.environment import Message
from verl.utils.text import encodable_json, joined_parts

_HOW_TO_CALL = 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
CALL_BEGINS = "<tool_call>"


class ToolFormat(NamedTuple):
    """A format of tool calls and their results in plain text.

    Attributes:
        call: A pattern that matches one call.
        read: Takes the text of a call and returns its name and arguments. A text that is no call is returned
            as it is, as the arguments of a tool "invalid".
        write: Takes a name and arguments, and returns the text of a call.
        result_template: A template for the text around the result of a tool.
        lists_tools: Whether the system message lists the tools and says how to call them.
        stop: Strings that end a turn.
    """

    call: re.Pattern[str]
    read: Callable[[str], tuple[str, Any]]
    write: Callable[[str, str], str]
    result_template: str
    lists_tools: bool
    stop: tuple[str, ...] = ()


def _read_json(text: str) -> tuple[str, Any]:
    """Read a call, whose arguments Llama's models call "parameters"."""
    call = parse_json(text)
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        for key in ("arguments", "parameters"):
            if key in call:
                return call["name"], {} if call[key] is None else call[key]
        if call.keys() <= {"name", "type", "id"}:
            return call["name"], {}
    return "invalid", text  # whoever runs the tools says what is wrong with the call


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
    arguments = parse_json(given)
    return str(arguments["query"]) if isinstance(arguments, dict) and "query" in arguments else given


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message in OpenAI's format, with its parts joined.

    Raises ValueError for a content that is neither text nor text parts.
    """
    content = message.get("content")
    text = "" if content is None else joined_parts(content)
    if isinstance(text, list) and not text:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"Found the content {content!r:.200} of a message; expected text or text parts.")
    return text


def parse_json(arguments: Any) -> Any:
    """Parse the arguments of a call from JSON, or return them as they are if they are no JSON.

    What UTF-8 can't encode becomes U+FFFD.
    """
    try:
        return encodable_json(json.loads(arguments))
    except (ValueError, TypeError, RecursionError):
        return arguments


def calls_of(message: Mapping[str, Any]) -> list[list[Any]]:
    """Return [name, arguments] of each call of a message, however a client has spelled the arguments."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [[function["name"], parse_json(function["arguments"])] for function in functions]


def as_plain_text(message: Mapping[str, Any], form: ToolFormat = HERMES) -> str:
    """Return a message as text: its content and calls, or a tool's result, in the tags of a format."""
    if message["role"] == "tool":
        return form.result_template.format(text_of(message))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return text_of(message) + "".join(form.write(call["name"], call["arguments"]) for call in calls)


def with_tool_list(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, form: ToolFormat = HERMES
) -> list[Message]:
    """Return the messages as roles and plain texts, with the tools in the system message.

    If there are tools and the format lists them, the system message ends with OpenAI's descriptions of them.
    """
    roles = {"tool": "user", "developer": "system"}
    shown = [
        {"role": roles.get(message["role"], message["role"]), "content": as_plain_text(message, form)}
        for message in messages
    ]
    if tools and form.lists_tools:
        lines = "\n".join(map(json.dumps, tools))
        text = f"These tools can be called:\n<tools>\n{lines}\n</tools>\n{_HOW_TO_CALL}\n\n"
        if shown and shown[0]["role"] == "system":
            text = f"{shown.pop(0)['content']}\n\n{text}"
        shown.insert(0, {"role": "system", "content": text})
    return shown


def with_tool_calls(text: str, id_prefix: str = "call_", form: ToolFormat = HERMES) -> dict[str, Any]:
    """Return a turn's text in OpenAI's format, or {} if it has no calls.

    The result has the keys `content`, without the calls, and `tool_calls`.
    """
    calls: list[dict[str, Any]] = []
    for call_text in form.call.findall(text):
        name, arguments = form.read(call_text)
        function = {
            "name": name,
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        }
        calls.append({"id": f"{id_prefix}{len(calls)}", "type": "function", "function": function})
    return {"content": form.call.sub("", text), "tool_calls": calls} if calls else {}

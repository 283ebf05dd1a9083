"""Messages with tools as plain text, for templates and models that know no tools of their own.

A model calls a tool by <tool_call>{"name": .., "arguments": {..}}</tool_call> in its turn's text; what the
tool gives comes back in <tool_response>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.environments.base import Message

_HOW_TO_CALL = 'To call one, write <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_BEGINS = "<tool_call>"


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message as OpenAI writes it: parts are joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def plain(message: Mapping[str, Any]) -> str:
    """A message's text with its calls, or what a tool gave, in the tags that models know."""
    if message["role"] == "tool":
        return f"<tool_response>\n{text_of(message)}\n</tool_response>"
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    bodies = [f'{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}' for call in calls]
    return text_of(message) + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def with_tools_told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Message]:
    """Roles and plain texts; the system message ends in the tools (OpenAI's descriptions), if there are
    any.
    """
    shown = [
        {"role": "user" if message["role"] == "tool" else message["role"], "content": plain(message)}
        for message in messages
    ]
    if tools:
        lines = "\n".join(map(json.dumps, tools))
        text = f"These tools can be called:\n<tools>\n{lines}\n</tools>\n{_HOW_TO_CALL}"
        if shown and shown[0]["role"] == "system":
            text = f"{shown.pop(0)['content']}\n\n{text}"
        shown.insert(0, {"role": "system", "content": text})
    return shown


def with_tool_calls(text: str, id_prefix: str = "call_") -> dict[str, Any]:
    """A turn's text as OpenAI writes it: `content` without the calls, and `tool_calls`; {} without calls."""
    calls: list[dict[str, Any]] = []
    for found in _TOOL_CALL.findall(text):
        try:
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            function = {"name": "invalid", "arguments": found}  # the environment says what is wrong with it
        calls.append({"id": f"{id_prefix}{len(calls)}", "type": "function", "function": function})
    return {"content": _TOOL_CALL.sub("", text), "tool_calls": calls} if calls else {}

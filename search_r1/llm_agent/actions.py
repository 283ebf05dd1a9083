"""The tag protocol: what the policy's text asks for, and what it is told in return.

    "... <search> who wrote X </search>" -> Action("search", "who wrote X") -> documents -> observation text

Tags and the layout of an observation are Search-R1's, to the character: policies are trained on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from search_r1.search.client import FoundDocument

SEARCH_END, ANSWER_END = "</search>", "</answer>"
INFORMATION_START, INFORMATION_END = "\n\n<information>", "</information>\n\n"

# Shown after a turn without an action. Without a tag in it: nobody can take it for an answer or a search.
HINT = (
    "\n\nThere was no action in this. To look something up, put a query between search tags; "
    "to finish, put the answer between answer tags.\n\n"
)

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """What a turn asks for. `content`: the query or the answer, stripped; "" for an invalid turn."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str, do_search: bool = True) -> Action:
    """The first complete search or answer in the policy's text of one turn.

    A search without a query is invalid: there is nothing to send. Without `do_search` only answers count.
    """
    for match in _ACTION.finditer(text):
        kind, content = match[1], match[2].strip()
        if kind == "answer":
            return Action("answer", content)
        if do_search:
            return Action("search", content) if content else Action("invalid")
    return Action("invalid")


def format_documents(documents: Sequence[FoundDocument]) -> str:
    """`Doc 1(Title: ...) text` per document, one a line; the title is the first line of `contents`."""
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()


def format_observation(documents: Sequence[FoundDocument]) -> str:
    """The text that is appended after a search."""
    return f"{INFORMATION_START}{format_documents(documents)}{INFORMATION_END}"

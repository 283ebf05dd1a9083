"""The words around a question, and the layout of the tag protocol, as data preparation writes them.

`MICROWORLD_PROMPT` is for the tiny base model, which was pretrained on it: the question is all it says.
`SEARCH_PROMPT` explains the protocol to a real language model. A user's own rows bring their own prompts.
"""

from __future__ import annotations

MICROWORLD_PROMPT = "Question: {question}\n"

SEARCH_PROMPT = (
    "You have a search engine, and you may call it while you work on the question below. Reason step by "
    "step between <think> and </think>. To look something up, write <search> followed by a short query and "
    "</search>; the passages found come back between <information> and </information>, and then you reason "
    "on. Search again when a fact is still missing, for instance when one passage only names the person or "
    "the place that the question is really about. As soon as you know enough, finish with the bare answer, "
    "a name or a few words, between <answer> and </answer>, like this: <answer> Lisbon </answer>.\n"
    "Question: {question}\n"
)


def fill_prompt(template: str, question: str) -> str:
    """The template with the question in it; ValueError if the template has no place for one."""
    if "{question}" not in template:
        raise ValueError(
            f"the prompt template {template[:60]!r} has no {{question}} in it: add it where the question goes"
        )
    return template.replace("{question}", question)


def format_observation(documents: list[tuple[str, str]]) -> str:
    """What a policy reads after a search: (title line, text) pairs, numbered from 1.

    The title line is the first line of a passage's `contents`, with its quotes: '"Amber Harbor"'.
    """
    lines = "".join(f"Doc {i}(Title: {title}) {text}\n" for i, (title, text) in enumerate(documents, 1))
    return f"\n\n<information>{lines.strip()}</information>\n\n"

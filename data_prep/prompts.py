"""The words around a question, and the layout of the tag protocol, as data preparation writes them.

- `MICROWORLD_PROMPT` is for the tiny base model, which was pretrained on it. It holds only the question.
- `SEARCH_PROMPT` explains the protocol to a real language model. A user's own rows bring their own prompts.
- `BASE_PROMPT` is its short form for a small pretrained model, which learns the rest from demonstrations.
- `NO_SEARCH_PROMPT` and `RAG_PROMPT` are for comparisons: without a search engine, and with passages given.

None has the words of Search-R1's prompts. A checkpoint that was trained on those needs a file with them.
"""

from __future__ import annotations

from pathlib import Path

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

BASE_PROMPT = (
    "Look things up with <search> words </search>, then finish with <answer> a few words </answer>.\n"
    "Question: {question}\n"
)

NO_SEARCH_PROMPT = (
    "Answer the question below. Reason step by step between <think> and </think>, and then finish with the "
    "bare answer, a name or a few words, between <answer> and </answer>, like this: <answer> Lisbon "
    "</answer>.\nQuestion: {question}\n"
)
_HELP = "below. The passages that follow it were found by a search engine and may help."
RAG_PROMPT = NO_SEARCH_PROMPT.replace("below.", _HELP) + "Passages:\n{passages}\n"


def read_template(path: Path) -> str:
    """Read a prompt in your own words from a file.

    Raises ValueError if the file can't be read or has no {question}.
    """
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template: {path} can't be read ({error})") from None
    fill_prompt(template, "?")
    return template


def fill_prompt(template: str, question: str) -> str:
    """Return the template with the question in it. Raises ValueError if the template has no place for one."""
    if "{question}" not in template:
        raise ValueError(
            f"the prompt template {template[:60]!r} has no {{question}} in it: add it where the question goes"
        )
    return template.replace("{question}", question)


def format_observation(documents: list[tuple[str, str]]) -> str:
    """Return what a policy reads after a search: (title line, text) pairs, numbered from 1.

    The title line is the first line of a passage's `contents`, with its quotes: '"Amber Harbor"'.
    """
    return f"\n\n<information>{format_passages(documents)}</information>\n\n"


def format_passages(documents: list[tuple[str, str]]) -> str:
    """Return one line a passage, as in an observation.

    An example is `Doc 1(Title: "Amber Harbor") A film.`
    """
    lines = "".join(f"Doc {i}(Title: {title}) {text}\n" for i, (title, text) in enumerate(documents, 1))
    return lines.strip()

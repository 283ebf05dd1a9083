"""Tags that name why a rollout failed.

`tags_of` finds them in a record of trajectories/*.jsonl, of which the monitor shows them. A line of an
evaluation's results.jsonl is such a record, too, but no program shows its tags.

    unverified             nobody knows its worth: the verifier, its environment or its search failed
    truncated              its last generation was cut at data.max_response_length
    context_overflow       data.max_prompt_length left no room for an observation or a turn
    no_answer              it ended without an answer
    format                 a tag was not closed, a call could not be read, or a turn had no action
    repeated_action        it repeated an action
    tool_argument_error    a tool refused its arguments
    authorization_error    a tool refused access
    not_found              the thing that it asked for did not exist, or a search found nothing
    false_completion       it said that it had done its task, and had not

The four tags of tools are read from observations that begin like an error, or are JSON with one. The names
are those of the Fleet fork of SkyRL, and our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.records.figures import UNKNOWN_REWARD_REASONS

TAGS: tuple[str, ...] = (
    "unverified",
    "truncated",
    "context_overflow",
    "no_answer",
    "format",
    "repeated_action",
)
TAGS += ("tool_argument_error", "authorization_error", "not_found", "false_completion")
ROLLOUTS_TABLE = "val/rollouts"  # the name on wandb of the table with rows of `table_row`
_LOOKED_AT = 2000  # number of characters at the beginning of an observation that are read

_NAMES = "search|answer|sql|solution|tool_call|tool|python|code|calculator"
_ACTION = re.compile(rf"<({_NAMES})>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(rf"<(/?)(think|{_NAMES})>")
_MARKUP = re.compile(r"</?[a-z_|]+>|<\|im_\w+\|>\w*")
# The first words of a text tell an error: either a word at the very beginning, or a phrase a little later.
_ERROR = re.compile(
    r"^\W*(?:\w+\W+){0,2}?(?:\w*(?:error|exception|denied|failed)|traceback|failure|refused|invalid|4\d\d|"
    r"unknown|missing|forbidden|unauthori[sz]ed)\b|"
    r"^\W*(?:[\w']+\W+){0,9}?(?:not found|no such|not exist|denied|not (?:allowed|permitted|authori[sz]ed)|"
    r"forbidden|unauthori[sz]ed|must be|is required|required (?:argument|parameter|field)|could not|"
    r"can(?:no|')t)\b",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(
    r"\b(?:401|403|unauthori[sz]ed|forbidden|permission|not (?:permitted|allowed|authori[sz]ed)|log ?in|"
    r"access (?:is )?denied|authenticat\w+|credential\w*|token (?:has )?expired|"
    r"(?:invalid|missing|expired) (?:api[ _-]?key|token))\b",
    re.IGNORECASE,
)
_ARGUMENT = re.compile(
    r"\b(?:argument\w*|parameter\w*|required (?:field|property)|422|400|bad request|validation|schema|"
    r"TypeError|missing \w+ (?:field|value)|must be an? \w+|expected (?:an? )?\w+|(?:invalid|malformed) json|"
    r"JSONDecodeError)\b",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(
    r"\b(?:404|not found|no such|does ?n[o']t exist|could not be found|cannot find|can't find|unknown \w+|"
    r"no (?:results?|records?|rows?|matches|entr(?:y|ies)))\b",
    re.IGNORECASE,
)
_DEEDS = "completed?|finished|done|booked|created|updated|sent|fixed|added|deleted|cancelled|submitted|placed"
_CLAIM = re.compile(
    rf"\b(?:i(?:'ve| have)? (?:{_DEEDS})|(?:has|have) been (?:{_DEEDS})|successfully|all (?:done|set)|"
    r"task (?:is |has been )?(?:now )?(?:completed?|done|finished))\b",
    re.IGNORECASE,
)


def tags_of(record: Mapping[str, Any], solved_at: float = 1.0) -> list[str]:
    """Return the tags of a rollout, in the order of TAGS.

    Args:
        record: A record with `trajectory`, `tokens` (the response's texts), and `score` or `reward` (None
            means unknown).
        solved_at: A rollout with this reward has only the tags that arose on its way.
    """
    trajectory = record["trajectory"]
    turns = trajectory["turns"]
    reason = trajectory["finish_reason"]
    reward = record["reward"] if "reward" in record else record.get("score")
    tags: set[str] = set()
    if reward is None or reason in UNKNOWN_REWARD_REASONS:
        tags.add("unverified")
    if reason == "length":
        is_cut = trajectory.get("stopped_by", "length") == "length" and trajectory.get("room", 1) > 0
        tags.add("truncated" if is_cut else "context_overflow")
    if reason in ("max_turns", "eos", "length"):
        tags.add("no_answer")
    past_actions: set[str] = set()
    for number, turn in enumerate(turns):
        text = turn["text"]
        if turn["action"] in ("invalid", "none") or _is_broken(text):
            tags.add("format")
        action = (turn.get("query") or "").strip().lower() or _action(text)
        if action and action in past_actions:
            tags.add("repeated_action")
        past_actions.add(action)
        if turn.get("documents") is not None:
            tags |= {"not_found"} if not turn["documents"] else set()
        elif turn["action"] != "search" and number + 1 < len(turns):
            tags.update(_tool_tags(_observation(record, turn)))
    is_solved = reward is not None and reward >= solved_at
    if turns and not is_solved and "unverified" not in tags and _CLAIM.search(_last_words(turns[-1]["text"])):
        tags.add("false_completion")
    return [tag for tag in TAGS if tag in tags]


def environment_of(record: Mapping[str, Any]) -> str:
    """Return the environment of a record of trajectories/*.jsonl."""
    return record["trajectory"].get("env_class") or str(record["data_source"])


def table_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of trajectories/*.jsonl as a row for people. Its `tags` are separated by commas."""
    trajectory = record["trajectory"]
    row = {name: record[name] for name in ("step", "split", "question", "answer", "score")}
    row |= {"gold": "; ".join(record["gold"]), "environment": environment_of(record)}
    row |= {"tags": ", ".join(tags_of(record)), "finish_reason": trajectory["finish_reason"]}
    return row | {"text": trajectory["prompt_text"] + "".join(record["tokens"])}


def _is_broken(text: str) -> bool:
    """Return whether a tag is opened and not closed, or closed and not opened."""
    depth: dict[str, int] = {}
    for closing, name in _TAG.findall(text):
        depth[name] = depth.get(name, 0) + (-1 if closing else 1)
    return any(depth.values())


def _action(text: str) -> str:
    """Return what a turn did, without its thoughts, for comparison with other turns."""
    actions = [f"{kind} {' '.join(content.split()).lower()}" for kind, content in _ACTION.findall(text)]
    return "; ".join(actions)


def _last_words(text: str) -> str:
    """Return the end of a turn, without its thoughts."""
    return text.split("</think>")[-1][-1000:]


def _observation(record: Mapping[str, Any], turn: Mapping[str, Any]) -> str:
    if turn.get("obs_start") is None or "tokens" not in record:
        return ""
    start = turn["obs_start"]
    return "".join(record["tokens"][start : min(turn["obs_end"], start + _LOOKED_AT)])


def _tool_tags(observation: str) -> Iterator[str]:
    """Yield the tag of a tool's observation, if it is an error.

    The more particular reason takes precedence: access, then arguments, then missing things.
    """
    text = _MARKUP.sub(" ", observation).strip()
    problem = _json_problem(text)
    if problem == "" or (problem is None and not _ERROR.search(text)):
        return
    text = problem or text
    for tag, words in (
        ("authorization_error", _AUTHORIZATION),
        ("tool_argument_error", _ARGUMENT),
        ("not_found", _NOT_FOUND),
    ):
        if words.search(text):
            yield tag
            return


def _json_problem(said: str) -> str | None:
    """Return the error that an answer in JSON reports.

    Returns "" if it reports no error, and None if the text is not JSON, or only a JSON string.
    """
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None if isinstance(answer, str) else ""
    names = {str(name).lower(): value for name, value in answer.items()}
    is_failed = str(names.get("status", ""))[:1] in ("4", "5") or names.get("status") in (
        "error",
        "failed",
        "failure",
    )
    is_failed = (
        is_failed or names.get("iserror") is True or names.get("success") is False or names.get("ok") is False
    )
    problem = names.get("error") or names.get("errors") or names.get("exception")
    if problem:
        return str(problem)
    return said if is_failed else ""

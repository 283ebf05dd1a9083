"""Exact match with a reward for structure (Search-R1's format reward, arXiv:2505.15117).

A trajectory is a list of segments: what the policy sampled, and the observations between. The structure is
judged on the policy's segments. The text of a retrieved document is never parsed, so tags in it do no harm.

    <think> </think> ( <search> </search> observation <think> </think> )* <answer> </answer>

Between the tags there may be nothing but white space.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.utils.reward_score.qa_em import em_check, extract_solution, golden_answers, normalize_answer

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_OBSERVATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)
_SEARCHED = "<information>...</information>"  # no text of the policy contains it in one piece

# state -> what may come next -> the state it leads to. In a state named after a tag, any text may come.
_NEXT: dict[str, dict[str, str]] = {
    "start": {"<think>": "think"},
    "think": {"</think>": "thought"},
    "thought": {"<search>": "search", "<answer>": "answer"},
    "search": {"</search>": "searched"},
    "searched": {_SEARCHED: "start"},
    "answer": {"</answer>": "end"},
    "end": {},
}
_INSIDE = ("think", "search", "answer")


class Segment(NamedTuple):
    """A run of a trajectory's text: sampled by the policy, or put there by the environment."""

    text: str
    sampled: bool


def is_valid_sequence(segments: Iterable[Segment]) -> tuple[bool, str]:
    """Return whether the trajectory has the structure above, and if not, the first thing that is wrong."""
    state = "start"
    for text, sampled in segments:
        observed = [_SEARCHED] if _OBSERVATION.fullmatch(text) else [text]
        for piece in _TAG.split(text) if sampled else observed:
            if piece in _NEXT[state]:
                state = _NEXT[state][piece]
            elif _TAG.fullmatch(piece) or piece == _SEARCHED:
                return False, f"found {piece} where {' or '.join(_NEXT[state]) or 'nothing'} was expected"
            elif state not in _INSIDE and piece.strip():
                return False, f"found text outside of the tags: {piece.strip()[:40]!r}"
    return state == "end", "" if state == "end" else f"ended where {' or '.join(_NEXT[state])} was expected"


def is_retrieval_correct(segments: Iterable[Segment], golden: Iterable[str]) -> bool:
    """Return whether a normalised golden answer occurs in an observation that the search engine gave."""
    answers = [normalize_answer(answer) for answer in golden]
    matches = (_OBSERVATION.fullmatch(segment.text) for segment in segments if not segment.sampled)
    blocks = [normalize_answer(match[1]) for match in matches if match]
    return any(answer in block for block in blocks for answer in answers if answer)


def compute_score_em(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any],
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, float]:
    """Return the reward of a trajectory as `score`; s, f, r are the structure, final and retrieval score.

    | answer        | well-formed | document holds the answer | reward    |
    |---------------|-------------|---------------------------|-----------|
    | right         | yes         | -                         | score     |
    | right         | no          | -                         | score - s |
    | wrong or none | yes         | yes                       | s + r     |
    | wrong or none | yes         | no                        | s         |
    | wrong         | no          | -                         | f         |
    | none          | no          | -                         | 0         |

    The middle columns are returned too, each 0 or 1, as `well_formed` and `retrieved`. extra_info has the
    trajectory's `segments`, as `RewardManager` adds them. data_source is not looked at.
    """
    segments: Sequence[Segment] = extra_info["segments"]
    golden = golden_answers(ground_truth)
    answer = extract_solution(solution_str)
    well_formed = is_valid_sequence(segments)[0]
    retrieved = is_retrieval_correct(segments, golden)
    if answer is not None and em_check(answer, golden):
        reward = score if well_formed else score - structure_format_score
    elif well_formed:
        reward = structure_format_score + (retrieval_score if retrieved else 0.0)
    else:
        reward = final_format_score if answer is not None else 0.0
    return {"score": reward, "well_formed": float(well_formed), "retrieved": float(retrieved)}

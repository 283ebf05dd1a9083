"""Exact match with a reward for structure (Search-R1's format reward, arXiv:2505.15117).

A trajectory is a list of segments: what the policy sampled, and the observations between. Structure is
judged on the policy's segments; a retrieved document's text is never parsed, so tags in it do no harm.

    <think> </think> ( <search> </search> observation <think> </think> )* <answer> </answer>

with nothing but white space between the tags.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from verl.utils.reward_score.qa_em import em_check, extract_solution, golden_answers, normalize_answer

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_OBSERVATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)
_SEARCHED = "<observation>"

# state -> what may come next -> the state it leads to. In a state named after a tag any text may stand.
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
    """Whether the trajectory has the structure above, and if not, the first thing that is wrong."""
    state = "start"
    for segment in segments:
        for piece in _pieces(segment):
            if piece in _NEXT[state]:
                state = _NEXT[state][piece]
            elif _TAG.fullmatch(piece) or piece == _SEARCHED:
                return False, f"found {piece} where {' or '.join(_NEXT[state]) or 'nothing'} was expected"
            elif state not in _INSIDE and piece.strip():
                return False, f"found text outside of the tags: {piece.strip()[:40]!r}"
    return state == "end", "" if state == "end" else f"ended where {' or '.join(_NEXT[state])} was expected"


def extract_information_blocks(segments: Iterable[Segment]) -> list[str]:
    """The text of each observation that the search engine gave."""
    matches = (_OBSERVATION.fullmatch(segment.text) for segment in segments if not segment.sampled)
    return [match.group(1).strip() for match in matches if match]


def is_retrieval_correct(segments: Iterable[Segment], golden: Iterable[str]) -> bool:
    """Whether a normalised golden answer occurs in a retrieved document."""
    wanted = [normalize_answer(answer) for answer in golden]
    blocks = [normalize_answer(block) for block in extract_information_blocks(segments)]
    return any(answer in block for block in blocks for answer in wanted if answer)


def compute_score_em(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any],
    structure_format_score: float = 0.0,
    final_format_score: float = 0.0,
    retrieval_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """The reward of a trajectory; s, f, r are the structure, final and retrieval score.

    | answer        | well-formed | document holds the answer | reward    |
    |---------------|-------------|---------------------------|-----------|
    | right         | yes         | -                         | score     |
    | right         | no          | -                         | score - s |
    | wrong or none | yes         | yes                       | s + r     |
    | wrong or none | yes         | no                        | s         |
    | wrong         | no          | -                         | f         |
    | none          | no          | -                         | 0         |

    Args:
        data_source: not looked at; every source is scored alike.
        solution_str: what the policy wrote.
        ground_truth: `{"target": [golden answers]}`.
        extra_info: with the trajectory's `segments`, as `RewardManager` adds them.
    """
    segments: Sequence[Segment] = extra_info["segments"]
    golden = golden_answers(ground_truth)
    answer = extract_solution(solution_str)
    well_formed, _ = is_valid_sequence(segments)
    if answer is not None and em_check(answer, golden):
        return score if well_formed else score - structure_format_score
    if well_formed:
        hit = is_retrieval_correct(segments, golden)
        return structure_format_score + (retrieval_score if hit else 0.0)
    return final_format_score if answer is not None else 0.0


def compute_score_with_parts(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any],
    **scores: float,
) -> dict[str, float]:
    """`compute_score_em` as `score`, and the two signs that it looks at beside exact match, each 0 or 1.

    `well_formed`: the structure is right; `retrieved`: a document holds a golden answer.
    """
    segments: Sequence[Segment] = extra_info["segments"]
    return {
        "score": compute_score_em(data_source, solution_str, ground_truth, extra_info, **scores),
        "well_formed": float(is_valid_sequence(segments)[0]),
        "retrieved": float(is_retrieval_correct(segments, golden_answers(ground_truth))),
    }


def _pieces(segment: Segment) -> list[str]:
    """Tags and the texts between them; an observation is one piece."""
    if segment.sampled:
        return [piece for piece in _TAG.split(segment.text) if piece]
    return [_SEARCHED] if _OBSERVATION.fullmatch(segment.text) else [segment.text]

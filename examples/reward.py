"""A reward of your own: token F1 instead of exact match.

    bash train_grpo.sh custom_reward_function.path=examples/reward.py custom_reward_function.name=token_f1

The function is called for each trajectory. `solution_str` holds only what the policy wrote. What it read from
the search engine is in `extra_info["segments"]`. The function returns a number, or a dictionary with "score"
and more numbers, whose means are logged as `reward/<name>`.
"""

from collections import Counter
from typing import Any

from verl.utils.reward_score.qa_em import extract_solution, golden_answers, normalize_answer


def token_f1(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any]
) -> dict[str, float]:
    """Return the F1 of the answer's words against the best of the golden answers; 0 without an answer."""
    answer = extract_solution(solution_str)
    words = Counter(normalize_answer(answer or "").split())
    best = 0.0
    for golden in golden_answers(ground_truth):
        expected = Counter(normalize_answer(golden).split())
        num_common = sum((words & expected).values())
        if num_common:
            precision = num_common / sum(words.values())
            recall = num_common / sum(expected.values())
            best = max(best, 2 * precision * recall / (precision + recall))
    return {"score": best, "answered": float(answer is not None)}

"""A reward for random models: it differs from text to text, and says nothing about them."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Return a number between 0 and 1 that depends on the letters of the text alone."""
    return sum(map(ord, solution_str)) % 7 / 6

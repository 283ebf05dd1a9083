"""The controls of a set of questions: the same rows, whose searches find something else than their passages.

    own        a search finds what the server answers to it
    shuffled   a search finds passages of another question of the set
    empty      a search finds no passage

    rows of a set -> with_retriever -> rows whose `episode` tells the search environment what a search finds
                                       (search_r1/llm_agent/other_passages.py)

A policy that searches because it must is right much less often with `shuffled` and `empty`. One that knows
the answers by heart loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.config.mixture import EMPTY, OWN, SHUFFLED
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_cells import Row, struct_cell
from verl.data.row_environments import check_controlled
from verl.environments.registry import SEARCH
from verl.records.trajectories import find_question


class ControlledDataset(RLHFDataset):
    """A data set whose rows say what their searches find."""

    def __init__(self, dataset: RLHFDataset, controls: Sequence[dict[str, Any]]) -> None:
        """Take the rows of a data set.

        Args:
            dataset: The data set.
            controls: The control of each row, for its `extras`.
        """
        vars(self).update(vars(dataset))
        self.controls = controls

    def encode_row(self, row: Row, index: int) -> dict[str, Any]:
        """Return a row as it is asked, with its control in `episode.extras.retriever`."""
        item = super().encode_row(row, index)
        episode = item["episode"] or {"env_class": SEARCH, "prompt": [], "extras": {}}
        extras = {**episode["extras"], "retriever": self.controls[index]}
        return {**item, "episode": {**episode, "extras": extras}}


def with_retriever(dataset: RLHFDataset, retriever: str, seed: int, num_searches: int) -> RLHFDataset:
    """Return the rows of a set so that their searches find what `retriever` says.

    With `shuffled` the different questions of the set stand in a circle, whose order depends on these
    questions and the seed alone. The search in turn n of a row (from 1) finds the passages of the n-th
    question after its own. After `num_searches` turns, or where the circle ends, it begins again with the
    first question after its own.

    Args:
        dataset: The set of questions.
        retriever: own, shuffled or empty.
        seed: The seed of the circle's order.
        num_searches: Maximum number of searches of a row.

    Raises:
        ValueError: If a row is no search, or if all rows ask the same question, so that there is no other
            one.
    """
    if retriever == OWN:
        return dataset
    check_controlled(retriever, {dataset.env_class_of(row) for row in dataset.rows}, "its rows")
    if retriever == EMPTY:
        return ControlledDataset(dataset, [{"kind": EMPTY}] * len(dataset))
    questions = [question_of(dataset, row) for row in dataset.rows]
    different = sorted(set(questions))
    if len(different) < 2:
        raise ValueError(
            f"Found retriever: {SHUFFLED} for a set that asks a single question, {questions[0]!r:.80}; "
            "expected two different ones or more, as a search finds the passages of another one."
        )
    circle = [different[i] for i in np.random.default_rng(seed).permutation(len(different))]
    index_of = {question: index for index, question in enumerate(circle)}
    num_others = max(1, min(num_searches, len(circle) - 1))
    controls = []
    for row, question in zip(dataset.rows, questions, strict=True):
        following = range(index_of[question] + 1, index_of[question] + 1 + num_others)
        titles = _extra_info(row).get("gold_titles")
        controls.append(
            {
                "kind": SHUFFLED,
                "question": question,
                "others": [circle[index % len(circle)] for index in following],
                "gold_titles": _titles(titles),
            }
        )
    return ControlledDataset(dataset, controls)


def question_of(dataset: RLHFDataset, row: Row) -> str:
    """Return a row's question: that of its extra_info, or else the one at the end of its prompt."""
    question = _extra_info(row).get("question")
    if isinstance(question, str) and question.strip():
        return question
    return find_question(str(dataset.messages_of(row)[-1].get("content")))


def _extra_info(row: Row) -> Mapping[str, Any]:
    return struct_cell(row.get("extra_info"), "extra_info") or {}


def _titles(value: Any) -> list[str]:
    """Return the titles in a cell of titles, or of a single one."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(title) for title in np.atleast_1d(value)]

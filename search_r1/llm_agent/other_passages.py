"""Searches that find passages of other questions (the control `shuffled` of verl/data/controls.py).

    query of the policy     --search--> own documents  ----+
    question of its row     --search--> own documents  ----+--> other documents without own ones, at most topk
    another row's question  --search--> other documents ---+

A document is left out if the query or the row's question finds it, or if its title is one that the row names
in extra_info.gold_titles. What is found depends on the index, the query and the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from search_r1.search.client import FoundDocument, SearchClient
from verl.utils.reward_score.qa_em import plain_title

Documents = list[FoundDocument]
# The search for the other question asks for this many times topk documents, because both searches may find
# the same ones.
SPARE = 3


@dataclass(frozen=True)
class ShuffledSearch:
    """A query whose row is to see passages of another question.

    Attributes:
        query: The query of the policy.
        control: The control of the row.
        turn: The number of the turn, from 0.
    """

    query: str
    control: Mapping[str, Any]
    turn: int

    @property
    def other_question(self) -> str:
        others = self.control["others"]
        other: str = others[self.turn % len(others)]
        return other

    def choose(self, others: Documents, own: Sequence[Documents], topk: int) -> Documents:
        """Return the first `topk` documents of `others` that are none of the row's own."""
        own_contents = {document["contents"] for documents in own for document in documents}
        own_titles = {plain_title(title) for title in self.control["gold_titles"]}
        chosen = []
        for document in others:
            title = plain_title(document["contents"].partition("\n")[0])
            if document["contents"] not in own_contents and title not in own_titles:
                chosen.append(document)
        return chosen[:topk]


def submit_shuffled(
    client: SearchClient, searches: Sequence[ShuffledSearch], topk: int
) -> list[Future[Documents]]:
    """Start searches and return at once.

    Returns:
        A future for each search. It ends in documents or in a SearchError.
    """
    of_queries = client.submit([search.query for search in searches], topk)
    of_questions = client.submit([search.control["question"] for search in searches], topk)
    of_others = client.submit([search.other_question for search in searches], SPARE * topk)
    futures = []
    for search, *unfinished in zip(searches, of_others, of_queries, of_questions, strict=True):

        def choose(others: Documents, *own: Documents, search: ShuffledSearch = search) -> Documents:
            return search.choose(others, own, topk)

        futures.append(_when_all_are_done(unfinished, choose))
    return futures


def _when_all_are_done(
    searches: Sequence[Future[Documents]], choose: Callable[..., Documents]
) -> Future[Documents]:
    """Return a future of what `choose` makes of all searches, or of the error of one of them."""
    result: Future[Documents] = Future()

    def wait_for(number: int) -> None:
        """Look at the searches one after the other, so that the last one that is done settles the result."""
        if number < len(searches):
            searches[number].add_done_callback(lambda _: wait_for(number + 1))
        elif result.set_running_or_notify_cancel():  # if it is cancelled, nobody waits for it any more
            try:
                result.set_result(choose(*[search.result() for search in searches]))
            except Exception as error:  # whoever waits must hear of any error
                result.set_exception(error)

    wait_for(0)
    return result

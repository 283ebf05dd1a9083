"""The search itself: MaxScore over windows of documents, exact.

Terms are ordered by the highest score that each can give. Once `topk` documents are found, the
lowest-ranked terms together can't lift a document above the last of them; documents that have only such
terms needn't be looked at. So the other, "essential" terms' postings are added up in a window of documents,
and for those documents that could still make it the remaining terms are looked up, highest first, until
they are out.

    H. Turtle and J. Flood, "Query evaluation: strategies and optimizations" (1995)

A score is the sum, in double precision and in that order of the terms, of float32 scores, rounded to
float32; it is the same whichever documents were skipped. Bounds are rounded as scores are, and equal scores
are ordered by row, so the result is what adding up everything would give.
"""

from __future__ import annotations

import numpy as np

from search_r1.search.bm25.index import RARE_CODE, SKIP_BITS, jit

WINDOW = 1 << 15  # documents
MAX_SEEDS = 64  # documents looked at beforehand, so that there is a bound from the start
MIN_SEEDED = 4096  # postings of a query for which that pays


@jit
def search(
    starts, stops, weights, bounds, skip_of, query_starts, topk,
    documents, codes, pairs, rare_at, rare_frequency, norms, skips,
    inverse_norms, sums, totals, touched, found_rows, found_scores, found_counts,
):  # fmt: skip
    """Answers queries [Q]. Query i has the terms query_starts[i] to query_starts[i + 1]. Of each are known:
    where its postings start and stop, its weight, the highest score that it can give (`bounds`, falling
    within a query), and its row in `skips` (-1: none).

    Working memory: `sums` (float64 [W], all -1), `totals` (float64 [W]), `touched` (int64 [W + 1]).
    Results: found_rows and found_scores [Q, topk], best first, of which found_counts [Q] are filled.
    """
    for query in range(len(query_starts) - 1):
        terms = slice(query_starts[query], query_starts[query + 1])
        lists = (
            weights[terms], _score_tables(weights[terms], pairs, inverse_norms), starts[terms], stops[terms],
            skip_of[terms], documents, codes, rare_at, rare_frequency, norms, skips, inverse_norms,
        )  # fmt: skip
        found_counts[query] = _search_one(
            bounds[terms], topk, lists, sums, totals, touched, found_rows[query], found_scores[query]
        )


@jit
def _score(weight, frequency, inverse_norm):
    return weight - weight / (np.float32(1) + np.float32(frequency) * inverse_norm)


@jit
def _score_tables(weights, pairs, inverse_norms):
    """float32 [terms, codes]: the score of each code."""
    tables = np.zeros((len(weights), 256), dtype=np.float32)
    for term in range(len(weights)):
        for code in range(len(pairs)):
            tables[term, code] = _score(weights[term], pairs[code, 0], inverse_norms[pairs[code, 1]])
    return tables


@jit
def _rare_score(place, weight, inverse_norm, rare_at, rare_frequency):
    """The score of a posting without a code of its own."""
    return _score(weight, rare_frequency[np.searchsorted(rare_at, place)], inverse_norm)


@jit
def _worse(score, row, other_score, other_row):
    return score < other_score or (score == other_score and row > other_row)


@jit
def _keep(score, row, count, rows, scores):
    """Puts a document among the best `len(rows)`, a heap with the worst at the top; returns how many."""
    size = len(rows)
    if count < size:
        place = count
        count += 1
        while place > 0:
            parent = (place - 1) >> 1
            if not _worse(score, row, scores[parent], rows[parent]):
                break
            scores[place] = scores[parent]
            rows[place] = rows[parent]
            place = parent
    else:
        if not _worse(scores[0], rows[0], score, row):
            return count
        place = _sink(score, row, 0, size, rows, scores)
    scores[place] = score
    rows[place] = row
    return count


@jit
def _sink(score, row, place, size, rows, scores):
    """Where an entry belongs that starts at `place` of the heap; the ones above it have moved up."""
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _worse(scores[child + 1], rows[child + 1], scores[child], rows[child]):
            child += 1
        if not _worse(scores[child], rows[child], score, row):
            break
        scores[place] = scores[child]
        rows[place] = rows[child]
        place = child
    return place


@jit
def _sort_best_first(count, rows, scores):
    """Turns the heap into a list."""
    for size in range(count - 1, 0, -1):
        score = scores[size]
        row = rows[size]
        scores[size] = scores[0]
        rows[size] = rows[0]
        place = _sink(score, row, 0, size, rows, scores)
        scores[place] = score
        rows[place] = row


@jit
def _search_one(bounds, topk, lists, sums, totals, touched, rows, scores):
    """One query; returns how many documents it has in `rows` and `scores`."""
    starts = lists[2]
    stops = lists[3]
    documents = lists[5]
    norms = lists[9]
    num_terms = len(bounds)
    num_documents = np.int64(len(norms))
    rest = np.zeros(num_terms + 1)  # what the terms from each on can add at most
    for term in range(num_terms - 1, -1, -1):
        rest[term] = rest[term + 1] + bounds[term]
    # A document must not be worse than this (score, row) to be kept.
    floor = (_seed(topk, lists, totals, touched, rows, scores), num_documents)
    places = starts.copy()
    count = 0
    base = np.int64(0)
    num_essential = num_terms
    while True:
        while num_essential > 0 and _worse(np.float32(rest[num_essential - 1]), base, floor[0], floor[1]):
            num_essential -= 1
        base = num_documents
        for term in range(num_essential):
            if places[term] < stops[term]:
                base = min(base, np.int64(documents[places[term]]))
        if base == num_documents:
            break
        end = min(base + len(sums), num_documents)
        num_touched = _add_up(num_essential, base, end, places, lists, sums, touched)
        num_left = _collect(num_touched, base, rest[num_essential], floor, sums, totals, touched)
        for term in range(num_essential, num_terms):
            _look_up(term, num_left, places, lists, totals, touched)
            num_left = _drop(num_left, rest[term + 1], floor, totals, touched)
        for i in range(num_left):
            count = _keep(np.float32(totals[i]), touched[i], count, rows, scores)
        if count == topk and not _worse(scores[0], rows[0], floor[0], floor[1]):
            floor = (scores[0], rows[0])
        base = end
    _sort_best_first(count, rows, scores)
    return count


@jit
def _add_up(num_essential, base, end, places, lists, sums, touched):
    """Adds the essential terms' scores of the rows from base to end to `sums`; returns how many have one,
    with their places in `touched` (ascending with one term)."""
    weights, tables, _, stops, _, documents, codes, rare_at, rare_frequency, norms, _, inverse_norms = lists
    num_touched = 0
    for term in range(num_essential):
        place = places[term]
        stop = stops[term]
        table = tables[term]
        while place < stop and documents[place] < end:
            slot = np.int64(documents[place]) - base
            score = table[codes[place]]
            if codes[place] == RARE_CODE:
                norm = norms[documents[place]]
                score = _rare_score(place, weights[term], inverse_norms[norm], rare_at, rare_frequency)
            before = sums[slot]
            touched[num_touched] = slot
            num_touched += before < 0
            sums[slot] = max(before, 0.0) + score
            place += 1
        places[term] = place
    return num_touched


@jit
def _collect(num_touched, base, rest, floor, sums, totals, touched):
    """Takes the sums of those documents that can reach the floor with `rest` more to `totals`, and their
    rows, ascending, to `touched`; clears all sums. Returns how many there are."""
    num_left = 0
    ascending = True
    for i in range(num_touched):
        slot = touched[i]
        if _worse(np.float32(sums[slot] + rest), base + slot, floor[0], floor[1]):
            sums[slot] = -1.0
        else:
            ascending = ascending and (num_left == 0 or touched[num_left - 1] < slot)
            touched[num_left] = slot
            num_left += 1
    if not ascending:
        touched[:num_left].sort()
    for i in range(num_left):
        slot = touched[i]
        totals[i] = sums[slot]
        touched[i] = base + slot
        sums[slot] = -1.0
    return num_left


@jit
def _drop(num_rows, rest, floor, totals, rows):
    """Leaves out the documents that can't reach the floor with `rest` more; returns how many are left."""
    num_left = 0
    for i in range(num_rows):
        if not _worse(np.float32(totals[i] + rest), rows[i], floor[0], floor[1]):
            totals[num_left] = totals[i]
            rows[num_left] = rows[i]
            num_left += 1
    return num_left


@jit
def _look_up(term, num_rows, places, lists, totals, rows):
    """Adds a term's scores to the totals of documents. The rows ascend, from call to call too."""
    (
        weights, tables, starts, stops, skip_of, documents, codes, rare_at, rare_frequency, norms, skips,
        inverse_norms,
    ) = lists  # fmt: skip
    place = places[term]
    start = starts[term]
    stop = stops[term]
    table = tables[term]
    skip = skip_of[term]
    for i in range(num_rows):
        row = rows[i]
        if skip >= 0:
            block = row >> SKIP_BITS
            low = max(place, start + np.int64(skips[skip, block]))
            high = max(low, start + np.int64(skips[skip, block + 1]))
        else:
            low = place
            step = 4
            high = low + step
            while high < stop and documents[high] < row:
                low = high + 1
                step *= 4
                high = low + step
            high = min(high, stop)
        while low < high:
            middle = (low + high) >> 1
            if documents[middle] < row:
                low = middle + 1
            else:
                high = middle
        place = low
        if place < stop and documents[place] == row:
            score = table[codes[place]]
            if codes[place] == RARE_CODE:
                score = _rare_score(place, weights[term], inverse_norms[norms[row]], rare_at, rare_frequency)
            totals[i] += score
    places[term] = place


@jit
def _seed(topk, lists, totals, touched, rows, scores):
    """A score that `topk` documents reach for sure: the last one's of the best among a few documents of the
    rarest term that has enough. Minus infinity if none is known cheaply. Overwrites the last four arrays."""
    starts = lists[2]
    stops = lists[3]
    documents = lists[5]
    if topk > MAX_SEEDS or (stops - starts).sum() < MIN_SEEDED:
        return np.float32(-np.inf)
    for seed in range(len(starts)):
        num_seeds = min(stops[seed] - starts[seed], MAX_SEEDS, len(totals))
        if num_seeds >= topk:
            for i in range(num_seeds):
                touched[i] = documents[starts[seed] + i]
                totals[i] = 0.0
            places = starts.copy()
            for term in range(len(starts)):
                _look_up(term, num_seeds, places, lists, totals, touched)
            count = 0
            for i in range(num_seeds):
                count = _keep(np.float32(totals[i]), touched[i], count, rows, scores)
            return scores[0]
    return np.float32(-np.inf)

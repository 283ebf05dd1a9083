"""The search itself: MaxScore over windows of documents, exact.

Terms are ordered by the highest score that each can give. Once `topk` documents are found, the lowest-ranked
terms together can't lift a document above the last of them. Documents that have only such terms needn't be
looked at. So the postings of the other, "essential" terms are added up in a window of documents. For those
documents that could still make it, the remaining terms are looked up, highest first, until a document can't
make it any more.

    H. Turtle and J. Flood, "Query evaluation: strategies and optimizations" (1995)

A score is a sum of float32 scores. It is added up in double precision and in that order of the terms, and
then rounded to float32, so it is the same whichever documents were skipped. Bounds are rounded as scores are,
and equal scores are ordered by row. The result is therefore what adding up everything would give.
"""

from __future__ import annotations

import numpy as np

from search_r1.search.bm25.index import RARE_CODE, SKIP_BITS, jit

WINDOW = 1 << 15  # documents
MAX_SEEDS = 64  # documents that are looked at beforehand, so that there is a bound from the start
MIN_SEEDED = 4096  # that pays for a query with at least this many postings


@jit
def search(
    starts, stops, weights, bounds, skip_of, query_starts, topk,
    documents, codes, pairs, rare_at, rare_frequency, norms, skips,
    inverse_norms, sums, totals, touched, found_rows, found_scores, found_counts,
):  # fmt: skip
    """Answer queries [Q]. Query i has the terms query_starts[i] to query_starts[i + 1].

    Args:
        starts, stops: Where the postings of each term start and stop.
        weights: The weight of each term.
        bounds: The highest score that each term can give. It falls within a query.
        skip_of: The row of each term in `skips`, or -1 for none.
        query_starts: The first term of each query, and the end of the last one, [Q + 1].
        topk: How many documents to find for each query.
        documents, codes, pairs, rare_at, rare_frequency, norms, skips: The files of the index.
        inverse_norms: The inverse_norm of each norm.
        sums, totals, touched: Working memory: float64 [W], all -1; float64 [W]; int64 [W + 1].
        found_rows, found_scores: Receive the results [Q, topk], best first.
        found_counts: Receives how many results of each query are filled, [Q].
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
    """Return the score of each code: float32 [terms, codes]."""
    tables = np.zeros((len(weights), 256), dtype=np.float32)
    for term in range(len(weights)):
        for code in range(len(pairs)):
            tables[term, code] = _score(weights[term], pairs[code, 0], inverse_norms[pairs[code, 1]])
    return tables


@jit
def _rare_score(place, weight, inverse_norm, rare_at, rare_frequency):
    """Return the score of a posting without a code of its own."""
    return _score(weight, rare_frequency[np.searchsorted(rare_at, place)], inverse_norm)


@jit
def _worse(score, row, other_score, other_row):
    return score < other_score or (score == other_score and row > other_row)


@jit
def _keep(score, row, count, rows, scores):
    """Put a document among the best `len(rows)`, a heap with the worst at the top.

    Returns how many documents the heap holds.
    """
    size = len(rows)
    if count < size:
        slot = count
        count += 1
        while slot > 0:
            parent = (slot - 1) >> 1
            if not _worse(score, row, scores[parent], rows[parent]):
                break
            scores[slot] = scores[parent]
            rows[slot] = rows[parent]
            slot = parent
    else:
        if not _worse(scores[0], rows[0], score, row):
            return count
        slot = _sink(score, row, 0, size, rows, scores)
    scores[slot] = score
    rows[slot] = row
    return count


@jit
def _sink(score, row, slot, size, rows, scores):
    """Return where in the heap an entry that starts at `slot` belongs, and move up those on its way."""
    while 2 * slot + 1 < size:
        child = 2 * slot + 1
        if child + 1 < size and _worse(scores[child + 1], rows[child + 1], scores[child], rows[child]):
            child += 1
        if not _worse(scores[child], rows[child], score, row):
            break
        scores[slot] = scores[child]
        rows[slot] = rows[child]
        slot = child
    return slot


@jit
def _sort_best_first(count, rows, scores):
    """Turn the heap into a list."""
    for size in range(count - 1, 0, -1):
        score = scores[size]
        row = rows[size]
        scores[size] = scores[0]
        rows[size] = rows[0]
        slot = _sink(score, row, 0, size, rows, scores)
        scores[slot] = score
        rows[slot] = row


@jit
def _search_one(bounds, topk, lists, sums, totals, touched, rows, scores):
    """Search for one query. Return how many documents it has in `rows` and `scores`."""
    starts = lists[2]
    stops = lists[3]
    documents = lists[5]
    norms = lists[9]
    num_terms = len(bounds)
    num_documents = np.int64(len(norms))
    rest = np.zeros(num_terms + 1)  # what a term and all after it can add at most
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
    """Add the essential terms' scores of the rows from `base` to `end` to `sums`.

    Returns how many rows have a score. Their positions in `sums` are then in `touched` (ascending with one
    term).
    """
    weights, tables, _, stops, _, documents, codes, rare_at, rare_frequency, norms, _, inverse_norms = lists
    num_touched = 0
    for term in range(num_essential):
        posting = places[term]
        stop = stops[term]
        table = tables[term]
        while posting < stop and documents[posting] < end:
            slot = np.int64(documents[posting]) - base
            score = table[codes[posting]]
            if codes[posting] == RARE_CODE:
                norm = norms[documents[posting]]
                score = _rare_score(posting, weights[term], inverse_norms[norm], rare_at, rare_frequency)
            old_sum = sums[slot]
            touched[num_touched] = slot
            num_touched += old_sum < 0
            sums[slot] = max(old_sum, 0.0) + score
            posting += 1
        places[term] = posting
    return num_touched


@jit
def _collect(num_touched, base, rest, floor, sums, totals, touched):
    """Move the sums of the documents that can reach the floor with `rest` more to `totals`.

    All sums are cleared. Returns how many documents there are. Their rows are then in `touched`, ascending.
    """
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
    """Drop the documents that can't reach the floor with `rest` more. Return how many are left."""
    num_left = 0
    for i in range(num_rows):
        if not _worse(np.float32(totals[i] + rest), rows[i], floor[0], floor[1]):
            totals[num_left] = totals[i]
            rows[num_left] = rows[i]
            num_left += 1
    return num_left


@jit
def _look_up(term, num_rows, places, lists, totals, rows):
    """Add a term's scores to the totals of documents.

    The rows ascend, and go on ascending from call to call.
    """
    (
        weights, tables, starts, stops, skip_of, documents, codes, rare_at, rare_frequency, norms, skips,
        inverse_norms,
    ) = lists  # fmt: skip
    posting = places[term]
    start = starts[term]
    stop = stops[term]
    table = tables[term]
    skip = skip_of[term]
    for i in range(num_rows):
        row = rows[i]
        if skip >= 0:
            block = row >> SKIP_BITS
            low = max(posting, start + np.int64(skips[skip, block]))
            high = max(low, start + np.int64(skips[skip, block + 1]))
        else:
            low = posting
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
        posting = low
        if posting < stop and documents[posting] == row:
            score = table[codes[posting]]
            if codes[posting] == RARE_CODE:
                score = _rare_score(
                    posting, weights[term], inverse_norms[norms[row]], rare_at, rare_frequency
                )
            totals[i] += score
    places[term] = posting


@jit
def _seed(topk, lists, totals, touched, rows, scores):
    """Return a score that `topk` documents reach for sure, or minus infinity if none is known cheaply.

    It is the lowest of the `topk` best scores among a few documents of the rarest term that has enough. The
    last four arrays are overwritten.
    """
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

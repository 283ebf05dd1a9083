"""The search itself, exact, in one of two ways: by documents or by blocks of documents.

`_search_one` takes the way that is likely to cost less for a query (`_costs_of_blocks`).

By documents, if a query has rare words. This is MaxScore over windows of documents. Terms are ordered by the
highest score that each can give. Once `topk` documents are found, the lowest-ranked terms together can't lift
a document above the last of them. Documents that have only such terms needn't be looked at. So the postings
of the other, "essential" terms are added up in a window of documents. For those documents that could still
make it, the remaining terms are looked up, highest first, until a document can't make it any more.

    H. Turtle and J. Flood, "Query evaluation: strategies and optimizations" (1995)

By blocks, if its words are frequent. The index has a bound of each very frequent term for each block of
BLOCK_WIDTH documents. They are added up for all blocks at once, many in one instruction. The scores of the
other terms are added to the blocks of their postings. The blocks with the highest sums are looked into first.
Once `topk` documents are found, a block whose sum is lower than the last of their scores is left out.

    A. Mallia, T. Suel and N. Tonellotto, "Faster learned sparse retrieval with block-max pruning" (2024)

A score is a sum of float32 scores. It is added up in double precision and in that order of the terms, and
then rounded to float32, so it is the same whichever documents were skipped. Bounds are rounded as scores are,
and equal scores are ordered by row. The result is therefore what adding up everything would give.
"""

from __future__ import annotations

import numpy as np

from search_r1.search.bm25.index import BLOCK_BITS, BLOCK_WIDTH, RARE_CODE, SHARE_STEPS, SKIP_BITS
from search_r1.search.compiled import jit

WINDOW = 1 << 15  # documents
GROUP = 64  # blocks whose highest bound is known
ROUNDS = (8, 48)  # blocks with bounds like those of so many groups' best ones are looked into first
PASS_BLOCKS = 1 << 12  # the sums of so many blocks stay in the first cache while the terms are added
ROUNDING = 4e-7  # more than a float32 product or sum is wrong, as a share
BLOCKS_START = 20_000.0  # what a search by blocks costs at least; costs are in nanoseconds
BLOCK_COST = 0.2  # of a block for each term with bounds, and for each of OTHER_PASSES
OTHER_PASSES = 4
SCATTER_COST = 2.5  # of a posting that is added to its block
POSTING_COST = 6.5  # of a posting in a search by documents
ESSENTIAL_COST = 30.0  # of one whose document is then looked up in the postings of other terms
MAX_SEEDS = 64  # documents that are looked at beforehand, so that there is a bound from the start
MIN_SEEDED = 4096  # that pays for a query with at least this many postings


@jit
def search(
    starts, stops, weights, bounds, skip_of, block_of, query_starts, topk, blocks_start,
    documents, codes, pairs, rare_at, rare_frequency, norms, skips, block_shares,
    inverse_norms, sums, totals, touched, bounds_of_groups, tops, found_rows, found_scores, found_counts,
):  # fmt: skip
    """Answer queries [Q]. Query i has the terms query_starts[i] to query_starts[i + 1].

    Args:
        starts, stops: Where the postings of each term start and stop.
        weights: The weight of each term.
        bounds: The highest score that each term can give. It falls within a query.
        skip_of, block_of: The row of each term in `skips` and in `block_shares`, or -1 for none.
        query_starts: The first term of each query, and the end of the last one, [Q + 1].
        topk: How many documents to find for each query.
        blocks_start: BLOCKS_START. Infinity has all queries answered by documents, minus infinity has those
            answered by blocks that can be.
        documents, codes, pairs, rare_at, rare_frequency, norms, skips, block_shares: The files of the index.
        inverse_norms: The inverse_norm of each norm.
        sums, totals, touched: Working memory: float64 [W], all -1; float64 [W]; int64 [W + 1].
        bounds_of_groups, tops: Working memory: float32 [GROUP, G] and [G] for G groups of blocks. Block b is
            the (b // G)-th of group b % G. What is beyond the last block is zero.
        found_rows, found_scores: Receive the results [Q, topk], best first.
        found_counts: Receives how many results of each query are filled, [Q].
    """
    denominators = np.empty(len(pairs), dtype=np.float32)
    for code in range(len(pairs)):
        denominators[code] = np.float32(1) + np.float32(pairs[code, 0]) * inverse_norms[pairs[code, 1]]
    for query in range(len(query_starts) - 1):
        terms = slice(query_starts[query], query_starts[query + 1])
        lists = (
            weights[terms], _score_tables(weights[terms], denominators), starts[terms], stops[terms],
            skip_of[terms], documents, codes, rare_at, rare_frequency, norms, skips, inverse_norms,
        )  # fmt: skip
        blocks = (block_of[terms], block_shares, bounds_of_groups, tops)
        found_counts[query] = _search_one(
            bounds[terms],
            topk,
            lists,
            blocks,
            blocks_start,
            sums,
            totals,
            touched,
            found_rows[query],
            found_scores[query],
        )


@jit
def _score(weight, frequency, inverse_norm):
    return weight - weight / (np.float32(1) + np.float32(frequency) * inverse_norm)


@jit
def _score_tables(weights, denominators):
    """Return the score of each code: float32 [terms, codes].

    `denominators` are those of the formula, one for each code.
    """
    tables = np.zeros((len(weights), 256), dtype=np.float32)
    for term in range(len(weights)):
        weight = weights[term]
        table = tables[term]
        for code in range(len(denominators)):
            table[code] = weight - weight / denominators[code]
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
def _search_one(bounds, topk, lists, blocks, blocks_start, sums, totals, touched, rows, scores):
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
    by_blocks, documents_may_pay = _costs_of_blocks(topk, starts, stops, blocks, blocks_start)
    slack = ROUNDING * (num_terms + 2) * rest[0]
    if by_blocks < np.inf and not documents_may_pay:
        return _search_blocks(topk, np.float32(0), slack, lists, blocks, totals, rows, scores)
    # A document must not be worse than this (score, row) to be kept.
    floor = (_seed(topk, lists, totals, touched, rows, scores), num_documents)
    base = np.int64(0)
    num_essential = num_terms
    if by_blocks < np.inf:
        while num_essential > 0 and np.float32(rest[num_essential - 1]) < floor[0]:
            num_essential -= 1
        if by_blocks < (stops - starts)[:num_essential].sum() * ESSENTIAL_COST:
            lowest = max(np.float32(0), floor[0])
            return _search_blocks(topk, lowest, slack, lists, blocks, totals, rows, scores)
    places = starts.copy()
    count = 0
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


@jit
def _costs_of_blocks(topk, starts, stops, blocks, blocks_start):
    """Return what a search by blocks costs, and whether a search by documents may cost less.

    It may if the rarer half of the terms has few postings. The cost is infinity if all postings together cost
    less, or if the query can't be answered by blocks: `topk` documents with a term must be known to exist.
    """
    block_of = blocks[0]
    num_blocks = blocks[1].shape[1]
    sizes = stops - starts
    if topk > MAX_SEEDS or len(sizes) == 0 or sizes.max() < topk:
        return np.inf, False
    cost = blocks_start + OTHER_PASSES * BLOCK_COST * num_blocks
    for term in range(len(sizes)):
        if block_of[term] >= 0:
            cost += BLOCK_COST * num_blocks
        else:
            cost += SCATTER_COST * sizes[term]
    if cost > sizes.sum() * POSTING_COST:
        return np.inf, False
    return cost, sizes[: (len(sizes) + 1) // 2].sum() * ESSENTIAL_COST < cost


@jit
def _search_blocks(topk, floor, slack, lists, blocks, totals, rows, scores):
    """Search for one query by bounds of blocks. At least `topk` documents score more than zero.

    Args:
        topk: How many documents to find.
        floor: A score that `topk` documents reach.
        slack: More than the rounding of a block's sum.
        lists, blocks: The terms, and what is known of blocks.
        totals: Working memory.
        rows, scores: Receive the documents, best first.

    Returns:
        How many documents there are, which is `topk`.
    """
    bounds_of_groups, tops = blocks[2:]
    num_groups = len(tops)
    _bound_blocks(lists, blocks)
    best = np.empty(min(ROUNDS[-1], num_groups), dtype=np.int64)
    best_tops = np.empty(len(best), dtype=np.float32)
    num_best = 0
    for group in range(num_groups):
        num_best = _keep(tops[group], group, num_best, best, best_tops)
    _sort_best_first(num_best, best, best_tops)

    max_chosen = len(totals) >> BLOCK_BITS
    chosen = np.empty(max_chosen, dtype=np.int64)
    left = np.empty(max_chosen, dtype=np.float32)
    count = 0
    upper = np.float32(np.inf)
    for number in range(len(ROUNDS) + 1):  # each takes the blocks with bounds from `lower` to below `upper`
        lower = np.float32(0)
        if number < len(ROUNDS) and ROUNDS[number] <= num_best:
            lower = best_tops[ROUNDS[number] - 1]
        num_chosen = 0
        for group in range(num_groups):
            if tops[group] < lower or tops[group] + slack < floor:
                continue
            for slot in range(GROUP):
                bound = bounds_of_groups[slot, group]
                # Blocks without a term have no bound, and so have those beyond the last block.
                if bound == 0 or bound < lower or bound >= upper or bound + slack < floor:
                    continue
                chosen[num_chosen] = slot * num_groups + group
                left[num_chosen] = bound
                num_chosen += 1
                if num_chosen == max_chosen:
                    count = _look_into(
                        num_chosen, chosen, left, floor, slack, lists, blocks, totals, count, rows, scores
                    )
                    floor = scores[0] if count == topk else floor
                    num_chosen = 0
        count = _look_into(num_chosen, chosen, left, floor, slack, lists, blocks, totals, count, rows, scores)
        floor = scores[0] if count == topk else floor
        if lower == 0:
            break
        upper = lower
    _sort_best_first(count, rows, scores)
    return count


@jit
def _bound_blocks(lists, blocks):
    """Add up what each block of documents can score at most, and take the highest of each group of blocks."""
    weights, tables, starts, stops, _, documents, codes, rare_at, rare_frequency, norms, _, inverse_norms = (
        lists
    )
    block_of, block_shares, bounds_of_groups, tops = blocks
    bounds = bounds_of_groups.reshape(-1)
    num_blocks = block_shares.shape[1]
    for base in range(0, num_blocks, PASS_BLOCKS):
        end = min(base + PASS_BLOCKS, num_blocks)
        window = bounds[base:end]
        window[:] = np.float32(0)
        for term in range(len(weights)):
            if block_of[term] >= 0:
                step = weights[term] / np.float32(SHARE_STEPS)
                shares = block_shares[block_of[term], base:end]
                for i in range(len(window)):
                    window[i] += step * np.float32(shares[i])
    for term in range(len(weights)):
        if block_of[term] >= 0:
            continue
        table = tables[term]
        last_block = np.int64(-1)
        block_score = np.float32(0)  # the highest one in last_block
        for posting in range(starts[term], stops[term]):
            score = table[codes[posting]]
            if codes[posting] == RARE_CODE:
                norm = norms[documents[posting]]
                score = _rare_score(posting, weights[term], inverse_norms[norm], rare_at, rare_frequency)
            block = np.int64(documents[posting] >> BLOCK_BITS)
            if block != last_block:
                bounds[block] += score
                last_block = block
                block_score = score
            elif score > block_score:
                bounds[block] += score - block_score
                block_score = score
    tops[:] = np.float32(0)
    for slot in range(GROUP):
        row = bounds_of_groups[slot]
        for group in range(len(tops)):
            tops[group] = row[group] if row[group] > tops[group] else tops[group]


@jit
def _look_into(num_chosen, chosen, left, floor, slack, lists, blocks, totals, count, rows, scores):
    """Score the documents of the chosen blocks, term by term, and keep the best. Return how many are kept.

    A block is dropped as soon as none of its documents can reach the floor. `left` is what the terms can give
    to a document of each block at most. It is overwritten, and so is `chosen`.
    """
    (
        weights, tables, starts, stops, skip_of, documents, codes, rare_at, rare_frequency, norms, skips,
        inverse_norms,
    ) = lists  # fmt: skip
    block_of = blocks[0]
    block_shares = blocks[1]
    totals[: num_chosen << BLOCK_BITS] = 0.0
    for term in range(len(weights)):
        table = tables[term]
        skip = skip_of[term]
        step = weights[term] / np.float32(SHARE_STEPS)
        num_left = 0
        for i in range(num_chosen):
            first = chosen[i] << BLOCK_BITS
            bound = np.float32(0)
            if block_of[term] >= 0:
                bound = step * np.float32(block_shares[block_of[term], chosen[i]])
            if block_of[term] < 0 or bound > 0:
                low = starts[term]
                high = stops[term]
                if skip >= 0:
                    high = low + np.int64(skips[skip, (first >> SKIP_BITS) + 1])
                    low += np.int64(skips[skip, first >> SKIP_BITS])
                while low < high:
                    middle = (low + high) >> 1
                    if documents[middle] < first:
                        low = middle + 1
                    else:
                        high = middle
                highest = np.float32(0)
                while low < stops[term] and documents[low] < first + BLOCK_WIDTH:
                    score = table[codes[low]]
                    row = np.int64(documents[low])
                    if codes[low] == RARE_CODE:
                        inverse_norm = inverse_norms[norms[row]]
                        score = _rare_score(low, weights[term], inverse_norm, rare_at, rare_frequency)
                    totals[(i << BLOCK_BITS) + row - first] += score
                    highest = max(highest, score)
                    low += 1
                if block_of[term] < 0:
                    bound = highest
            total = 0.0
            for j in range(i << BLOCK_BITS, (i + 1) << BLOCK_BITS):
                total = max(total, totals[j])
            if total + (left[i] - bound) + slack >= floor:
                for j in range(BLOCK_WIDTH):
                    totals[(num_left << BLOCK_BITS) + j] = totals[(i << BLOCK_BITS) + j]
                chosen[num_left] = chosen[i]
                left[num_left] = left[i] - bound
                num_left += 1
        num_chosen = num_left
    for i in range(num_chosen):
        for j in range(BLOCK_WIDTH):
            rounded = np.float32(totals[(i << BLOCK_BITS) + j])
            if rounded > 0 and rounded >= floor:
                count = _keep(rounded, (chosen[i] << BLOCK_BITS) + j, count, rows, scores)
    return count

"""Blocks: contents are found as long as they are there, never longer."""

from __future__ import annotations

import random

from verl.workers.rollout.native.block_pool import ROOT, BlockPool, KnownBlock

A, B, C = b"aaaa", b"bbbb", b"cccc"


def test_contents_are_found_after_release_until_the_block_is_taken() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    content = pool.publish(block, ROOT, A)
    pool.release([block])
    assert pool.find(ROOT, A) == KnownBlock(block, content)
    pool.share([block])
    assert (pool._counts[block], pool.num_free) == (1, 1)
    pool.release([block])
    pool.take(2)
    assert pool.find(ROOT, A) is None


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(0)
    pool = BlockPool(12)
    held: list[list[int]] = []
    contents: dict[int, bytes] = {}  # of blocks, as long as they are not taken again
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            blocks = pool.take(rng.randint(1, min(3, pool.num_free)))
            held.append(blocks)
            for block in blocks:
                contents.pop(block, None)
        elif action < 0.6 and held:
            block = rng.choice(rng.choice(held))
            if block not in contents:
                contents[block] = bytes([rng.randrange(30)])
                pool.publish(block, ROOT, contents[block])
        elif action < 0.8 and contents:
            block = rng.choice(list(contents))
            found = pool.find(ROOT, contents[block])
            assert found is not None and contents[found.block] == contents[block]
            pool.share([found.block])
            held.append([found.block])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        counts = [sum(blocks.count(block) for blocks in held) for block in range(12)]
        assert pool._counts == counts
        assert pool.num_used == sum(count > 0 for count in counts)
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == 12

"""Blocks: contents are found as long as they are there, never longer."""

from __future__ import annotations

from verl.workers.rollout.native.block_pool import ROOT, BlockPool, KnownBlock

A = b"aaaa"
B = b"bbbb"
C = b"cccc"


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

"""Blocks: every one is free or counted, contents are found as long as they are there, never longer."""

from __future__ import annotations

import random

import pytest

from verl.workers.rollout.native.block_pool import ROOT, BlockPool, Found

A, B, C = b"aaaa", b"bbbb", b"cccc"


def test_blocks_that_were_never_used_come_last() -> None:
    pool = BlockPool(4)
    first = pool.take(2)
    pool.release(first)
    assert pool.take(1)[0] in first
    assert pool.num_touched == 2
    pool.take(3)
    assert (pool.num_touched, pool.num_free) == (4, 0)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert (pool.count(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.count(block), pool.num_free) == (0, 2)


def test_releasing_a_free_block_and_taking_too_many_are_bugs() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="are free"):
        pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="free already"):
        pool.release([block])


def test_contents_are_found_after_release_until_the_block_is_taken() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    content = pool.publish(block, ROOT, A)
    pool.release([block])
    assert pool.find(ROOT, A) == Found(block, content)
    pool.share([block])
    assert (pool.count(block), pool.num_free) == (1, 1)
    pool.release([block])
    pool.take(2)
    assert pool.find(ROOT, A) is None


def test_contents_are_known_by_what_stands_before_them_too() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(3)
    after_a, after_b = pool.publish(first, ROOT, A), pool.publish(second, ROOT, B)
    after_ac = pool.publish(third, after_a, C)
    assert pool.find(after_a, C) == Found(third, after_ac)
    assert pool.find(after_b, C) is None
    assert pool.find(ROOT, C) is None


def test_equal_contents_have_one_number_and_outlive_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    assert pool.publish(first, ROOT, A) == pool.publish(second, ROOT, A)
    pool.release([first])
    (again,) = pool.take(1)
    assert again == first
    found = pool.find(ROOT, A)
    assert found is not None and found.block == second


def test_a_block_may_be_published_by_its_beginning_and_whole() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    part, whole = pool.publish(block, ROOT, A), pool.publish(block, ROOT, A + B)
    assert pool.find(ROOT, A) == Found(block, part)
    assert pool.find(ROOT, A + B) == Found(block, whole)
    pool.release([block])
    pool.take(1)
    assert pool.find(ROOT, A) is None and pool.find(ROOT, A + B) is None


def test_blocks_without_known_contents_are_taken_before_others_and_then_the_oldest() -> None:
    pool = BlockPool(3)
    old, plain, young = pool.take(3)
    pool.publish(old, ROOT, A)
    pool.publish(young, ROOT, B)
    for block in (old, plain, young):
        pool.release([block])
    assert pool.take(3) == [plain, old, young]


def test_of_a_sequence_the_last_block_is_taken_first() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    before = pool.publish(blocks[0], ROOT, A)
    pool.publish(blocks[1], before, B)
    pool.release(blocks)
    assert pool.take(1) == [blocks[1]]
    assert pool.find(ROOT, A) is not None


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
        assert [pool.count(block) for block in range(12)] == counts
        assert pool.num_used == sum(count > 0 for count in counts)
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == 12

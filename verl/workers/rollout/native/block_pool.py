"""The pool of KV blocks: which are in use, by how many sequences, and what their contents are.

    take -> [in use, counted] <- share (one more sequence reads it)
                |  release, count 0
                v
             [free, contents still known] -- share: in use again -- or take: forgotten, filled anew

A block can be published under its contents, which are its tokens and the block before it. A sequence that
starts with the same tokens then finds it (prefix sharing). It finds the block even after its last user let go
of it, until the space is needed. The first positions of a block may be published too (the end of a prompt).
Such a block is found in order to be copied. Only numbers are kept here, as the tensors belong to the model
runner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0  # the content number before a sequence's first block


class KnownBlock(NamedTuple):
    """A block that holds the requested contents, and the number of these contents."""

    block: int
    content: int


class _Entry(NamedTuple):
    content: int
    blocks: dict[int, None]  # an ordered set of the blocks that have these contents


class BlockPool:
    """The reference counts, free blocks (least recently used first) and index of contents.

    Contents are compared as they are, not by a hash. Blocks that were never used are taken last. Memory that
    is only touched when it is used then follows the highest number of blocks in use.

    Attributes:
        num_blocks: The size of the pool.
        num_touched: Number of blocks that were ever in use since the last `clear`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._last_content = ROOT
        self.clear()

    def clear(self) -> None:
        """Forget everything. All blocks are free, and as if never used."""
        self.num_touched = 0
        self._counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict()
        self._index: dict[tuple[int, bytes], _Entry] = {}
        self._keys: dict[int, list[tuple[int, bytes]]] = {}

    def forget_contents(self) -> None:
        """Forget what the blocks hold, so that none is found any more. Blocks in use stay in use."""
        self._index.clear()
        self._keys.clear()

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self.num_touched

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Take `count` blocks for one sequence alone. What they held is forgotten."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks = []
        for _ in range(count):
            if self._free:
                block, _ = self._free.popitem(last=False)
                self._forget(block)
            else:
                block = self.num_touched
                self.num_touched += 1
            self._counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more sequence that holds these blocks. Free ones are in use again."""
        for block in blocks:
            if not self._counts[block]:
                del self._free[block]
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Count one sequence less that holds these blocks.

        Blocks that nobody holds any more become free, the last ones first.
        """
        for block in reversed(blocks):
            assert self._counts[block] > 0, f"block {block} was free already"
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free[block] = None
                if block not in self._keys:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, before: int, tokens: bytes) -> int:
        """Let others find a block by its contents.

        Args:
            block: The block.
            before: The number of the contents before the block (`ROOT` for the first block).
            tokens: The tokens of its first positions, as bytes (4 each). Their KV state is computed, or will
                be by the time it is read.

        Returns:
            The number of these contents, the same for all blocks that hold the same.
        """
        key = (before, tokens)
        entry = self._index.get(key)
        if entry is None:
            self._last_content += 1
            entry = self._index[key] = _Entry(self._last_content, {})
        if block not in entry.blocks:
            entry.blocks[block] = None
            self._keys.setdefault(block, []).append(key)
        return entry.content

    def find(self, before: int, tokens: bytes) -> KnownBlock | None:
        """Return a block whose first positions hold `tokens`, after contents `before`, or None."""
        entry = self._index.get((before, tokens))
        return None if entry is None else KnownBlock(next(iter(entry.blocks)), entry.content)

    def _forget(self, block: int) -> None:
        for key in self._keys.pop(block, ()):
            entry = self._index[key]
            del entry.blocks[block]
            if not entry.blocks:
                del self._index[key]

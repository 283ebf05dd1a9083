"""What KV state is there already for the first tokens of a session, and what it offers to others.

Full blocks are shared. The block in which a prompt ends is copied instead, since each session goes on in it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from verl.workers.rollout.native.block_pool import ROOT, BlockPool
from verl.workers.rollout.native.session import Session


@dataclass
class Prefix:
    """KV state for the first `num_tokens` tokens: full blocks to share, and one to copy the rest from.

    Attributes:
        contents: content numbers of `blocks`.
        source: a block whose first positions hold the tokens after those of `blocks`; None = there is none.
    """

    blocks: list[int]
    contents: list[int]
    num_tokens: int
    source: int | None


def find_prefix(pool: BlockPool, session: Session, promised: Set[int], block_size: int) -> Prefix:
    """The longest beginning of a session that is there, without its last token: that one must be computed.

    Args:
        promised: blocks that are filled in the step that is being planned; they can be shared, not copied.
    """
    tokens = session.tokens
    most = len(tokens) - 1
    found = Prefix([], [], 0, None)
    before = ROOT
    while found.num_tokens + block_size <= most:
        start = found.num_tokens
        hit = pool.find(before, tokens[start : start + block_size].tobytes())
        if hit is None:
            break
        before = hit.content
        found.blocks.append(hit.block)
        found.contents.append(before)
        found.num_tokens += block_size
    start = found.num_tokens
    for end in (start + block_size, session.prompt_len):
        if start < end <= min(len(tokens), start + block_size) and min(end, most) > start:
            hit = pool.find(before, tokens[start:end].tobytes())
            # A whole block may be one that this step fills; the end of a prompt is computed already.
            if hit is not None and (end - start < block_size or hit.block not in promised):
                found.source, found.num_tokens = hit.block, min(end, most)
                break
    return found


def publish(pool: BlockPool, session: Session, num_tokens: int, block_size: int) -> None:
    """Let others find the full blocks among a session's first `num_tokens` positions."""
    for index in range(len(session.contents), num_tokens // block_size):
        before = session.contents[-1] if index else ROOT
        tokens = session.tokens[index * block_size : (index + 1) * block_size].tobytes()
        session.contents.append(pool.publish(session.blocks[index], before, tokens))


def publish_prompt_end(pool: BlockPool, session: Session, num_computed: int, block_size: int) -> None:
    """Let others find the partly filled last block of a prompt, once it is computed."""
    index, rest = divmod(session.prompt_len, block_size)
    if rest and num_computed >= session.prompt_len:
        before = session.contents[index - 1] if index else ROOT
        tokens = session.tokens[index * block_size : session.prompt_len].tobytes()
        pool.publish(session.blocks[index], before, tokens)

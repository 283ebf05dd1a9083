"""Stop strings on token boundaries.

This module answers when a sampled token completes a stop string such as `</search>`.
A tokenizer merges freely, so a stop string may be spread over tokens ("</", "search", ">"), and its end may
lie inside a token (">\\n\\n"). `StopCondition` turns each token into its bytes once. `candidate_ids` are the
tokens that can hold the last byte of a stop string, so for nearly all sampled tokens the check is one lookup.
For the few others `match` looks at the bytes of the last tokens. The completing token is kept whole, because
cutting it would leave ids that were never sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"


class StopCondition:
    """A set of stop strings for one tokenizer.

    Attributes:
        strings: The stop strings, each of them once.
        candidate_ids: The tokens that can complete a stop string.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], pieces: list[bytes] | None = None) -> None:
        """Build the condition.

        Args:
            tokenizer: A Hugging Face tokenizer.
            strings: The stop strings.
            pieces: The tokenizer's `token_bytes`, if you have them already.

        Raises:
            ValueError: If there is no string, or an empty one.
        """
        if isinstance(strings, str) or not strings or not all(strings):
            raise ValueError(
                f"stop strings are {strings!r}; expected a list of one or more non-empty strings"
            )
        self.strings = tuple(dict.fromkeys(strings))
        self._targets = [(string, string.encode("utf-8")) for string in self.strings]
        self._pieces = token_bytes(tokenizer) if pieces is None else pieces
        heads = tuple({target[start:] for _, target in self._targets for start in range(len(target))})
        targets = tuple(target for _, target in self._targets)
        self.candidate_ids = frozenset(
            token_id
            for token_id, piece in enumerate(self._pieces)
            if piece.startswith(heads) or any(target in piece for target in targets)
        )
        self._reach = max(len(target) for target in targets) - 1

    def match(self, token_ids_tail: Sequence[int]) -> str | None:
        """Return the stop string that the last token completes, or None.

        Of several matches the one that ends first wins, then the longest. Ids that the tokenizer doesn't know
        (of a padded vocabulary) have no bytes.
        """
        if not token_ids_tail or token_ids_tail[-1] not in self.candidate_ids:
            return None
        last = self._bytes_of(token_ids_tail[-1])
        before = b""
        for token_id in reversed(token_ids_tail[:-1]):
            if len(before) >= self._reach:
                break
            before = self._bytes_of(token_id) + before
        text = before + last
        best: tuple[int, int, str] | None = None
        for string, target in self._targets:
            start = text.find(target, max(0, len(before) - len(target) + 1))
            if start >= 0:
                key = (start + len(target), -len(target), string)
                best = key if best is None else min(best, key)
        return best[2] if best else None

    def settled_length(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of an unfinished turn end outside of any stop string.

        The tokens after them may be the beginning of a stop string. An engine that has not seen the leading
        tokens being sampled, and goes on from there, can complete a stop string only with tokens of its own.
        """
        for length in range(len(token_ids), 0, -1):
            tail = b"".join(map(self._bytes_of, token_ids[max(0, length - self._reach) : length]))
            beginnings = (target[:end] for _, target in self._targets for end in range(1, len(target)))
            if not tail.endswith(tuple(beginnings)):
                return length
        return 0

    def _bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, or none for an id that the tokenizer doesn't know."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Return the bytes that each token id adds to a text, as a list over the tokenizer's ids (b"" for a gap).

    Byte-level vocabularies (GPT-2, Qwen, Llama 3) and SentencePiece ones (Llama 2, Mistral) are read
    directly. Any other tokenizer is asked to decode each token after another one.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    plain = {text: token_id for text, token_id in vocab.items() if token_id not in added}
    pieces = [b""] * (1 + max([*vocab.values(), *added], default=-1))
    alphabet = _byte_level_alphabet()
    has_space = any(_BYTE_LEVEL_SPACE in text for text in plain)
    if has_space and all(char in alphabet for text in plain for char in text):
        for text, token_id in plain.items():
            pieces[token_id] = bytes(alphabet[char] for char in text)
    elif any(_SENTENCEPIECE_SPACE in text for text in plain):
        for text, token_id in plain.items():
            byte = _BYTE_TOKEN.fullmatch(text)
            pieces[token_id] = (
                bytes([int(byte[1], 16)])
                if byte
                else text.replace(_SENTENCEPIECE_SPACE, " ").encode("utf-8", "ignore")
            )
    else:
        anchor = min(plain.values(), default=0)
        offset = len(tokenizer.decode([anchor]))
        for token_id in plain.values():
            text = tokenizer.decode([anchor, token_id], clean_up_tokenization_spaces=False)[offset:]
            pieces[token_id] = text.encode("utf-8", "ignore")
    for token_id, text in added.items():
        pieces[token_id] = text.encode("utf-8", "ignore")
    return pieces


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for the 256 bytes, as character -> byte.

    Printable Latin-1 characters stand for themselves, and the other bytes are moved to characters above them.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

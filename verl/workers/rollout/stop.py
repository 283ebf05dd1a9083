"""Stop strings on token boundaries: when does a sampled token complete `</search>`?

A tokenizer merges freely, so a stop string may be spread over tokens ("</", "search", ">"), and its end may
lie inside a token (">\\n\\n"). `StopCondition` turns each token into its bytes once. `candidate_ids` are the
tokens that can hold the last byte of a stop string, so for nearly all sampled tokens the check is one lookup;
for the few others `match` looks at the bytes of the tail. The completing token is kept whole: cutting it
would leave ids that were never sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_LEVEL_SPACE = "\u0120"


class StopCondition:
    """A set of stop strings for one tokenizer. candidate_ids: the tokens that can complete one."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], pieces: list[bytes] | None = None) -> None:
        """Build from a Hugging Face tokenizer. pieces: its `token_bytes`, where they are known already.
        ValueError if there is no string, or an empty one.
        """
        if isinstance(strings, str) or not strings or not all(strings):
            raise ValueError(
                f"stop strings are {strings!r}; expected a list of one or more non-empty strings"
            )
        self.strings = tuple(dict.fromkeys(strings))
        self._targets = [(string, string.encode("utf-8")) for string in self.strings]
        self._pieces = token_bytes(tokenizer) if pieces is None else pieces
        heads = tuple({target[start:] for _, target in self._targets for start in range(len(target))})
        whole = tuple(target for _, target in self._targets)
        self.candidate_ids = frozenset(
            token_id
            for token_id, piece in enumerate(self._pieces)
            if piece.startswith(heads) or any(target in piece for target in whole)
        )
        self._reach = max(len(target) for target in whole) - 1

    def match(self, token_ids_tail: Sequence[int]) -> str | None:
        """The stop string that the last token completes, or None.

        Of several matches the one that ends first wins, then the longest. Ids that the tokenizer doesn't know
        (a padded vocabulary) have no bytes.
        """
        if not token_ids_tail or token_ids_tail[-1] not in self.candidate_ids:
            return None
        last = self._piece(token_ids_tail[-1])
        before = b""
        for token_id in reversed(token_ids_tail[:-1]):
            if len(before) >= self._reach:
                break
            before = self._piece(token_id) + before
        text = before + last
        found: tuple[int, int, str] | None = None
        for string, target in self._targets:
            start = text.find(target, max(0, len(before) - len(target) + 1))
            if start >= 0:
                key = (start + len(target), -len(target), string)
                found = key if found is None else min(found, key)
        return found[2] if found else None

    def settled_length(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens of an unfinished turn don't end within a stop string that may be under way.

        A turn that is gone on with from there, by an engine that has not seen these tokens being sampled, can
        complete a stop string only with tokens of its own.
        """
        for length in range(len(token_ids), 0, -1):
            tail = b"".join(map(self._piece, token_ids[max(0, length - self._reach) : length]))
            begun = (target[:end] for _, target in self._targets for end in range(1, len(target)))
            if not tail.endswith(tuple(begun)):
                return length
        return 0

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""


def token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes that each token id adds to a text, as a list over the tokenizer's ids (b"" for a gap).

    Byte-level vocabularies (GPT-2, Qwen, Llama 3) and SentencePiece ones (Llama 2, Mistral) are read
    directly; any other is asked to decode each token behind another one.
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
    """GPT-2's printable stand-in for each of the 256 bytes: printable Latin-1 is itself, the rest moves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""The words that microworlds are made of, and the rule that keeps some combinations apart.

Every name is a combination of two words from fixed inventories ("Bratis Gildane", "Amber Harbor", "North
Valdon", "Cidex Pictures"). The tokenizer has one token for each of these words, so a model can copy any name
as two tokens. Because a name is only a combination, it can't be learnt by heart.

`is_held_out` splits the combinations in two by a hash, once and for all (see `data_prep.microworld`).
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

WORDS: dict[str, list[str]] = {}
for _line in Path(__file__).with_name("names.txt").read_text(encoding="utf-8").splitlines():
    _kind, _, _words = _line.rpartition(":")  # a line without a kind continues the one before
    WORDS.setdefault(_kind or list(WORDS)[-1], []).extend(_words.split())

# kind of name -> (first words, second words)
NAME_PARTS = {
    "person": (WORDS["first name"], WORDS["last name"]),
    "film": (WORDS["adjective"], WORDS["film"]),
    "novel": (WORDS["adjective"], WORDS["novel"]),
    "company": (WORDS["brand"], WORDS["trade"]),
    "place": (WORDS["direction"], WORDS["town"]),
}
# kind of plain value -> its words
VALUES = {kind: WORDS[kind] for kind in ("river", "region", "instrument", "product")}
VALUES["year"] = [str(year) for year in range(1900, 2000)]
HELD_OUT_SHARE = 5  # one text in five


def is_held_out(text: str) -> bool:
    """Return whether a text is reserved for tests, as one in `HELD_OUT_SHARE` is; the same on every machine.

    For a name, pass kind|name.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def draw_names(rng: random.Random, kind: str, count: int, held_out: bool) -> list[str]:
    """Draw `count` different names of a kind, all held out or none of them."""
    first_words, second_words = NAME_PARTS[kind]
    names: dict[str, None] = {}
    while len(names) < count:
        name = f"{rng.choice(first_words)} {rng.choice(second_words)}"
        if is_held_out(f"{kind}|{name}") == held_out:
            names[name] = None
    return list(names)

"""Whether a key is read where a table says: by the source of the function that is named."""

import ast
import re
from functools import cache

from verl.trainer.config.loading import CONFIG_DIR

ROOT = CONFIG_DIR.parents[2]


@cache
def function_source(place: str) -> str:
    """Source of "file:function" or "file:Class.method"; fails if there is no such thing."""
    file, _, name = place.partition(":")
    text = (ROOT / file).read_text(encoding="utf-8")
    scope: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        found = [n for n in scope if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        assert found, f"{file} has no {name}"
        node = found[-1]
        scope = node.body
    assert node is not None
    return ast.get_source_segment(text, node) or ""


def is_read(key: str, place: str) -> bool:
    """Whether the function at `place` mentions the key's last name, as an attribute or in quotes."""
    leaf = key.split(".")[-1]
    # Groups of like-named keys are read as f"{prefix}_micro_batch_size" and so on.
    generic = re.sub(r"^(ppo|log_prob|forward)_", "{prefix}_", leaf)
    source = function_source(place)
    return re.search(rf"\.{leaf}\b", source) is not None or f'"{generic}"' in source or f'"{leaf}"' in source

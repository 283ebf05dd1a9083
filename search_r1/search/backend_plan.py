"""What --retriever_name and --index_path ask for, decided from names and files before anything loads.

    "bm25+e5", "A,B" -> plan_backends -> [BackendPlan(bm25, A), BackendPlan(exact, B)]

The user's word is the name; what the index path holds decides the rest: a folder of Lucene is searched by
Lucene also under the name bm25, a dense name takes an exact index of ours or a FAISS file.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.manifest import WORK_SUFFIX, read_manifest

ONLINE = ("serpapi", "google")
SPARSE = ("bm25", "lucene")
DENSE = ("e5", "bge", "contriever", "minilm", "gte", "dpr", "jina", "nomic")  # examples: any name will do
DEFAULT_MODELS = {"e5": "intfloat/e5-base-v2"}  # as Search-R1's server

EXTRAS = {
    "bm25": ("retrieval", ("numba",)),
    "exact": ("dense", ("torch", "transformers")),
    "faiss": ("dense,faiss", ("torch", "transformers", "faiss")),
    "lucene": ("pyserini", ()),
    "rerank": ("dense", ("torch", "transformers")),
}
"""Backend: the extras of setup.py that install it, and the modules that it imports."""


@dataclass(frozen=True)
class BackendPlan:
    """One backend to open. `name`: the user's word. `kind`: bm25, lucene, exact, faiss, serpapi or google.
    `model`: encoder of a dense one; None: what the index's manifest names."""

    name: str
    kind: str
    index_path: Path | None = None
    model: str | None = None


def plan_backends(names: str, index_paths: str | None, models: str | None) -> list[BackendPlan]:
    """One plan for each name in `names` ("bm25", "bm25+e5"). Raises ValueError, also for a wrong index. With
    several names `index_paths` has a comma between the paths, in the order of the names (nothing before or
    after a comma: no index), and `models` one between the models of the dense ones."""
    words = [word.strip() for word in names.lower().split("+")]
    if not all(words):
        raise ValueError(f"--retriever_name: found {names!r}, expected a name, or two with + between them")
    if len(set(words)) < len(words):
        raise ValueError(f"--retriever_name: found {names!r}, where a name stands twice")

    def deal_out(flag: str, value: str | None, names: list[str]) -> dict[str, str | None]:
        parts = value.split(",") if value and len(names) > 1 else [value] * len(names)
        if len(parts) != len(names):
            raise ValueError(
                f"{flag}: found {len(parts)}, expected {len(names)} with a comma between them, "
                f"in the order {', '.join(names)}"
            )
        return {name: (part or "").strip() or None for name, part in zip(names, parts, strict=True)}

    paths = deal_out("--index_path", index_paths, [word for word in words if word not in ONLINE])
    dense = [word for word in words if word not in (*ONLINE, *SPARSE)]
    encoders = deal_out("--retriever_model", models, dense)
    return [_plan(word, paths.get(word), encoders.get(word)) for word in words]


def _plan(name: str, index_path: str | None, model: str | None) -> BackendPlan:
    path = Path(index_path) if index_path else None
    if name in ONLINE:
        return BackendPlan(name, name)
    held = holds(path)
    if name in SPARSE:
        kind = "lucene" if "lucene" in (name, held) else "bm25"
        if kind == "lucene" and path is None:
            raise ValueError("--index_path is missing: the folder of the Lucene index")
        if path is not None and held != kind:
            needed = "a Lucene index" if kind == "lucene" else "one of BM25"
            raise _wrong_index(path, held, f"--retriever_name {name} needs {needed}")
        return BackendPlan(name, kind, path)
    near = difflib.get_close_matches(name, (*ONLINE, *SPARSE, *DENSE), n=1, cutoff=0.7)
    if near and near[0] not in DENSE:
        raise ValueError(f"--retriever_name: found {name!r}; did you mean {near[0]!r}?")
    if path is None:
        known = ", ".join((*SPARSE, *ONLINE))
        hint = f"did you mean {near[0]!r}? " if near and near[0] != name else ""
        raise ValueError(
            f"--retriever_name: found {name!r}. {hint}It is none of {known}, so it is taken for a dense "
            "encoder, which needs --index_path (python -m search_r1.search.index_builder makes an index)"
        )
    if held not in ("exact", "faiss"):
        raise _wrong_index(path, held, f"{name} needs a dense index")
    if model is None and read_manifest(path) is None:
        model = DEFAULT_MODELS.get(name)
        if model is None:
            raise ValueError(f"--retriever_model is missing: the encoder that {path} was built with")
    return BackendPlan(name, held, path, model)


DESCRIPTIONS = {
    "nothing": "does not exist",
    "bm25": "holds a BM25 index",
    "lucene": "holds a Lucene index",
    "exact": "holds a dense index",
    "faiss": "holds a FAISS index",
    "begun": "is not built yet: the index builder was stopped; start it again with the same flags",
    "lfs": "is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`",
    "unknown": "is no index that this server knows",
}


def holds(path: Path | None) -> str:
    """What is at an index path: a word of DESCRIPTIONS. Raises ValueError for a broken manifest."""
    if path is None or not path.exists():
        begun = path is not None and path.with_name(path.name + WORK_SUFFIX).exists()
        return "begun" if begun else "nothing"
    manifest = read_manifest(path)
    if manifest is not None and manifest.backend in DESCRIPTIONS:
        return manifest.backend
    if path.is_dir():
        if any(path.glob("segments_*")):
            return "lucene"
        return "unknown" if any(path.iterdir()) else "nothing"
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"version https://"):
        return "lfs"
    return "faiss" if start[:1] == b"I" and start[1:4].isalnum() else "unknown"


def _wrong_index(path: Path, held: str, expected: str) -> ValueError:
    message = f"--index_path: {path} {DESCRIPTIONS[held]}"
    return ValueError(message if held in ("begun", "lfs") else f"{message}, {expected}")


def check_at_least(values: object, least: float, *names: str) -> None:
    """Raises ValueError for a flag below `least`. None: it was not given."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name}: found {value}, expected at least {least}")


def check_packages(kind: str) -> None:
    """Raises ValueError with the command to type when a package of a backend, or Java, is not installed."""
    if kind == "lucene":
        from search_r1.search.lucene import check_java

        check_java()
    extra, modules = EXTRAS[kind]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(
            f"{kind} needs the package {missing[0]}, which is not installed: "
            f'pip install -c constraints.txt -e ".[{extra}]"'
        )


def check_model_folder(flag: str, model: str) -> None:
    """Raises ValueError for a model given as a path where no model is. A hub's name is not looked up."""
    path = Path(model)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        raise ValueError(f"{flag}: found {model}, which is no folder of a Hugging Face model: no config.json")

"""Decide what --retriever_name and --index_path ask for, from names and files, before anything loads.

    "bm25+e5", "A,B" -> plan_backends -> [BackendPlan(bm25, A), BackendPlan(exact, B)]

The user's word is the name. What the index path holds decides the rest. A Lucene folder is searched by Lucene
also under the name bm25. A dense name takes an exact index of ours or a FAISS file.
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
DEFAULT_MODELS = {"e5": "intfloat/e5-base-v2"}  # the encoder of Search-R1's server

EXTRAS = {
    "bm25": ("retrieval", ("numba",)),
    "exact": ("dense", ("torch", "transformers")),
    "faiss": ("dense,faiss", ("torch", "transformers", "faiss")),
    "lucene": ("pyserini", ()),
    "rerank": ("dense", ("torch", "transformers")),
}
"""Maps a backend to the extras of setup.py that install it, and to the modules that it imports."""


@dataclass(frozen=True)
class BackendPlan:
    """One backend to open.

    Attributes:
        name: The user's word.
        kind: bm25, lucene, exact, faiss, serpapi or google.
        index_path: Where the index is, or None for a backend without one.
        model: The encoder of a dense backend. None means the one that the index's manifest names.
    """

    name: str
    kind: str
    index_path: Path | None = None
    model: str | None = None


def plan_backends(names: str, index_paths: str | None, models: str | None) -> list[BackendPlan]:
    """Return one plan for each backend that the flags name.

    Args:
        names: The value of --retriever_name: one name ("bm25"), or several ("bm25+e5").
        index_paths: The value of --index_path. With several names it has a comma between the paths, in the
            order of the names. Nothing before or after a comma means no index.
        models: The value of --retriever_model. With several names it has a comma between the models of the
            dense ones.

    Raises:
        ValueError: For flags that can't work, and for a wrong index.
    """
    words = [word.strip() for word in names.lower().split("+")]
    if not all(words):
        raise ValueError(f"--retriever_name: found {names!r}, expected a name, or two with + between them")
    if len(set(words)) < len(words):
        raise ValueError(f"--retriever_name: found {names!r}, where a name stands twice")

    def split_by_name(flag: str, value: str | None, names: list[str]) -> dict[str, str | None]:
        entries = value.split(",") if value and len(names) > 1 else [value] * len(names)
        if len(entries) != len(names):
            raise ValueError(
                f"{flag}: found {len(entries)}, expected {len(names)} with a comma between them, "
                f"in the order {', '.join(names)}"
            )
        return {name: (entry or "").strip() or None for name, entry in zip(names, entries, strict=True)}

    paths = split_by_name("--index_path", index_paths, [word for word in words if word not in ONLINE])
    dense = [word for word in words if word not in (*ONLINE, *SPARSE)]
    encoders = split_by_name("--retriever_model", models, dense)
    return [_plan_one(word, paths.get(word), encoders.get(word)) for word in words]


def _plan_one(name: str, index_path: str | None, model: str | None) -> BackendPlan:
    """Return the plan of one backend. Raises ValueError if the index at the path is not one for the name."""
    path = Path(index_path) if index_path else None
    if name in ONLINE:
        return BackendPlan(name, name)
    held_kind = index_kind(path)
    if name in SPARSE:
        kind = "lucene" if "lucene" in (name, held_kind) else "bm25"
        if kind == "lucene" and path is None:
            raise ValueError("--index_path is missing: the folder of the Lucene index")
        if path is not None and held_kind != kind:
            expected = "a Lucene index" if kind == "lucene" else "one of BM25"
            raise _wrong_index(path, held_kind, f"--retriever_name {name} needs {expected}")
        return BackendPlan(name, kind, path)
    close_names = difflib.get_close_matches(name, (*ONLINE, *SPARSE, *DENSE), n=1, cutoff=0.7)
    if close_names and close_names[0] not in DENSE:
        raise ValueError(f"--retriever_name: found {name!r}; did you mean {close_names[0]!r}?")
    if path is None:
        names = ", ".join((*SPARSE, *ONLINE))
        hint = f"did you mean {close_names[0]!r}? " if close_names and close_names[0] != name else ""
        raise ValueError(
            f"--retriever_name: found {name!r}. {hint}It is none of {names}, so it is taken for a dense "
            "encoder, which needs --index_path (python -m search_r1.search.index_builder makes an index)"
        )
    if held_kind not in ("exact", "faiss"):
        raise _wrong_index(path, held_kind, f"{name} needs a dense index")
    if model is None and read_manifest(path) is None:
        model = DEFAULT_MODELS.get(name)
        if model is None:
            raise ValueError(f"--retriever_model is missing: the encoder that {path} was built with")
    return BackendPlan(name, held_kind, path, model)


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


def index_kind(path: Path | None) -> str:
    """Return what is at an index path: a key of DESCRIPTIONS.

    Raises ValueError for a broken manifest.
    """
    if path is None or not path.exists():
        is_begun = path is not None and path.with_name(path.name + WORK_SUFFIX).exists()
        return "begun" if is_begun else "nothing"
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


def _wrong_index(path: Path, actual_kind: str, expected: str) -> ValueError:
    """Return the error that says what is at an index path and what was expected there."""
    message = f"--index_path: {path} {DESCRIPTIONS[actual_kind]}"
    return ValueError(message if actual_kind in ("begun", "lfs") else f"{message}, {expected}")


def check_at_least(values: object, least: float, *names: str) -> None:
    """Raise ValueError if one of the flags `names` is below `least`.

    A flag whose value is None was not given, and passes.
    """
    for name in names:
        value = getattr(values, name)
        if value is not None and not value >= least:
            raise ValueError(f"--{name}: found {value}, expected at least {least}")


def extras_of(kind: str, faiss_gpu: bool = False) -> str:
    """Return the extras of setup.py that a backend needs, with commas between them.

    Args:
        kind: A key of EXTRAS, or a backend that needs none beside `retrieval`.
        faiss_gpu: Whether FAISS is to search on GPUs, which takes another build of it.
    """
    extras = EXTRAS.get(kind, ("", ()))[0]
    return extras.replace("faiss", "faiss-gpu") if faiss_gpu else extras


def check_packages(kind: str, faiss_gpu: bool = False) -> None:
    """Raise ValueError if a package of a backend, or Java, is not installed.

    The message has the command that installs it. `faiss_gpu` means as in `extras_of`.
    """
    if kind == "lucene":
        from search_r1.search.lucene import check_java

        check_java()
    _, modules = EXTRAS[kind]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(
            f"{kind} needs the package {missing[0]}, which is not installed: "
            f'pip install -c constraints.txt -e ".[{extras_of(kind, faiss_gpu)}]"'
        )


def check_model_folder(flag: str, model: str) -> None:
    """Raise ValueError if a model is given as a path where no model is.

    The name of a model on a hub is not looked up.
    """
    path = Path(model)
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        raise ValueError(f"{flag}: found {model}, which is no folder of a Hugging Face model: no config.json")

"""Checks of what a run reads: models, data, an index."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check, check_each

_END = "the run would end before its first step"


@check("model", needs.a_run)
def find_broken_models(facts: Facts) -> Iterator[Finding]:
    """models that are not there, not whole, or without a tokenizer"""
    for model in facts.models:
        name = f"{model.key}={model.path}"
        if model.where == "nowhere":
            yield error(
                f"{name} is no folder, and no owner/name on the hub", _END, f"{model.key}=<model folder>"
            )
        elif model.problem is not None:
            yield error(
                f"{name} can't be read: {model.problem}", _END, f"copy the model again to {model.path}"
            )
        elif model.missing and model.where != "hub":
            names = ", ".join(model.missing)
            do = f"hf download {model.path}" if model.where == "cache" else f"copy {names} into {model.path}"
            yield error(f"{name} is not whole: no {names}", _END, do)


@check("hub-offline", needs.a_run)
def find_uncached_models(facts: Facts) -> Iterator[Finding]:
    """the hub switched off, and a model that is not in the cache"""
    environment = facts.here.environment
    switched = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(environment.get(name))]
    for model in facts.models:
        if model.where == "hub" and switched:
            yield error(
                f"{switched[0]}={environment[switched[0]]} and {model.key}={model.path} is not in the cache",
                "it can't be loaded, and nothing may be fetched",
                f"on a machine with network: hf download {model.path} (same HF_HOME), or unset {switched[0]}",
            )


def _is_on(value: str | None) -> bool:
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")


@check("data", needs.a_run)
def find_missing_data(facts: Facts) -> Iterator[Finding]:
    """parquet files and a reward function that are not there"""
    for key, paths in facts.data.items():
        for path, problem in paths.items():
            if problem is not None:
                yield error(f"{key}={path}: {problem}", _END, f"{key}=<file>")


@check_each("shared-paths", needs.nodes_of_a_run)
def find_paths_missing_on_nodes(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """models that a node of the cluster does not have at the same path"""
    for path in machine.missing if facts.nodes else ():
        yield error(
            f"{path} is not there",
            "the processes on this node could not load it",
            f"copy it to the same path on every node, or to a folder that all share: rsync -a {path} "
            f"<node>:{path}",
        )


@check("index", needs.an_index)
def find_unfit_index(facts: Facts) -> Iterator[Finding]:
    """an index (--index_path) that is not whole, or larger than the memory it is searched in"""
    index = facts.index
    if index is None:
        return
    if index.problem is not None:
        yield error(
            f"--index_path {index.path}: {index.problem}",
            "the retrieval server would not start",
            "see the reason",
        )
        return
    assert index.num_bytes is not None
    gpus = facts.here.gpus
    if index.on_gpu and gpus and all(gpu.total_bytes for gpu in gpus):
        room = sum(gpu.total_bytes - gpu.used_bytes for gpu in gpus)
        if index.num_bytes > room:
            yield error(
                f"--index_path {index.path} has {_gb(index.num_bytes)}, the {len(gpus)} GPUs here have "
                f"{_gb(room)} free",
                "the retrieval server would end with out of memory, after minutes of loading",
                "bash retrieval_launch.sh --device cpu, or an index of half the size (python -m "
                "search_r1.search.index_builder), or more GPUs",
            )
    elif facts.here.memory_free_bytes is not None and index.num_bytes > facts.here.memory_free_bytes:
        yield warning(
            f"--index_path {index.path} has {_gb(index.num_bytes)}, this machine "
            f"{_gb(facts.here.memory_free_bytes)} "
            "of free memory",
            "each search would read from disk, at a fraction of the speed",
            "serve it on a machine with more memory: retriever.url=http://<machine>:8000/retrieve",
        )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"

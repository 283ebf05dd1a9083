"""Collects facts: the quick ones that every start of the trainer looks at, and all of them for the doctor."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

from verl.doctor.facts import Facts, Run
from verl.doctor.facts_machine import Order, look_at_machine
from verl.doctor.facts_models import look_at_model
from verl.doctor.facts_ray import look_at_nodes, look_at_ray
from verl.doctor.facts_retriever import Question, look_at_corpus, look_at_index
from verl.doctor.facts_run import (
    count_checkpoints,
    look_at_data,
    model_paths,
    paths_for_workers,
    places,
    ray_place,
)


def collect(run: Run | None, *, quick: bool = False, index_path: str | None = None) -> Facts:
    """Looks at everything that matters to a run; without one, at the machine and at Ray.

    Args:
        run: the run that is meant.
        quick: leave out what takes seconds: GPUs by nvidia-smi and matmul, and the other nodes.
        index_path: an index that the retrieval server is to load on this machine.
    """
    with_ray = run.needs_ray if run is not None else importlib.util.find_spec("ray") is not None
    order = _order(run, with_gpus=not quick, with_ray=with_ray)
    environment = dict(os.environ)
    facts = Facts(
        here=look_at_machine(order),
        run=run,
        ray=look_at_ray() if with_ray else None,
        index=None if index_path is None else look_at_index(index_path),
    )
    if run is not None:
        models = (look_at_model(key, path, environment) for key, path in model_paths(run).items())
        corpus_path = run.get("retriever.corpus_path")
        facts = replace(
            facts,
            models=tuple(models),
            data=look_at_data(run),
            checkpoints_there=count_checkpoints(run),
            corpus=look_at_corpus(corpus_path) if run.searches and corpus_path else None,
        )
    if quick or facts.ray is None or facts.ray.address is None or facts.ray.problem is not None:
        return facts
    try:
        cluster, machines = look_at_nodes(facts.ray, order)
    except ValueError as error:
        return replace(facts, ray=replace(facts.ray, problem=str(error)))
    return replace(facts, ray=cluster, nodes=machines)


def _order(run: Run | None, with_gpus: bool, with_ray: bool) -> Order:
    if run is None:
        return Order(places=(ray_place(dict(os.environ)),) if with_ray else (), with_gpus=with_gpus)
    return Order(
        servers=Question.of(run.settings) if run.searches else None,
        paths=paths_for_workers(run),
        places=places(run, dict(os.environ)),
        with_gpus=with_gpus and run["trainer.device"] != "cpu",
    )

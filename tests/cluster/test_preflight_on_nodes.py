"""The preflight on a real Ray cluster of two nodes, and on a machine beside it: three network namespaces.

The cluster starts once. node1 is its head, with the retrieval server; node3 is in no cluster. A healthy run
has no findings; then the run names what only node1 has, and RAY_ADDRESS is wrong in each of its ways.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from namespace_nodes import REPOSITORY, NamespaceNodes, missing, wait_until

from data_prep.microworld import write_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

HEAD = "10.77.0.1:6379"
ACTOR = "actor_rollout_ref.actor"
CARDS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
VARIABLES: dict[str, str | None] = {
    "RAY_ADDRESS": HEAD,
    **dict.fromkeys(CARDS, "eth0"),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(REPOSITORY),
    **dict.fromkeys(("RAY_TMPDIR", "TMPDIR", "http_proxy", "HTTP_PROXY", "CUDA_VISIBLE_DEVICES")),
}
_STARTED = "Ray runtime started"
_WAIT = 300.0  # seconds; a cluster takes 15 on an idle machine


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, list[str]]:
    """Name of a case -> lines of its findings."""
    folder = tmp_path_factory.mktemp("nodes")
    world = folder / "world"
    write_world(7, world, num_train=32, num_test=4, num_3hop=2)
    with NamespaceNodes(3, folder) as nodes:
        one, two, three = nodes
        only_there = Path(one.folder / "tmp" / "model")  # /tmp/model, on node1 alone
        only_there.symlink_to(REPOSITORY / "data_prep" / "base_model")
        one.run(["ip", "address", "add", "10.99.0.1/32", "dev", "lo"])  # an address that node2 does not reach
        environment = {**VARIABLES, **dict.fromkeys(("RAY_ADDRESS", *CARDS))}
        server = one.start(
            [sys.executable, "-m", "search_r1.search.server", "--corpus_path", world / "corpus.jsonl"],
            environment,
        )
        node = [sys.executable, "-m", "verl.single_controller.ray.node"]
        own = ["--num-cpus=1", "--object-store-memory=100000000"]
        patience = {"RAY_health_check_failure_threshold": "2"}  # in place of 5: to know sooner
        head = one.start([*node, "head", "--address", one.address, *own], environment | patience)
        worker = two.start([*node, "worker", "--head", HEAD, "--address", two.address, *own], environment)
        try:
            for process, sign in ((server, "retrieval server on"), (head, _STARTED), (worker, _STARTED)):
                wait_until(lambda process=process, sign=sign: sign in process.output(), process, _WAIT)
            answers = _diagnose(one, _cases(world)) | _diagnose(three, _case_outside(world))
            answers["starved"] = _starved(worker)
        finally:
            for process in (worker, head, server):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # then it ends with its node
                    process.wait(30)
    return answers


def _starved(worker) -> list[str]:
    """Ray's process of a node gets no CPU time for 9 seconds, as beside eight processes that load a model;
    what the node said until 3 seconds later.
    """
    (raylet,) = (p for p in psutil.Process(worker.pid).children(recursive=True) if p.name() == "raylet")
    raylet.suspend()
    time.sleep(9)
    raylet.resume()
    time.sleep(3)
    return worker.output().splitlines()


def _diagnose(node, cases: dict[str, dict]) -> dict[str, list[str]]:
    script = REPOSITORY / "tests" / "preflight" / "checks_on_node.py"
    output = node.run([sys.executable, script, json.dumps(cases)], VARIABLES, timeout=240)
    answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer["findings"] for answer in answers}


def _overrides(world: Path, *more: str) -> list[str]:
    model = REPOSITORY / "data_prep" / "base_model"
    return [
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={model}",
        "data.max_start_length=64",
        "data.max_prompt_length=768",
        "data.max_response_length=32",
        "data.max_obs_length=200",
        "algorithm.adv_estimator=grpo",
        "retriever.url=http://10.77.0.1:8000/retrieve",
        "retriever.timeout=2",
        f"retriever.corpus_path={world}/corpus.jsonl",
        f"trainer.default_local_dir={world}/run",
        "trainer.device=cpu",
        "trainer.nnodes=2",
        *more,
    ]


def _cases(world: Path) -> dict[str, dict]:
    def case(*more: str, quick: bool = True, **variables: str | None) -> dict:
        return {"overrides": _overrides(world, *more), "variables": VARIABLES | variables, "quick": quick}

    only_node1 = ["retriever.url=http://10.99.0.1:8000/retrieve", "actor_rollout_ref.model.path=/tmp/model"]
    return {
        "healthy": case(quick=False),
        "healthy at the start": case(),
        "only on node1": case(*only_node1, quick=False),
        "three nodes": case(
            "trainer.nnodes=3", "data.train_batch_size=192", f"{ACTOR}.ppo_mini_batch_size=192"
        ),
        "gpus": case("trainer.nnodes=1", "trainer.n_gpus_per_node=8", "trainer.device=cuda"),
        "unset": case(RAY_ADDRESS=None),
    }


def _case_outside(world: Path) -> dict[str, dict]:
    return {"outside": {"overrides": _overrides(world), "variables": VARIABLES, "quick": True}}


def test_a_healthy_cluster_has_no_findings(told):
    assert told["healthy"] == [] and told["healthy at the start"] == []


def test_what_one_node_lacks_is_said_with_its_name(told):
    lines = told["only on node1"]
    assert len(lines) == 2, lines
    assert any(line.startswith("error: [shared-paths] node2: /tmp/model is not there") for line in lines)
    assert any(
        line.startswith("error: [retriever] node2: retriever.url=http://10.99.0.1:8000") for line in lines
    )


def test_too_few_nodes_and_gpus_are_said_before_anything_waits_for_them(told):
    (line,) = told["three nodes"]
    assert "trainer.nnodes=3, the cluster has 2 nodes" in line
    (line,) = told["gpus"]
    assert "the run asks for 8 GPUs, the cluster has 0" in line


def test_a_cluster_that_is_there_is_named_when_ray_address_is_not_set(told):
    (line,) = told["unset"]
    assert (
        line.startswith("error: [ray-address] RAY_ADDRESS is not set")
        and f"export RAY_ADDRESS={HEAD}" in line
    )


def test_a_driver_outside_of_the_cluster_is_told_to_join_it(told):
    (line,) = told["outside"]
    assert "[driver-node] this machine (node3) is no node of the cluster" in line and "worker --head" in line


def test_a_node_that_gets_no_cpu_time_for_a_while_is_not_taken_for_lost(told):
    assert not [line for line in told["starved"] if "joining again" in line]

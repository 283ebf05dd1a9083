"""Each check, judged from facts: finds its trouble, says what to type, finds nothing in healthy facts."""

from dataclasses import replace

import pytest
from doctor_facts import CORPUS, URL, facts_with, found, machine_with, run_with

from verl.doctor.facts import (
    Card,
    Corpus,
    Facts,
    Gpu,
    Index,
    Model,
    Place,
    RayCluster,
    RayNode,
    Server,
    from_json,
    to_json,
)
from verl.doctor.findings import Level, as_json, error, merged
from verl.doctor.registry import CHECKS, check, chosen, diagnose, without_a_look

BIG = Model("actor_rollout_ref.model.path", "/models/7b", "folder", 7_600_000_000, 2, 32768)
TWO_NODES = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, "trainer.device": "cuda"}
ON_CPU = {"trainer.nnodes": 2, "trainer.device": "cpu"}
NODES = (RayNode("node1", "10.0.0.1", 64, 8), RayNode("node2", "10.0.0.2", 64, 8))
CLUSTER = RayCluster("10.0.0.1:6379", nodes=NODES)
HOME = Place("home", "~", free_bytes=10**11, total_bytes=10**12)


def small_disk(free: float) -> tuple[Place, ...]:
    return (Place("run folder", "/data/run", free_bytes=int(free), total_bytes=10**13), HOME)


def server(**changes) -> Server:
    return replace(machine_with().servers[0], **changes)


SMALL = machine_with(memory_bytes=32 * 10**9, memory_free_bytes=20 * 10**9)

CASES = {
    "settings": [
        (
            facts_with(run=run_with(mistakes=("Found trainer.seed=x; expected a number. Set it.",))),
            "trainer.seed=x",
        ),
    ],
    "batches": [
        (facts_with({"data.train_batch_size": 300}), "a step has 300 trajectories, no multiple"),
        (facts_with({"data.train_batch_size": 300}), "Do: actor_rollout_ref.actor.ppo_mini_batch_size=150"),
        (facts_with(ON_CPU | {"trainer.n_gpus_per_node": 3}), "updates of 256 trajectories for 6 replicas"),
        (
            facts_with({"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 200}),
            "critic.ppo_mini_batch_size=200",
        ),
    ],
    "lengths": [
        (
            facts_with({"data.max_prompt_length": 40000}),
            "Do: data.max_prompt_length=32256, or a model with more",
        ),
        (facts_with({"data.max_obs_length": 4000}), "before it has read what its first search found"),
    ],
    "wandb-key": [(facts_with({"trainer.logger": ["console", "wandb"]}), "export WANDB_API_KEY")],
    "model": [
        (facts_with(models=(Model("m", "/no/where", "nowhere"),)), "m=/no/where is no folder"),
        (facts_with(models=(Model("m", "/m", "folder", missing=("tokenizer",)),)), "not whole: no tokenizer"),
        (facts_with(models=(Model("m", "a/b", "cache", missing=("weights",)),)), "Do: hf download a/b"),
        (facts_with(models=(Model("m", "/m", "folder", problem="cut short"),)), "can't be read: cut short"),
    ],
    "hub-offline": [
        (
            facts_with(
                models=(Model("m", "Qwen/Qwen2.5-3B", "hub"),),
                here=machine_with(environment={"HF_HUB_OFFLINE": "1"}),
            ),
            "hf download Qwen/Qwen2.5-3B",
        ),
    ],
    "data": [(facts_with(data={"data.train_files": {"/x.parquet": "there is no such file"}}), "/x.parquet")],
    "shared-paths": [
        (
            facts_with(TWO_NODES, nodes=(machine_with(name="node2", missing=("/models/7b",)),)),
            "node2: /models/7b is not there",
        ),
    ],
    "index": [
        (facts_with(index=Index("/i", problem="nothing is there")), "--index_path /i: nothing is there"),
        (facts_with(index=Index("/i", 250 * 10**9)), "of free memory"),
    ],
    "writable": [
        (
            facts_with(
                here=machine_with(places=(Place("run folder", "/data/run", "Read-only file system"),))
            ),
            "/data/run can't be written (Read-only file system)",
        ),
    ],
    "home": [
        (
            facts_with(here=machine_with(places=(replace(HOME, problem="Disk quota exceeded"),))),
            "quota exceeded",
        ),
        (facts_with(here=machine_with(places=(replace(HOME, free_bytes=10**8),))), "has 100 MB left"),
    ],
    "ray-disk": [
        (
            facts_with(here=machine_with(places=(Place("Ray's files", "/tmp", None, 10**9, 10**11), HOME))),
            "is 99 % full",
        ),
    ],
    "checkpoints": [
        (
            facts_with(
                {"trainer.save_freq": 10, "trainer.total_training_steps": 100},
                models=(BIG,),
                here=machine_with(places=small_disk(300e9)),
            ),
            "4 checkpoints of about 121.6 GB need 486.4 GB",
        ),
        (
            facts_with({"trainer.save_freq": 10}, models=(BIG,), here=machine_with(places=small_disk(300e9))),
            "Do: trainer.max_ckpt_to_keep=1",
        ),
    ],
    "open-files": [
        (facts_with(ON_CPU, here=machine_with(open_files=(1024, 1024))), "ulimit -n"),
        (facts_with(here=machine_with(open_files=(200, 65536))), "Do: ulimit -n 256"),
        (
            facts_with(
                {"actor_rollout_ref.rollout.placement": "apart"}, here=machine_with(open_files=(1024, 65536))
            ),
            "this run may need 2304",
        ),
    ],
    "cpus": [
        (facts_with(ON_CPU, here=machine_with(num_cpus=8.0)), "Ray counts 64 cores, this job may use 8")
    ],
    "memory": [
        (
            facts_with(models=(BIG,), here=machine_with(memory_limit_bytes=64 * 10**9)),
            "limit is 64.0 GB, weights, gradients and optimizer states need 121.6 GB",
        ),
        (
            facts_with(
                ON_CPU,
                ray=RayCluster("10.0.0.1:6379", nodes=(replace(NODES[0], object_store_bytes=60 * 10**9),)),
                here=machine_with(memory_limit_bytes=64 * 10**9),
            ),
            "--object-store-memory=19200000000",
        ),
    ],
    "shm": [(facts_with(ON_CPU, here=machine_with(shm_bytes=64 * 10**6)), "/dev/shm has 0.1 GB free")],
    "threads": [
        (
            facts_with(
                ON_CPU | {"trainer.n_gpus_per_node": 8},
                here=machine_with(environment={"OMP_NUM_THREADS": "32"}),
            ),
            "export OMP_NUM_THREADS=8",
        ),
    ],
    "versions": [
        (
            facts_with(
                ON_CPU,
                nodes=(
                    machine_with(),
                    machine_with(name="node2", software=replace(machine_with().software, torch="2.6.0")),
                ),
            ),
            "torch is 2.13.0 here and 2.6.0 on node2",
        ),
    ],
    "retriever": [
        (
            facts_with(here=machine_with(servers=(server(problem="Connection refused"),))),
            "Do: on 10.0.0.7: bash retrieval_launch.sh, or do_search=false",
        ),
        (
            facts_with(here=machine_with(servers=(server(problem="x", host_addresses=("127.0.0.1",)),))),
            "Do: bash retrieval_launch.sh",
        ),
        (
            facts_with(here=machine_with(servers=(server(problem="x", host_addresses=()),))),
            "Do: look whether 10.0.0.7 is the right name",
        ),
        (
            facts_with(
                here=machine_with(
                    servers=(server(), server(url="http://b/retrieve", problem="Connection refused"))
                )
            ),
            "the other servers have to do its work",
        ),
        (
            facts_with(
                here=machine_with(
                    servers=(
                        server(problem="503", health={"status": "loading", "progress": "reading /index"}),
                    )
                )
            ),
            "is still loading (reading /index)",
        ),
        (
            facts_with(
                ON_CPU,
                nodes=(
                    machine_with(),
                    machine_with(name="node2", servers=(server(problem="No route to host"),)),
                ),
            ),
            "[retriever] node2: retriever.url",
        ),
    ],
    "corpus": [
        (
            facts_with(corpus=Corpus("/wiki.jsonl", {"num_bytes": 7, "sample_sha256": "b" * 64})),
            "bash retrieval_launch.sh --corpus_path /wiki.jsonl",
        ),
        (facts_with(corpus=Corpus("/wiki.jsonl", problem="No such file or directory")), "can't be read"),
        (
            facts_with(corpus=Corpus("/wiki.jsonl", CORPUS), here=machine_with(servers=(server(health={}),))),
            "does not say which corpus it serves",
        ),
        (
            facts_with(
                here=machine_with(
                    servers=(server(), server(url="http://b/r", health={"corpus": CORPUS | {"num_bytes": 8}}))
                )
            ),
            "serve different corpora",
        ),
    ],
    "no-effect": [
        (
            facts_with(
                run=run_with(notes=("trainer.max_restarts=2 has no effect: one process. Set b=ray.",))
            ),
            "no effect: one process. Do: Set b=ray",
        ),
        (
            facts_with(run=run_with(notes=("x.seed=1 has no effect: nothing is drawn.",))),
            "Do: leave x.seed out",
        ),
        (
            facts_with(run=run_with(notes=("loss_mode=a is meant for b; with c its rows differ.",))),
            "loss_mode=a is meant for b: with c its rows differ. Do: set b",
        ),
    ],
    "ray-address": [
        (
            Facts(
                machine_with(), ray=RayCluster("a:1", problem="RAY_ADDRESS=a:1: nobody answers. Start one.")
            ),
            "a run on Ray would end before its first step. Do: Start one",
        ),
        (Facts(machine_with(), ray=RayCluster(None, started=("a:1",))), "export RAY_ADDRESS=a:1"),
        (
            facts_with(ON_CPU, ray=RayCluster(None, started=("10.0.0.1:6379",))),
            "export RAY_ADDRESS=10.0.0.1:6379",
        ),
        (facts_with(ON_CPU, ray=RayCluster(None)), "trainer.nnodes=2, and RAY_ADDRESS is not set"),
    ],
    "ray-resources": [
        (
            facts_with({"trainer.n_gpus_per_node": 8}, ray=RayCluster(None)),
            "the run asks for 8 GPUs, the Ray that it would start on this machine has 0",
        ),
        (
            facts_with(
                {"trainer.n_gpus_per_node": 8}, ray=RayCluster("a:1", nodes=(replace(NODES[0], num_gpus=0),))
            ),
            "the run asks for 8 GPUs, the cluster has 0",
        ),
        (facts_with({"trainer.device": "cuda"}), "asks for 1 GPUs, this machine has 0"),
        (
            facts_with(ON_CPU | {"trainer.cpus_per_process": 80}, ray=CLUSTER),
            "2 processes reserve 80 of Ray's CPUs each, the cluster has 128",
        ),
        (
            facts_with(
                TWO_NODES | {"trainer.rollout_pool.nnodes": 1, "trainer.rollout_pool.n_gpus_per_node": 8},
                ray=CLUSTER,
            ),
            "the run asks for 24 GPUs, the cluster has 16",
        ),
        (
            facts_with(TWO_NODES, ray=RayCluster("a:1", nodes=(NODES[0], replace(NODES[1], is_alive=False)))),
            "the cluster has 1 nodes with 8 GPUs (node2 left it)",
        ),
    ],
    "driver-node": [
        (
            facts_with(TWO_NODES, here=machine_with(addresses=("10.9.9.9",)), ray=CLUSTER),
            "is no node of the cluster",
        ),
    ],
    "ray-files": [
        (
            facts_with(
                ON_CPU,
                ray=RayCluster(None, folder_problem="RAY_TMPDIR=/nfs is on nfs. Set RAY_TMPDIR to /x."),
            ),
            "Do: Set RAY_TMPDIR to /x",
        ),
        (
            facts_with(ON_CPU, ray=RayCluster(None, folder_note="Ray works in /tmp/ray: /home is nfs")),
            "Ray works in",
        ),
    ],
    "nodes": [(facts_with(TWO_NODES, ray=replace(CLUSTER, silent=("node2",))), "the node node2 did not run")],
    "network-card": [
        (
            facts_with(
                TWO_NODES, here=machine_with(cards=(Card("eth0", ("10.0.0.1",)), Card("ib0", ("10.1.0.1",))))
            ),
            "eth0 (10.0.0.1), ib0 (10.1.0.1)",
        ),
        (
            facts_with(TWO_NODES, here=machine_with(environment={"NCCL_SOCKET_IFNAME": "=eth7"})),
            "NCCL_SOCKET_IFNAME==eth7 names no card",
        ),
        (
            facts_with(TWO_NODES, here=machine_with(environment={"GLOO_SOCKET_IFNAME": "eth"})),
            "names no card",
        ),
    ],
    "clock": [
        (
            facts_with(
                TWO_NODES, nodes=(machine_with(name="node2", clock_offset_s=-7.5, clock_error_s=0.1),)
            ),
            "node2: its clock is 7.5 s behind the driver's",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "facts", "said"),
    [
        pytest.param(name, *case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_a_check_finds_its_trouble_and_says_what_to_do(name, facts, said):
    lines = [finding.line for finding in found(facts, name)]
    assert any(said in line for line in lines), lines
    assert all("\n" not in line and ". Do: " in line for line in lines)


def test_every_check_has_a_case():
    elsewhere = {"proxy", "port"} | {"gpu-shared", "gpu-twice", "cuda", "nccl", "gpu-health"}
    assert set(chosen()) == CASES.keys() | elsewhere


@pytest.mark.parametrize(
    "facts",
    [
        facts_with(),
        facts_with(ON_CPU | {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 2}, ray=RayCluster(None)),
        facts_with(
            ON_CPU, ray=CLUSTER, nodes=(machine_with(), machine_with(name="node2", addresses=("10.0.0.2",)))
        ),
        facts_with(TWO_NODES, ray=CLUSTER, here=machine_with(num_gpus=8)),
        facts_with({"trainer.save_freq": 10}, models=(BIG,)),
        facts_with({"trainer.logger": ["wandb"]}, here=machine_with(has_wandb_key=True)),
        facts_with({"trainer.logger": ["wandb"]}, here=machine_with(environment={"WANDB_MODE": "offline"})),
        facts_with(corpus=Corpus("/wiki.jsonl", CORPUS)),
        facts_with({"do_search": False}, here=machine_with(servers=())),
        facts_with(ON_CPU, ray=CLUSTER, here=machine_with(open_files=(1024, 65536))),
        facts_with(here=machine_with(open_files=(1024, 4096))),
        Facts(machine_with()),
        Facts(machine_with(), ray=RayCluster(None)),
        Facts(machine_with(), ray=CLUSTER, nodes=(machine_with(), machine_with(name="node2"))),
        # a cache of models that can only be read, and holds the model
        facts_with(
            models=(replace(BIG, path="Qwen/Qwen2.5-7B", where="cache"),),
            here=machine_with(places=(*small_disk(1e13), Place("models from the hub", "/hub", "Read-only"))),
        ),
        # the driver on a small node without GPUs; the processes are on others
        facts_with(TWO_NODES | {"trainer.device": "auto"}, models=(BIG,), ray=CLUSTER, here=SMALL),
        facts_with({"trainer.backend": "ray"}, models=(BIG,), ray=CLUSTER, here=SMALL),
        # somebody else's server, whose /health has other words
        facts_with(here=machine_with(servers=(server(health={"status": "ok", "corpus": "wiki-18"}),))),
        # positions that the settings replace
        facts_with(
            {
                "data.max_prompt_length": 40000,
                "actor_rollout_ref.model.override_config": {"max_position_embeddings": 131072},
            }
        ),
        # a busy GPU that is somebody else's
        facts_with(
            here=machine_with(
                environment={"CUDA_VISIBLE_DEVICES": "GPU-a"},
                num_gpus=1,
                gpus=(Gpu(0, "GPU-abc", "H100", 80, 0), Gpu(1, "GPU-bcd", "H100", 80, 70)),
            )
        ),
    ],
)
def test_healthy_facts_have_no_findings(facts):
    assert found(facts) == []


def test_only_checks_that_have_something_to_look_at_count_as_looking():
    def names(facts):
        return set(chosen()) - set(without_a_look(facts, chosen()))

    alone = names(Facts(machine_with(places=(HOME,), servers=())))
    assert alone == {"home", "open-files", "gpu-shared", "cuda", "nccl", "gpu-health"}
    with_ray = names(Facts(machine_with(servers=()), ray=RayCluster(None)))
    assert with_ray - alone == {"writable", "ray-disk", "port", "ray-address", "ray-files"}
    nodes = (machine_with(servers=()), machine_with(name="node2", servers=()))
    cluster = names(Facts(machine_with(servers=()), ray=CLUSTER, nodes=nodes))
    of_nodes = {"shared-paths", "versions", "driver-node", "nodes", "clock", "gpu-twice", "network-card"}
    assert cluster - with_ray == of_nodes - {"shared-paths"} | {"cpus", "memory", "shm"}
    of_a_run = facts_with(TWO_NODES, ray=CLUSTER, nodes=nodes, index=Index("/i"))
    assert names(replace(of_a_run, here=machine_with(), nodes=(machine_with(),))) == set(chosen()) - {
        "ray-files"
    }


def test_facts_survive_the_way_through_a_file():
    facts = facts_with(
        TWO_NODES, ray=CLUSTER, nodes=(machine_with(),), corpus=Corpus("/c", CORPUS), index=Index("/i")
    )
    assert from_json(Facts, to_json(facts)) == facts


def test_what_several_machines_have_is_said_once_with_their_names():
    small = {"open_files": (10, 10)}
    nodes = tuple(machine_with(name=f"node{i}", **small) for i in range(6))
    (finding,) = found(facts_with(ON_CPU, nodes=nodes), "open-files")
    assert finding.machines == tuple(f"node{i}" for i in range(6))
    assert "[open-files] node0, node1, node2, node3 and 2 more: " in finding.line


def test_errors_come_before_warnings_and_are_counted_apart():
    facts = facts_with(
        here=machine_with(servers=(server(problem="refused"),), places=(replace(HOME, problem="full"),))
    )
    findings = diagnose(facts)
    assert [finding.level for finding in findings] == [Level.ERROR, Level.WARNING]
    told = as_json(findings, chosen(), without_a_look(facts, chosen()))
    assert "ray-address" in told["without_a_look"] and "ray-address" not in told["checks"]
    assert (told["errors"], told["warnings"]) == (1, 1)
    assert told["findings"][0]["check"] == "retriever" and told["findings"][0]["level"] == "error"


def test_checks_can_be_chosen_and_left_out_by_name():
    facts = facts_with(here=machine_with(servers=(server(problem="refused"),)))
    assert [finding.check for finding in diagnose(facts, only=["retriever", "home"])] == ["retriever"]
    assert diagnose(facts, skip=["retriever"]) == []
    with pytest.raises(ValueError, match="no check named 'retreiver' .did you mean retriever"):
        diagnose(facts, skip=["retreiver"])


def test_two_checks_can_not_have_one_name():
    chosen()
    with pytest.raises(AssertionError):
        check("home")(CHECKS["home"].judge)


def test_one_finding_is_kept_of_the_same_words():
    assert len(merged([error("a", "b", "c"), error("a", "b", "c")])) == 1


def test_a_server_on_a_port_of_another_program_is_one_error_that_names_the_program():
    held = server(url="http://127.0.0.1:8000/retrieve", problem="404", health={}, holder="nginx (pid 7)")
    (finding,) = found(facts_with(here=machine_with(servers=(held,))), "port", "retriever")
    assert "held by nginx (pid 7)" in finding.what and "--port 8001" in finding.do
    assert URL not in finding.line

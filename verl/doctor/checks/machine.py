"""Checks of what a machine allows: open files, memory, cores, shared memory; and that machines are alike."""

from __future__ import annotations

from collections.abc import Iterator

from verl.doctor import needs
from verl.doctor.facts import Facts, Machine, Run
from verl.doctor.facts_run import SFT
from verl.doctor.findings import Finding, error, warning
from verl.doctor.registry import check, check_each
from verl.trainer.config.keys import ACTOR, ROLLOUT

BASE_FILES, RAY_FILES = 256, 4096
OBJECT_STORE_SHARE = 0.3  # of the memory, what Ray gives to its object store
SMALLEST_STORE_LIMIT = 10e9  # Ray does not ask for less than this because of a small /dev/shm
STORE_LIMIT_SHARE = 0.6


@check_each("open-files")
def find_few_open_files(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """`ulimit -n` below what the run opens"""
    run, (soft, hard) = facts.run, machine.open_files
    needed, can_raise = BASE_FILES, False
    if facts.uses_ray:
        needed, can_raise = RAY_FILES, True  # Ray raises the soft limit itself
    if run is not None and run.get(f"{ROLLOUT}.placement") == "apart":
        needed, can_raise = needed + 2 * run[f"{ROLLOUT}.max_num_seqs"], False
    which = "a" if run is None else "this"
    if (hard if can_raise else soft) < needed:
        yield warning(
            f"`ulimit -n` allows {hard if can_raise else soft} open files, {which} run may need {needed}",
            "connections and worker processes fail with 'Too many open files', often hours later",
            f"ulimit -n {needed if hard >= needed else hard}"
            + (
                ""
                if hard >= needed
                else f" (more than {hard}: the administrator, in limits.conf or LimitNOFILE=)"
            ),
        )


@check_each("cpus", needs.uses_of_ray)
def find_cpus_counted_wrong(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """more cores counted by Ray than the control group or the affinity allows"""
    if not facts.uses_ray:
        return
    counted = machine.num_cpus_ray
    if facts.ray is not None and facts.nodes:
        listed = [node.num_cpus for node in facts.ray.alive if node.address in machine.addresses]
        counted = listed[0] if listed else counted
    if counted >= machine.num_cpus + 1:
        cpus = max(1, int(machine.num_cpus))
        yield warning(
            f"Ray counts {counted:.0f} cores, this job may use {machine.num_cpus:.3g}",
            "it starts that many processes at once, and all of them share the few cores",
            f"ray start ... --num-cpus={cpus} (with `--head` on this machine, and export "
            "RAY_ADDRESS=<it>:6379)",
        )


@check_each("memory", needs.memory)
def find_little_memory(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """a memory limit below what the run, or Ray's object store, takes"""
    limit = machine.memory_limit_bytes or machine.memory_bytes
    source = "the control group's memory limit" if machine.memory_limit_bytes else "this machine's memory"
    if facts.run is not None and facts.run.program != SFT:
        needed = host_bytes(facts.run, facts, machine)
        if needed > limit:
            yield error(
                f"{source} is {_gb(limit)}, weights, gradients and optimizer states need {_gb(needed)}",
                "the kernel would kill the processes, without a word in their log",
                "ask for more memory (sbatch --mem=...) or more nodes; trainer.dry_run=true shows the plan",
            )
    store = [
        node.object_store_bytes
        for node in (facts.ray.alive if facts.ray else ())
        if node.address in machine.addresses
    ]
    if store and store[0] > STORE_LIMIT_SHARE * limit:
        yield warning(
            f"Ray's object store may take {_gb(store[0])}, {source} is {_gb(limit)}",
            "the kernel would kill the node's processes before the store is full",
            f"ray start ... --object-store-memory={int(OBJECT_STORE_SHARE * limit)}",
        )


def host_bytes(run: Run, facts: Facts, machine: Machine) -> float:
    """Memory of one machine that weights, gradients and AdamW's states of its processes take, at least; 0
    with GPUs, where they are in the GPUs' memory, be it on other nodes."""
    has_gpus = machine.num_gpus or any(node.num_gpus for node in (facts.ray.alive if facts.ray else ()))
    if run.num_gpus_asked or (run["trainer.device"] == "auto" and has_gpus):
        return 0.0
    params = {model.key: model.num_params or 0 for model in facts.models}
    policy = params.get("actor_rollout_ref.model.path", 0)
    width = 2 if run[f"{ACTOR}.fsdp_config.model_dtype"] == "bf16" else 4
    lora = run["actor_rollout_ref.model.lora_rank"] > 0
    trains = not run["trainer.val_only"]
    sharded = policy * (width if lora or not trains else 4 * width)
    if trains and run["algorithm.adv_estimator"] == "gae":
        sharded += params.get("critic.model.path", policy) * 4 * width
    share = run["trainer.n_gpus_per_node"] / run.num_training_processes
    return sharded * share


@check_each("shm", needs.uses_of_ray)
def find_small_shm(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """/dev/shm too small for Ray's object store"""
    free = machine.shm_bytes
    if not facts.uses_ray or free is None:
        return
    memory = min(machine.memory_bytes, machine.memory_limit_bytes or machine.memory_bytes)
    wanted = min(OBJECT_STORE_SHARE * memory, max(SMALLEST_STORE_LIMIT, free))
    if free < wanted:
        yield warning(
            f"/dev/shm has {_gb(free)} free, Ray's object store wants {_gb(wanted)}",
            "Ray keeps its objects on disk instead, and every batch goes through files",
            f"docker run --shm-size={-(-int(wanted) // 10**9)}g ..., or mount -o "
            f"remount,size={-(-int(wanted) // 10**9)}g "
            "/dev/shm, or rm what is left in /dev/shm",
        )


@check_each("threads", needs.a_run)
def find_too_many_threads(facts: Facts, machine: Machine) -> Iterator[Finding]:
    """OMP_NUM_THREADS times the processes of a machine above its cores"""
    run, text = facts.run, machine.environment.get("OMP_NUM_THREADS", "")
    if run is None or not text.isdigit() or machine.num_gpus:
        return
    processes = run["trainer.n_gpus_per_node"]
    if processes > 1 and int(text) > 1 and int(text) * processes > machine.num_cpus:
        yield warning(
            f"OMP_NUM_THREADS={text} for each of {processes} processes, on {machine.num_cpus:.3g} cores",
            "with more busy threads than cores a process is 3 to 5 times slower",
            f"export OMP_NUM_THREADS={max(1, int(machine.num_cpus) // processes)}",
        )


@check("versions", needs.nodes)
def find_different_versions(facts: Facts) -> Iterator[Finding]:
    """nodes with other versions of Python, torch, Ray or transformers than the driver"""
    here = facts.here.software
    for name in ("python", "torch", "ray", "transformers"):
        ours = getattr(here, name)
        others = {getattr(node.software, name) or "none" for node in facts.nodes} - {ours}
        if name == "python":
            others = {version for version in others if _minor(version) != _minor(ours or "")}
        if others:
            nodes = [node.name for node in facts.nodes if (getattr(node.software, name) or "none") in others]
            yield error(
                f"{name} is {ours} here and {', '.join(sorted(others))} on {', '.join(nodes)}",
                "objects and collectives between them fail, or give wrong numbers",
                "on each node: pip install -c constraints.txt -e '.[train]' (or one environment that all "
                "share)",
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
